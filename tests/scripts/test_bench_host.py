"""`python scripts bench host`: the peers' fields, the peers' hits, and what it refuses."""

import itertools
import json
import random

import pytest

from jaxkv.cli import console
from jaxkv.replay import workloads
from scripts.bench import host as bench_host
from tests.cli.test_console import run_scripts
from tests.scripts import peers_workloads

FIELDS = {
    "system", "page", "workload", "window", "requests", "prompt_tokens", "hit_tokens", "hit_rate",
    "host_cpu_s", "cpu_us_per_req", "cpu_op_us", "host_s", "wall_s", "us_per_req", "per_op_us",
    "total_op_s", "max_op_ms", "evict_calls", "evicted_tokens", "rss_delta_mb", "peak_rss_mb",
}  # fmt: skip


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command on the first 60 requests; returns exit code, output and error."""
    stream = bench_host.stream

    def short(*args):
        requests, capacity = stream(*args)
        return itertools.islice(requests, 60), capacity // 10

    monkeypatch.setattr(bench_host, "stream", short)

    def run(*arguments: str) -> tuple[object, str, str]:
        try:
            code: object = console.run(bench_host.main, list(arguments))
        except SystemExit as stop:  # argparse's way
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize("page", [1, 16])
def test_json_is_one_object_with_the_fields_that_peers_rows_have(run, page):
    code, out, err = run("--workload", "W3", "--page", str(page), "--json")
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert result.keys() == FIELDS
    assert (result["requests"], result["prompt_tokens"]) == (60, 60 * 1024)
    assert (result["hit_tokens"], result["page"], result["workload"]) == (0, page, "W3")
    assert result["evicted_tokens"] >= 40 * 1024
    assert result["cpu_us_per_req"] == pytest.approx(sum(result["cpu_op_us"].values()), abs=0.2)


def test_hits_are_counted_to_the_token(run):
    _, out, _ = run("--workload", "W1", "--json")
    # After the first of each of 8 system prompts, those of 512 that are still there are hits.
    assert json.loads(out)["hit_tokens"] == 52 * 512


def test_eviction_and_decoding_have_rows_of_their_own(run):
    _, out, _ = run("--workload", "W5", "--leaves", "50", "--json")
    row = json.loads(out)
    assert row["leaves"] == 50
    assert 0 < row["alloc_with_evict_us_p50"] <= row["p95"] <= row["max"]
    for workload in ("W6", "step"):
        _, out, _ = run("--workload", workload, "--json")
        row = json.loads(out)
        assert 0 < row["step_us_p50"] <= row["step_us_max"]
        assert row["batch"] == 64


def test_without_json_the_rows_are_for_people(run):
    code, out, _ = run("--workload", "W2")
    assert code == 0
    assert out.startswith("W2, page 16\n")
    assert "hit_rate" in out


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--workload", "W9"], "invalid choice: 'W9'"),
        (["--page", "0"], "--page must be at least 1"),
        (["--workload", "W5", "--leaves", "0"], "--leaves must be at least 1"),
        (["--workload", "W4", "--trace", "no/such.jsonl"], "no/such.jsonl: No such file"),
    ],
)
def test_a_users_mistake_is_one_line(run, arguments, complaint):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1


def test_a_trace_of_hashed_blocks_is_expanded_and_what_is_too_long_is_left_out(run, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 5, "output_length": 80, "hash_ids": [1, 2]},
        {"timestamp": 6, "output_length": 1, "hash_ids": [1, 2, 3]},
        {"timestamp": 7, "output_length": 1, "hash_ids": list(range(300))},
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    (first, answer), (second, _) = workloads.hashed_blocks(trace)
    assert (len(first), len(second), answer) == (128, 192, [5, 6, 7, 8, 9, 10, 11, 12, 13, 14])
    assert second[:128] == first
    _, out, _ = run("--workload", "W4", "--trace", str(trace), "--json")
    assert json.loads(out)["hit_tokens"] == 128


@pytest.mark.parametrize("name", peers_workloads.CAPACITIES)
def test_requests_are_those_that_the_peers_were_given(name, data):
    """So that jaxkv's rows and those of other systems measure the same work."""
    requests, capacity = workloads.stream(name, data / "conversation_trace.jsonl")
    assert capacity == peers_workloads.CAPACITIES[name]
    theirs = peers_workloads.requests(name, data / "conversation_trace.jsonl")
    assert list(itertools.islice(requests, 120)) == list(itertools.islice(theirs, 120))


def test_random_tokens_do_not_depend_on_how_many_are_drawn_at_once():
    one, other = random.Random(9), random.Random(9)
    draw = workloads.random_tokens
    assert draw(one, 50) == draw(other, 20) + draw(other, 30)


def test_help_teaches_the_workloads_and_loads_no_jax():
    result = run_scripts("bench", "host", "--help")
    assert result.returncode == 0
    for name in bench_host.WORKLOADS:
        assert f"  {name} " in result.stdout
    assert "bench host --workload W1 --page 16 --json" in result.stdout
