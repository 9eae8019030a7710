"""What a fresh clone promises: a typed wheel, a Makefile that finds its Python, no index named."""

import os
import re
import subprocess
import sys
import sysconfig
import time
import tomllib
from pathlib import Path

import pytest

from tests.models.tiny_checkpoint import write_gguf

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder, with a space in its name, that holds what `make` needs to begin."""
    folder = tmp_path / "a clone"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        (folder / name).write_text((ROOT / name).read_text())
    return folder


def make(folder: Path, *arguments: str, path: str = "/usr/bin:/bin") -> subprocess.CompletedProcess:
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env={"PATH": path, "HOME": str(folder)},
        capture_output=True,
        text=True,
    )


def fake_python(folder: Path, name: str, version: str) -> Path:
    """A program that answers the Makefile as that Python would, and writes down what it ran."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    fits = tuple(map(int, version.split("."))) >= (3, 12)
    program.write_text(
        f'#!/bin/sh\necho "{name} $*" >>"$HOME/ran"\n'
        f'case "$1" in --version) echo "Python {version}";; -c) exit {0 if fits else 1};; '
        f'-m) mkdir -p .venv/bin; [ -e .venv/bin/python ] || cp "$0" .venv/bin/python;; esac\n'
    )
    program.chmod(0o755)
    return program


def tools_without_python(folder: Path) -> str:
    """A PATH that has what the Makefile calls, and no Python."""
    for tool in ("make", "sh", "ls", "sort", "sed"):
        (found,) = [p for p in (Path("/usr/bin", tool), Path("/bin", tool)) if p.exists()][:1]
        (folder / "tools").mkdir(exist_ok=True)
        (folder / "tools" / tool).symlink_to(found)
    return str(folder / "tools")


def test_the_wheel_holds_two_packages_and_each_is_typed():
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(packages) == ["jaxkv", "pallas_kernels"]
    for package in packages:
        assert (ROOT / package / "__init__.py").is_file()
        assert (ROOT / package / "py.typed").is_file()


def test_the_type_checker_reads_all_that_the_wheel_holds_and_the_scripts():
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(PROJECT["tool"]["pyright"]["include"]) == {*packages, "jaxkv/models", "scripts"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A new environment with the wheel installed; its dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), ROOT]
    subprocess.run(build, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    (wheel,) = folder.glob("*.whl")
    install = [*pip, "--python", str(folder / "env"), "install", "--no-deps", str(wheel)]
    subprocess.run(install, check=True)
    # A path that a .pth file adds comes last, and the .pth files in it (such as that of an editable
    # install) are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "env"


def test_the_wheel_installs_two_top_level_packages(installed):
    (packages,) = installed.glob("lib/python*/site-packages")
    names = {path.name for path in packages.iterdir() if path.suffix not in (".dist-info", ".pth")}
    assert names == {"jaxkv", "pallas_kernels"}


def test_the_installed_command_decodes_beside_a_users_own_models_module(installed, tmp_path):
    (tmp_path / "models.py").write_text("raise RuntimeError('a module of the user')")
    model = write_gguf(tmp_path / "tiny.gguf")
    command = [installed / "bin" / "jaxkv", "decode", "--model", str(model), "--raw"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        [*command, "--max-new-tokens", "4", "--json", "a"],
        cwd=tmp_path,
        env=environment | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert '"finish_reason"' in result.stdout


@pytest.mark.parametrize("name", ["Makefile", "pyproject.toml", ".ci/run"])
def test_no_file_of_the_set_up_names_a_host(name):
    assert re.findall(r"\w+://|index-url|--index|find-links", (ROOT / name).read_text()) == []


def test_make_alone_lists_every_target(clone):
    targets = re.search(r"^\.PHONY: (.*)$", (clone / "Makefile").read_text(), re.M)
    assert targets is not None
    listed = re.findall(r"^make (\S+) +\S", make(clone).stdout, re.M)
    assert sorted(listed) == sorted(targets[1].split())


def test_make_takes_the_newest_python_that_fits_over_those_that_do_not(clone):
    path = tools_without_python(clone)
    fake_python(clone / "tools", "python3", "3.11.2")
    for version in ("3.12.9", "3.12.10", "3.9.1"):
        fake_python(clone / f".pyenv/versions/{version}/bin", "python", version)
    plan = make(clone, "--dry-run", "setup", path=path)
    assert f'"{clone}/.pyenv/versions/3.12.10/bin/python" -m venv' in plan.stdout
    assert (clone / "ran").read_text().startswith("python3 -c")  # tried first, and refused


def test_make_sets_up_once_and_again_when_the_project_changes(clone):
    python = fake_python(clone / "bin", "python3.12", "3.12.1")

    def installs_after_set_up() -> int:
        result = make(clone, "setup", path=f"{python.parent}:/usr/bin:/bin")
        assert result.returncode == 0, result.stderr
        return (clone / "ran").read_text().count("--editable")

    assert [installs_after_set_up(), installs_after_set_up()] == [1, 1]
    # A minute ahead: a file system's clock may be too coarse to tell this change from the set-up.
    later = time.time() + 60
    os.utime(clone / "pyproject.toml", (later, later))
    assert installs_after_set_up() == 2


def test_make_says_in_one_line_what_to_install_where_no_python_fits(clone):
    path = tools_without_python(clone)
    result = make(clone, "demo", path=path)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "install one" in result.stderr


@pytest.mark.parametrize(
    "version, complaint", [("3.11.2", "is Python 3.11.2:"), (None, "does not run:")]
)
@pytest.mark.parametrize("has_venv", [False, True], ids=["fresh", "with .venv"])
def test_make_refuses_a_python_that_will_not_do_in_one_line(clone, version, complaint, has_venv):
    if has_venv:
        fake_python(clone / ".venv/bin", "python", "3.12.1")
        (clone / ".venv/.ready").touch()
    python = fake_python(clone / "bin", "old", version) if version else clone / "absent"
    result = make(clone, "test", f"PYTHON={python}")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert f"PYTHON={python} {complaint}" in result.stderr
