"""`python scripts decode`: what it prints, what it refuses, and that only a bad prompt fails."""

import io
import json
import sys
from pathlib import Path

import pytest

from jaxkv.cli import console, decode
from tests.models.tiny_checkpoint import CONFIG, write_hf


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_hf(tmp_path_factory.mktemp("decode") / "model")


@pytest.fixture
def run(model, monkeypatch, capsys):
    """Runs the command on the tiny model; returns exit code, standard output and error."""
    monkeypatch.setattr(console, "enable_compilation_cache", lambda: None)

    def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        argv = ["--model", str(model), "--max-new-tokens", "6", "--batch", "3", *arguments]
        try:
            code = console.run(decode.main, argv)
        except SystemExit as stop:  # argparse's way
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def records(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def test_json_has_a_line_for_each_prompt_in_order_and_then_the_totals(run):
    code, out, _ = run("--json", "the one", "two", "three")
    *answers, totals = records(out)
    assert code == 0
    assert [answer["prompt"] for answer in answers] == ["the one", "two", "three"]
    assert all(len(answer["tokens"]) == 6 for answer in answers)
    assert totals["prefill_tokens"] == sum(answer["prompt_tokens"] for answer in answers)
    assert 0 < totals["kv_bytes_used"] <= totals["kv_bytes_reserved"]
    assert totals["decode_tokens"] == 3 * 5


def test_a_prompt_gets_the_same_answer_alone_in_a_batch_and_at_other_sizes(run):
    _, out, _ = run("--json", "the one", "a much longer second prompt", "x")
    batched = [answer["tokens"] for answer in records(out)[:-1]]
    for i, prompt in enumerate(("the one", "a much longer second prompt", "x")):
        _, out, _ = run("--json", "--page-size", "8", "--chunk", "5", prompt)
        assert records(out)[0]["tokens"] == batched[i]


def test_prompts_come_from_a_file_or_standard_input_without_blank_lines(run, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    _, from_file, _ = run("--json", "--prompts", str(tmp_path / "prompts.txt"))
    _, from_stdin, _ = run("--json", stdin=b"one\n  \ntwo\n")
    assert [r["prompt"] for r in records(from_file)[:-1]] == ["one", "two"]
    tokens = [[r.get("tokens") for r in records(out)] for out in (from_file, from_stdin)]
    assert tokens[0] == tokens[1]


def test_a_single_prompt_prints_its_answer_and_then_the_speeds(run):
    code, out, err = run("the one")
    assert code == 0
    assert out.endswith("\n")
    assert "tokens/s" in err and "reserved" in err


def test_sampling_repeats_with_its_seed_and_differs_with_another(run):
    answers = [
        records(run("--json", "--temperature", "1.5", "--seed", seed, "the one")[1])[0]["tokens"]
        for seed in ("7", "7", "8")
    ]
    assert answers[0] == answers[1] != answers[2]


def test_logprobs_are_reported_with_the_likeliest_tokens(run):
    _, out, _ = run("--json", "--logprobs", "3", "the one")
    answer = records(out)[0]
    assert [entry["token"] for entry in answer["logprobs"]] == answer["tokens"]
    for entry in answer["logprobs"]:
        assert len(entry["top"]) == 3
        assert entry["top"][0] == [entry["token"], entry["logprob"]]  # greedy


@pytest.mark.parametrize("how", ["empty", "too long"])
def test_a_bad_prompt_in_a_batch_fails_alone_with_one_line_and_code_2(run, how):
    bad = "" if how == "empty" else "x" * (CONFIG["max_position_embeddings"] + 1)
    code, out, err = run("--raw", "--json", "the one", bad)
    good, failed, _ = records(out)
    assert code == console.EXIT_USER_ERROR
    assert len(good["tokens"]) == 6
    assert failed["error"] in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        pytest.param(["--temperature", "-1", "x"], b"", "temperature", id="temperature"),
        pytest.param(["--top-p", "0", "x"], b"", "top_p", id="top-p"),
        pytest.param(["--seed", "-1", "x"], b"", "seed", id="seed"),
        pytest.param(["--stop", "", "x"], b"", "stop", id="stop"),
        pytest.param(["--logprobs", "99", "x"], b"", "logprobs", id="logprobs"),
        pytest.param(["--max-new-tokens", "-3", "x"], b"", "max_new_tokens", id="new tokens"),
        pytest.param(["--temperature", "nan", "x"], b"", "finite", id="not a number"),
        pytest.param(["--page-size", "3", "x"], b"", "page_size", id="page size"),
        pytest.param(["--page-size", "0", "x"], b"", "page_size", id="no page size"),
        pytest.param(["--pool-tokens", str(10**12), "x"], b"", "pool_tokens", id="huge pool"),
        pytest.param(["--batch", "0", "x"], b"", "max_sequences", id="batch"),
        pytest.param(["--chunk", "0", "x"], b"", "token_budget", id="chunk"),
        pytest.param(["--pool-tokens", "0", "x"], b"", "pool_tokens", id="pool"),
        pytest.param(["--backend", "cuda", "x"], b"", "--backend", id="backend"),
        pytest.param(["--kv-format", "int3", "x"], b"", "no KV format 'int3'", id="format"),
        pytest.param(["--dtype", "int8", "x"], b"", "--dtype", id="dtype"),
        pytest.param(["--model", "no-such-model", "x"], b"", "no-such-model", id="model"),
        pytest.param(["--prompts", "no-such-file"], b"", "no-such-file", id="file"),
        pytest.param(["--prompts", "f", "x"], b"", "not both", id="two sources"),
        pytest.param([], b"", "no prompt", id="nothing"),
        pytest.param([], b"a\xff", "UTF-8", id="not UTF-8"),
        pytest.param(["--raw", "--system", "s", "x"], b"", "--system", id="system without chat"),
    ],
)
def test_a_wrong_argument_or_input_is_one_line_and_code_2(run, arguments, stdin, message):
    code, _, err = run(*arguments, stdin=stdin)
    assert code == console.EXIT_USER_ERROR
    assert message in err
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1


def test_a_closed_standard_input_is_one_line_and_code_2(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert console.run(decode.main, []) == console.EXIT_USER_ERROR
    assert "standard input is closed" in capsys.readouterr().err


def test_json_has_its_lines_where_every_prompt_failed(run):
    code, out, _ = run("--raw", "--json", "", "\udcff")
    assert code == console.EXIT_USER_ERROR
    assert [sorted(record) for record in records(out)[:-1]] == [["error", "prompt"]] * 2
