"""`python scripts` and what its commands share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxkv.cli import console
from jaxkv.cli.commands import Command, commands, listing
from jaxkv.engine.request import RequestError
from jaxkv.models.errors import ModelError
from scripts.__main__ import FOLDER, known_commands, main


def run_scripts(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, FOLDER, *arguments], capture_output=True, text=True, **options
    )


def raiser(error: BaseException):
    def main(argv: list[str]) -> int:
        raise error

    return main


def test_commands_are_the_modules_with_a_main(tmp_path):
    sources = {
        "decode.py": '"""Decodes prompts.\n\nAt length."""\n\ndef main(argv): ...\n',
        "bench_decode.py": '"""Times decoding."""\n\ndef main(argv): ...\n',
        "console.py": '"""Shared."""\n\ndef run(main): ...\n',
        "__main__.py": '"""Lists."""\n\ndef main(argv): ...\n',
    }
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    assert commands(tmp_path, "a.b") == {
        "bench decode": Command("a.b.bench_decode", "Times decoding"),
        "decode": Command("a.b.decode", "Decodes prompts"),
    }


def test_scripts_lists_its_commands_from_any_folder_without_loading_jax(tmp_path):
    result = run_scripts(cwd=tmp_path, env=os.environ | {"PYTHONVERBOSE": "1"})
    assert result.returncode == 0
    assert result.stdout == listing(known_commands(), "python scripts") + "\n"
    assert "import 'jaxkv.cli.console'" in result.stderr
    assert "import 'jax'" not in result.stderr


def test_an_unknown_command_is_named_above_the_list():
    result = run_scripts("no-such")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "no command is named 'no-such': `python scripts` lists them\n"


@pytest.mark.parametrize("words", [["simulate"], ["simulate", "--help"], ["simulate", "-h"]])
def test_the_first_word_of_some_commands_lists_these(capsys, words):
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for command in ("simulate fragmentation", "simulate macs", "simulate reuse"):
        assert f"  {command}" in out
    assert "decode" not in out


def test_an_unknown_second_word_is_named_with_those_that_there_are(capsys):
    assert main(["simulate", "odd"]) == 2
    line = "simulate has no 'odd': there are fragmentation, macs, reuse\n"
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize(
    "error, line, code",
    [
        (ModelError("model.gguf: cut short"), "model.gguf: cut short", 2),
        (RequestError("empty prompt"), "empty prompt", 2),
        (FileNotFoundError(2, "No such file", "in.txt"), "in.txt: No such file", 2),
        (KeyboardInterrupt(), "interrupted", 130),
    ],
    ids=["model", "request", "file", "ctrl-c"],
)
def test_a_users_mistake_is_one_line_and_no_traceback(capsys, error, line, code):
    assert console.run(raiser(error), []) == code
    assert capsys.readouterr() == ("", line + "\n")


@pytest.mark.parametrize("error", [ValueError("ours"), OSError(5, "ours"), KeyError("ours")])
def test_a_fault_of_ours_keeps_its_traceback(error):
    with pytest.raises(type(error), match="ours"):
        console.run(raiser(error), [])


def test_a_reader_that_goes_away_ends_the_run_in_one_line():
    program = (
        "import sys; from jaxkv.cli import console\n"
        "sys.exit(console.run(lambda argv: print('x' * 10**6) or 0, []))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=FOLDER.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    with process:
        process.stdout.close()
        stderr = process.stderr.read()
    assert (process.returncode, stderr.count(b"\n")) == (2, 1)


def test_a_wrong_argument_is_one_line_and_exit_code_2(capsys):
    parser = console.Parser("jaxkv decode", "Decodes.")
    parser.add_argument("--seed", type=int)
    with pytest.raises(SystemExit) as exit:
        parser.parse_args(["--seed", "x"])
    assert exit.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("jaxkv decode: argument --seed: invalid int value: 'x'")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    "num_bytes, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (98_362_432, "93.8 MiB"),
        (5 * 2**30, "5.00 GiB"),
    ],
)
def test_sizes_read_in_powers_of_1024(num_bytes, text):
    assert console.format_bytes(num_bytes) == text


@pytest.mark.parametrize("chosen", [None, "chosen"])
def test_compiled_programs_are_kept_for_the_next_process(tmp_path: Path, chosen: str | None):
    environment = os.environ | {"JAXKV_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    if chosen:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path / chosen)
    program = (
        "from jaxkv.cli import console; console.enable_compilation_cache()\n"
        "import jax; jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n"
        "jax.jit(lambda x: x * 2 + 1)(1.0)"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    subprocess.run(command, cwd=FOLDER.parent, env=environment, check=True)
    assert any((tmp_path / (chosen or "compiled")).iterdir())
    assert [path.name for path in tmp_path.iterdir()] == [chosen or "compiled"]
