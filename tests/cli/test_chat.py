"""`python scripts chat`: turns, commands, what it refuses, and the demo's trace."""

import io
import re
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from jaxkv.cli import chat, console, talk
from jaxkv.engine import PoolState
from jaxkv.llm import LLM
from jaxkv.models.loading import LoadedModel, load_model
from tests.cli.test_conversation import CHATML
from tests.models.tiny_checkpoint import write_hf

TURN = re.compile(
    r"\[turn (\d+): prompt (\d+) = (\d+) hit \+ (\d+) recomputed; (\d+) generated; "
    r"first token \d+\.\d+ s(, \d+\.\d+ s without the index)?\]"
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LoadedModel:
    found = load_model(str(write_hf(tmp_path_factory.mktemp("chat") / "model")))
    tokenizer = replace(found.require_tokenizer(), chat_template=CHATML)
    return replace(found, tokenizer=tokenizer)


@pytest.fixture
def run(loaded, monkeypatch, capsys):
    """Runs the command on the tiny model; returns exit code, standard output and error."""
    monkeypatch.setattr(console, "enable_compilation_cache", lambda: None)
    monkeypatch.setattr(console, "load_model", lambda args: loaded)
    monkeypatch.setattr(LLM, "warm_up", lambda self: None)  # has tests of its own

    def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        argv = ["--max-new-tokens", "5", "--chunk", "64", *arguments]
        try:
            code = console.run(chat.main, argv)
        except SystemExit as stop:  # argparse's way
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_lines_of_standard_input_are_turns_and_each_hits_all_that_was_computed(run):
    code, _, err = run("--system", "s", stdin=b"one\n\n  two\r\nthree")
    turns = [tuple(map(int, match.groups()[:5])) for match in TURN.finditer(err)]
    assert code == 0
    assert [turn[0] for turn in turns] == [1, 2, 3]
    assert all(prompt == hit + computed for _, prompt, hit, computed, _ in turns)
    assert [turn[4] for turn in turns] == [5, 5, 5]
    assert [turn[2] for turn in turns] == [0, *(turn[1] + 5 - 1 for turn in turns[:-1])]


def test_without_the_comparison_there_is_no_second_time(run):
    _, _, err = run("--no-compare", stdin=b"one\n")
    (match,) = TURN.finditer(err)
    assert match[6] is None


def test_commands_show_the_tree_start_anew_and_end(run):
    talk = b"/help\n/tree\none\n/tree\n/reset\none\n/quit\nnever said\n"
    code, out, err = run("--no-compare", stdin=talk)
    first, again = (tuple(map(int, match.groups()[:5])) for match in TURN.finditer(err))
    assert code == 0
    assert chat.HELP in out and "(the tree is empty)" in out and "a new conversation" in out
    assert '─ "<|im_start|>user\\n' in out  # the tree's first node
    assert (first[0], first[2]) == (1, 0)
    assert (again[0], again[1], again[3]) == (1, first[1], 1)  # all but the last token was cached


def test_what_is_wrong_with_a_turn_is_one_line_and_the_talk_goes_on(run):
    long = b"x" * 200
    code, _, err = run("--no-compare", "--pool-tokens", "96", stdin=b"/no\n" + long + b"\none\n")
    complaints = [line for line in err.splitlines() if not TURN.fullmatch(line)][1:]
    assert code == console.EXIT_USER_ERROR
    assert complaints[0] == "no command is named /no: /help lists them"
    assert "96 fit" in complaints[1] and "/reset starts a new one" in complaints[1]
    assert len(complaints) == 2
    assert len(TURN.findall(err)) == 1


def test_ctrl_d_ends_the_questions_and_ctrl_c_the_command(run, monkeypatch):
    typed = iter(["one", EOFError()])

    def answer(prompt: str) -> str:
        said = next(typed)
        if isinstance(said, BaseException):
            raise said
        return said

    monkeypatch.setattr("builtins.input", answer)
    assert list(chat._asked()) == ["one"]

    def interrupted(self, text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(chat.Chat, "say", interrupted)
    code, _, err = run(stdin=b"one\n")
    assert code == console.EXIT_INTERRUPTED
    assert err.splitlines()[-1] == "interrupted"


def test_the_demo_prints_a_trace_whose_sums_are_those_of_its_turns(run, monkeypatch):
    monkeypatch.setattr(chat, "DEMO_SYSTEM", "s")
    monkeypatch.setattr(chat, "DEMO_TURNS", ("one", "two"))
    code, out, err = run("--demo")
    turns = [tuple(map(int, match.groups()[:5])) for match in TURN.finditer(err)]
    rows = [line.split() for line in out.splitlines()[-4:-1]]
    assert code == 0
    assert [tuple(map(int, row[:5])) for row in rows[:2]] == turns
    assert rows[2][0] == "sum"
    sums = [sum(turn[i] for turn in turns) for i in range(1, 5)]
    assert list(map(int, rows[2][1:5])) == sums
    assert f"{sums[1]} of {sums[0]} prompt tokens were not computed again" in out


def test_the_demo_draws_what_was_cached_and_what_was_computed(run, monkeypatch, tmp_path):
    monkeypatch.setattr(chat, "DEMO_SYSTEM", "s")
    monkeypatch.setattr(chat, "DEMO_TURNS", ("one", "two"))
    code, _, err = run("--demo", "--no-compare", "--plot", str(tmp_path / "hits.svg"))
    texts = "".join(ElementTree.parse(tmp_path / "hits.svg").getroot().itertext())
    assert code == 0
    for match in TURN.finditer(err):
        assert match[4] in texts  # tokens that were computed
    assert "turn 2" in texts and "found in the cache" in texts


def test_a_trace_shows_every_layer_group_and_leaves_out_what_was_not_measured():
    turn = talk.Turn(
        prompt_tokens=100,
        cached_tokens=75,
        generated_tokens=9,
        first_token_seconds=0.5,
        uncached_seconds=None,
        pools=(PoolState(5, 2, 1), PoolState(3, 0, 4)),
    )
    head, row, total, saved = talk.trace([turn]).splitlines()
    assert " ".join(row.split()) == "1 100 75 25 9 75.0% 0.500 - 5/2/1 + 3/0/4"
    assert " ".join(total.split()) == "sum 100 75 25 9 75.0% 0.500 -"
    assert saved.endswith("75.0% of prefill")
    assert head.split("  ")[-1].strip() == "pages free/cached/held"


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        pytest.param(["--temperature", "-1"], b"", "temperature", id="temperature"),
        pytest.param(["--max-new-tokens", "0"], b"", "--max-new-tokens", id="new tokens"),
        pytest.param(["--page-size", "0"], b"", "page_size", id="page size"),
        pytest.param(["--pool-tokens", "0"], b"", "pool_tokens", id="pool"),
        pytest.param(["--kv-format", "int3"], b"", "no KV format 'int3'", id="format"),
        pytest.param(["--demo", "--system", "s"], b"", "--demo", id="demo with a system"),
        pytest.param(["--demo", "--temperature", "1"], b"", "--demo", id="demo sampled"),
        pytest.param(["--seed", "x"], b"", "--seed", id="seed"),
        pytest.param(["--plot", "a.svg"], b"", "--demo", id="plot without the demo"),
        pytest.param(["--demo", "--plot", "a.gif"], b"", ".svg", id="plot of no known kind"),
    ],
)
def test_a_wrong_argument_is_one_line_and_code_2(run, arguments, stdin, message):
    code, out, err = run(*arguments, stdin=stdin)
    assert (code, out) == (console.EXIT_USER_ERROR, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_input_that_is_not_utf8_is_named_by_its_line(run):
    code, _, err = run("--no-compare", stdin=b"/help\na\xff\n")
    assert code == console.EXIT_USER_ERROR
    assert err.splitlines()[-1] == "standard input: not UTF-8 text, at line 2, byte 1"


def test_a_closed_standard_input_is_one_line(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert console.run(chat.main, ["--no-compare"]) == console.EXIT_USER_ERROR
    assert capsys.readouterr().err.splitlines()[-1].endswith("standard input is closed")
