"""`python scripts ledger`, `plan`, `simulate ..` and `report`: their rows, files and refusals."""

import csv
import io
import json
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from types import ModuleType

import pytest

from jaxkv.cli import (
    console,
    ledger,
    plan,
    report,
    simulate_fragmentation,
    simulate_macs,
    simulate_reuse,
)
from jaxkv.ledger import preset
from jaxkv.ledger.quality import STAND_IN, measured
from tests.cli.test_console import run_scripts
from tests.ledger.test_memory import config
from tests.test_docs import ROOT

ROW = {
    "model", "context", "batch", "format", "bytes_per_token", "kv_bytes", "weight_bytes", "ratio",
}  # fmt: skip

Run = Callable[..., tuple[object, str, str]]


@pytest.fixture
def run(capsys) -> Run:
    """Runs a command; returns exit code, output and error."""

    def run(command: ModuleType, *arguments: str) -> tuple[object, str, str]:
        try:
            code: object = console.run(command.main, list(arguments))
        except SystemExit as stop:  # argparse's way
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * i, "input_length": 600, "output_length": 9, "hash_ids": [0, 1 + i // 2]}
        for i in range(20)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def rows_of(out: str) -> list[dict]:
    return json.loads(out)


def test_ledger_rows_are_of_each_model_context_batch_and_format(run):
    code, out, err = run(
        ledger, "--model", "llama-2-7b,llama-3.1-8b", "--context", "4k,32k,128k",
        "--format", "bf16,int8", "--batch", "1,2", "--json",
    )  # fmt: skip
    rows = rows_of(out)
    assert (code, len(rows)) == (0, 2 * 3 * 2 * 2)
    assert err == "note: llama-2-7b: was made for at most 4,096 tokens\n"
    assert all(row.keys() >= ROW for row in rows)
    (one,) = [
        row
        for row in rows
        if (row["model"], row["context"], row["batch"], row["format"])
        == ("llama-2-7b", 32_768, 2, "bf16")
    ]
    assert (one["bytes_per_token"], one["kv_bytes"]) == (524_288, 32 << 30)
    assert one["weight_bytes"] == 13_476_831_232
    assert one["ratio"] == one["kv_bytes"] / one["weight_bytes"]
    assert one["crossing_context"] == 12_849


def test_csv_has_the_same_rows_and_a_table_the_unit_in_its_head(run):
    arguments = ["--model", "llama-2-70b", "--context", "32k"]
    _, out, _ = run(ledger, *arguments, "--csv")
    (row,) = csv.DictReader(io.StringIO(out))
    assert (row["kv_bytes"], row["model"]) == (str(10 << 30), "llama-2-70b")
    _, binary, _ = run(ledger, *arguments)
    _, decimal, _ = run(ledger, *arguments, "--units", "GB")
    assert "| KV, GiB | weights, GiB |" in binary and "| 10.00 | 128.48 |" in binary
    assert "| KV, GB | weights, GB |" in decimal and "| 10.74 | 137.95 |" in decimal


def test_memory_and_bandwidth_add_what_fits_and_how_fast(run):
    arguments = ["--context", "4k", "--memory", "80GB", "--bandwidth", "3.35TB"]
    _, out, _ = run(ledger, *arguments, "--flops", "400T")
    assert (
        "| longest context | largest batch | ms per step | flops per byte | prefill, Tflop |" in out
    )
    arguments += ["--flops", "400T", "--json"]
    _, out, _ = run(ledger, *arguments)
    (row,) = rows_of(out)
    assert row["largest_context"] == 126_880
    assert row["largest_batch"] == (80 * 10**9 - row["weight_bytes"]) // (4_096 * 524_288)
    assert 0.004 < row["step_seconds"] < 0.005
    assert 0.8 < row["flops_per_byte"] < 1.1
    # Two operations for each weight and token, and attention's part of all.
    assert row["prefill_flops"] * (1 - row["attention_share"]) == pytest.approx(
        2 * 4_096 * 6.476e9, rel=1e-3
    )
    assert row["prefill_seconds"] == row["prefill_flops"] / 4e14
    _, out, _ = run(ledger, "--model", "llama-2-70b", *arguments)
    assert (rows_of(out)[0]["largest_context"], rows_of(out)[0]["largest_batch"]) == (0, 0)


def test_a_config_is_read_with_its_notes_in_sight(run, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(num_key_value_heads=None)))
    code, out, err = run(ledger, "--config", str(path), "--context", "1k")
    assert (code, err) == (0, "")
    assert "note: " in out and "num_key_value_heads is missing: taken as 8" in out
    _, out, err = run(ledger, "--config", str(tmp_path), "--context", "1k", "--json")
    assert rows_of(out)[0]["notes"][0] in err
    assert rows_of(out)[0]["model"] == tmp_path.name


HOSTILE = "_[b]$x\n\x1b[31m$y"


def test_names_with_control_characters_markup_and_formulas_are_shown_as_they_are(
    run, tmp_path, monkeypatch
):
    folder = tmp_path / HOSTILE
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(config()))
    shown = r"_[b]$x\n\x1b[31m$y"
    for arguments in ([], ["--plot", str(tmp_path / "a.svg")], ["--csv"]):
        code, out, err = run(ledger, "--config", str(path), "--context", "1k", *arguments)
        assert code == 0 and shown in out and "\x1b" not in out + err
    texts = "".join(ET.parse(tmp_path / "a.svg").getroot().itertext())
    assert f"{shown}, bf16" in texts and f"{shown}, weights in bf16" in texts
    path.write_text(json.dumps(config(**{"kv\n\x1b[31m": 1})))
    monkeypatch.chdir(folder)
    for arguments in (
        ["--config", str(path)],
        ["--config", str(path) + "\n"],
        ["--config", "."],
        ["--plot", "a\n\x1b.pdf"],
    ):
        code, out, err = run(ledger, *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "\x1b" not in err
    path.write_text(json.dumps(config()))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, out, _ = run(ledger, "--config", str(path), "--context", "1k")
    assert shown in out and "\x1b[31m" not in out  # but for what draws the table


def test_models_lists_every_preset_with_its_source(run):
    _, out, _ = run(ledger, "--models", "--json")
    rows = rows_of(out)
    assert len(rows) >= 25
    assert all(row["source"] and row["parameters"] > 0 for row in rows)


@pytest.mark.parametrize("width", [200, 80, 20])
def test_on_a_terminal_a_table_is_drawn_and_no_figure_is_cut(run, monkeypatch, width):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = run(ledger, "--context", "4k,32k", "--format", "bf16,int8")
    assert "\u2500" in out and "\u2026" not in out
    for figure in ("llama-2-7b", "524,288", "270,336", "32,768", "25,697", "16.00", "12.55"):
        assert figure in out


def test_plan_names_what_fits_with_the_measured_cost_of_its_format(run):
    code, out, _ = run(plan, "--model", "llama-3.1-8b", "--memory", "24GB", "--json")
    rows = rows_of(out)
    assert code == 0
    assert all(row["total_bytes"] <= 24 * 10**9 for row in rows)
    assert {row["kv_heads"] for row in rows} == {None, 4, 2, 1}
    assert {row["window"] for row in rows} == {None, 4_096}
    first = rows[0]
    assert (first["format"], first["measured_on"]) == ("bf16", STAND_IN)
    for row in rows:
        changed = row["kv_heads"] is not None or row["window"] is not None
        quality = measured("llama-3.1-8b", row["format"], row["page_size"])
        expected = None if changed or quality is None else quality.perplexity_ratio
        assert row["perplexity_ratio"] == expected
    _, out, _ = run(plan, "--model", "gemma3-270m", "--memory", "2GB", "--context", "8k")
    assert "| 0.9964 | gemma-3-270m |" in out
    assert "are shown" in out


def test_plan_says_how_much_is_missing_where_nothing_fits(run):
    code, out, err = run(plan, "--memory", "4GB")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "nothing fits: the smallest of" in err and "--memory is 3.73 GiB" in err


def test_a_plan_beyond_the_context_that_a_model_was_made_for_says_so(run):
    note = "note: llama-2-7b: was made for at most 4,096 tokens"
    arguments = ["--model", "llama-2-7b", "--memory", "80GB", "--context"]
    assert note not in run(plan, *arguments, "4k")[1]
    assert note in run(plan, *arguments, "8k")[1]


@pytest.mark.parametrize("nothing", ["0", "0GB"])
def test_a_plan_may_keep_nothing_free(run, nothing):
    arguments = ["--memory", "80GB", "--page-sizes", "16", "--csv"]
    assert run(plan, *arguments, "--reserve", nothing) == run(plan, *arguments)


def test_a_plan_for_latents_says_which_formats_they_do_not_have(run):
    code, out, _ = run(plan, "--model", "deepseek-v2-lite", "--memory", "80GB")
    assert code == 0
    assert "note: kivi4: needs K and V by head, but deepseek-v2-lite keeps latents" in out


def test_the_measured_costs_are_those_of_the_docs():
    tables = re.findall(
        r"\| format \| page \| perplexity.*?\n\n", (ROOT / "docs/kv_formats.md").read_text(), re.S
    )
    for model, table in zip((STAND_IN, "gemma-3-270m"), tables, strict=True):
        for line in table.strip().splitlines()[2:]:
            name, page, _, ratio, kl, p99, top1, _ = (x.strip() for x in line[1:-1].split("|"))
            found = measured(model, name, int(page))
            assert found is not None, name
            numbers = found.perplexity_ratio, found.kl_mean, found.kl_p99, found.top1
            assert numbers == tuple(map(float, (ratio, kl, p99, top1)))


def test_macs_grow_with_the_length_and_the_loops_agree(run):
    code, out, err = run(simulate_macs, "--tokens", "1,16,64,4k", "--json")
    rows = rows_of(out)
    assert (code, err) == (0, "")
    assert [row["loops"] for row in rows] == ["equal", "equal", "equal", "not run"]
    assert rows[0]["saved_ratio"] == 1.0
    assert rows[3]["saved_ratio"] > 1_000


def test_fragmentation_has_a_row_for_each_allocator_and_page_size(run, trace):
    for source in (["--requests", "60"], ["--trace", str(trace)]):
        code, out, err = run(simulate_fragmentation, *source, "--page-sizes", "4,16", "--json")
        rows = rows_of(out)
        assert (code, err) == (0, "")
        named = [(row["allocator"], row["page_size"]) for row in rows]
        assert named[:3] == [("max-length", None), ("buddy", None), ("oracle", None)]
        assert named[3:] == [("paged", 4), ("paged", 16)]
        assert rows[3]["waste"] < rows[4]["waste"] < rows[0]["waste"]


@pytest.mark.parametrize("length", ["1", "1m"])
def test_a_longest_length_that_nothing_fits_is_a_note_and_the_others_run(run, length):
    arguments = ["--requests", "9", "--page-sizes", "16", "--max-length", length]
    code, out, err = run(simulate_fragmentation, *arguments, "--json")
    assert code == 0
    assert [row["allocator"] for row in rows_of(out)] == ["buddy", "oracle", "paged"]
    tokens = {"1": 1, "1m": 1 << 20}[length]
    assert err == (
        f"note: max-length: none of 9 requests fits into the longest length, {tokens}, "
        "of 65536 slots\n"
    )
    code, out, err = run(simulate_fragmentation, *arguments, "--allocators", "max-length")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_pages_that_are_larger_than_the_memory_are_a_note_and_the_others_run(run, trace):
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 3}')
    code, out, err = run(
        simulate_fragmentation, "--trace", str(trace), "--capacity", "32", "--page-sizes", "16,64",
        "--json",
    )  # fmt: skip
    assert (code, len(rows_of(out))) == (0, 4)
    assert err.startswith("note: 32 slots in pages of 64: must be")


def test_reuse_has_a_row_for_each_cache_and_order(run, trace):
    code, out, err = run(
        simulate_reuse, "--trace", str(trace), "--capacity", "8k",
        "--evictions", "lru,fifo,optimum", "--json",
    )  # fmt: skip
    rows = rows_of(out)
    assert (code, err) == (0, "")
    assert [row["cache"] for row in rows] == ["none", "request", *["hash"] * 3, *["page"] * 3,
                                              *["token"] * 3]  # fmt: skip
    # Of 20 prompts the first shares nothing, and every second one its second block, too.
    assert rows[-1]["hit_tokens"] == 9 * 512 + 10 * 599
    assert rows[-1]["saved_seconds"] > 0.0


def test_a_talk_is_a_table_of_its_turns(run):
    code, out, _ = run(simulate_reuse, "--workload", "talk")
    assert code == 0
    assert "| turn | prompt | matched | recomputed | answer | inserted | evicted | held |" in out
    assert "| 5 | 1,344 | 1,279 | 65 | 128 | 192 | 0 | 1,472 | 0.18 |" in out


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize(
    "command, arguments",
    [
        (ledger, ["--format", "bf16,int8"]),
        (simulate_macs, ["--tokens", "4"]),
        (simulate_fragmentation, ["--requests", "40", "--page-sizes", "16"]),
        (simulate_reuse, ["--requests", "40", "--caches", "hash,token"]),
    ],
    ids=["ledger", "macs", "fragmentation", "reuse"],
)
def test_figures_are_written(run, tmp_path, command, arguments, suffix):
    pytest.importorskip("matplotlib", reason="figures need the extra `plot`")
    path = tmp_path / f"figure.{suffix}"
    code, out, err = run(command, *arguments, "--plot", str(path))
    assert (code, err) == (0, "")
    assert out.startswith("| ")
    data = path.read_bytes()
    if suffix == "png":
        assert data.startswith(b"\x89PNG")
    else:
        assert ET.fromstring(data).tag.endswith("svg")


@pytest.mark.parametrize("model", ["llama-2-7b", "deepseek-v2-lite"])
def test_the_report_is_one_page_with_tables_and_figures_and_needs_nothing_else(
    run, tmp_path, model
):
    pytest.importorskip("matplotlib", reason="figures need the extra `plot`")
    path = tmp_path / "report.html"
    code, out, err = run(report, "--model", model, "--out", str(path))
    assert (code, err) == (0, "")
    assert out.startswith(f"{path}: {model}, ")
    text = path.read_text("utf-8")
    assert text.count("<h2>") == 5
    assert text.count("<table>") == 6
    assert text.count("<svg") == 4
    assert not re.search(r"(src|href)=\"(?!#)", text.replace('xlink:href="#', ""))
    assert "<script" not in text
    assert "When memory is short it may find less" in text


def test_a_report_with_constant_states_says_why_there_is_no_reuse_table():
    (head, text) = report.prefixes(preset("qwen3-next-80b-a3b-instruct"))
    assert head.startswith("<h2>4.")
    assert "36 of 48 layers have a constant state" in text and "<table" not in text


def test_without_matplotlib_one_line_says_how_to_install_it(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for command, option in (
        (ledger, ["--plot", str(tmp_path / "a.svg")]),
        (simulate_fragmentation, ["--plot", str(tmp_path / "a.svg")]),
        (report, ["--out", str(tmp_path / "a.html")]),
    ):
        code, out, err = run(command, *option)
        assert (code, out) == (2, "")
        assert err == "figures need matplotlib: pip install 'jaxkv[plot]'\n"


MISTAKES = [
    (ledger, ["--model", "lama-2-7b"], "no preset 'lama-2-7b'; did you mean llama-2-7b"),
    (ledger, ["--model", ","], "--model ',' names no model"),
    (ledger, ["--context", "4q"], "'4q' is not a number of tokens: write 4096, 32k"),
    (ledger, ["--context", "-1"], "is not a number of tokens"),
    (ledger, ["--context", "999999999999999m"], "must be 1 to"),
    (ledger, ["--context", ","], "has no value"),
    (ledger, ["--batch", "0"], "'0' must be a whole number of at least 1"),
    (ledger, ["--batch", "9" * 4_500], "must be a whole number"),
    (ledger, ["--format", "int3"], "no KV format 'int3'"),
    (ledger, ["--format", "window=bf16"], "must follow a format for all layers"),
    (ledger, ["--page-size", "2000"], "--page-size must be 8 to 256"),
    (ledger, ["--memory", "80G"], "'80G' may be GB or GiB: write one of them"),
    (ledger, ["--bandwidth", "fast"], "'fast' is not a size"),
    (ledger, ["--weights", "int3"], "invalid choice"),
    (ledger, ["--tensor-parallel", "3"], "32 query heads do not split over 3 devices"),
    (ledger, ["--config", "no/such.json"], "no/such.json: No such file"),
    (ledger, ["--plot", "a.pdf"], "must end with .png or .svg"),
    (ledger, ["--plot", "no/such/a.svg"], "no such folder"),
    (ledger, ["--csv", "--json"], "not allowed with"),
    (ledger, ["--models", "--plot", "x.svg"], "--plot draws what is counted, not the list"),
    (plan, [], "required: --memory"),
    (plan, ["--memory", "1GB", "--reserve", "2GB"], "--reserve leaves nothing of --memory"),
    (plan, ["--memory", "1GB", "--page-sizes", "2000"], "--page-sizes 2000: must be 8 to 256"),
    (plan, ["--memory", "80GB", "--formats", "bf16,int3"], "no KV format 'int3'"),
    (plan, ["--memory", "80GB", "--formats", "bf16,99=int8"], "no layer 99: the model has 32"),
    (plan, ["--memory", "1GB", "--heads", "3"], "3 KV heads do not divide 32 heads"),
    (plan, ["--memory", "1GB", "--model", "gpt2,phi-2"], "give one model"),
    (simulate_macs, ["--tokens", "1024m"], "at most 1073741824 together"),
    (simulate_macs, ["--loops", "1m"], "--loops: at most 2048"),
    (simulate_fragmentation, ["--lengths", "odd"], "invalid choice: 'odd'"),
    (simulate_fragmentation, ["--allocators", "slab"], "--allocators slab: there are max-length"),
    (simulate_fragmentation, ["--page-sizes", "512"], "--page-sizes 512: must be 1 to 256"),
    (simulate_fragmentation, ["--rate", "0"], "0.0 requests per second: must be 1e-6"),
    (simulate_fragmentation, ["--rate", "nan"], "nan requests per second"),
    (simulate_fragmentation, ["--step", "-1"], "-1.0 seconds per step"),
    (simulate_fragmentation, ["--seed", "-1"], "--seed must be at least 0"),
    (simulate_fragmentation, ["--capacity", "16", "--requests", "9"], ", of 16 slots"),
    (simulate_fragmentation, ["--trace", "no/such.jsonl"], "no/such.jsonl: No such file"),
    (simulate_reuse, ["--workload", "W4"], "--workload W4 needs --trace"),
    (simulate_reuse, ["--workload", "W1", "--trace", "x"], "does not use --trace"),
    (simulate_reuse, ["--caches", "odd"], "--caches odd: there are none, request"),
    (simulate_reuse, ["--evictions", "odd"], "--evictions odd: there are lru"),
    (simulate_reuse, ["--workload", "talk", "--caches", "hash,page"], "a table of turns needs one"),
    (simulate_reuse, ["--requests", "9", "--capacity", "1024m", "--page-size", "1"], "67108864"),
    (simulate_reuse, ["--flops", "0"], "'0' is not a rate"),
    (simulate_reuse, ["--model", "minimax-text-01"], "70 of 80 layers have a constant state"),
    (simulate_reuse, ["--requests", "5", "--capacity", "8"], "a cache of 8 tokens in pages of 16"),
    (report, ["--out", "report.txt"], "must end with .html or .htm"),
    (report, ["--out", "no/such/report.html"], "no such folder"),
]


@pytest.mark.parametrize("command, arguments, message", MISTAKES)
def test_each_mistake_is_one_line_and_2(run, command, arguments, message):
    code, out, err = run(command, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("content", ["", "[1]", "{\n", '{"input_length": 1, "hash_ids": 5}'])
def test_a_damaged_trace_is_named_with_its_line(run, tmp_path, content):
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    for command in (simulate_fragmentation, simulate_reuse):
        code, out, err = run(command, "--trace", str(path))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"{path}: ")


@pytest.mark.parametrize(
    "command, options, missing",
    [
        (simulate_reuse, [], "hash_ids"),
        (simulate_reuse, ["--workload", "W4"], "hash_ids"),
        (simulate_fragmentation, [], "timestamp"),
        (report, ["--out", "report.html"], "timestamp"),
    ],
)
def test_a_trace_without_what_is_replayed_of_it_is_refused(
    run, trace, monkeypatch, command, options, missing
):
    monkeypatch.chdir(trace.parent)
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    del lines[2][missing]
    trace.write_text("\n".join(map(json.dumps, lines)))
    code, out, err = run(command, *options, "--trace", str(trace))
    assert (code, out, err) == (2, "", f"{trace}: line 3: has no {missing}\n")


def test_a_trace_whose_prompts_are_too_long_for_w4_is_refused(run, tmp_path):
    path = tmp_path / "trace.jsonl"
    line = {"input_length": 512_000, "output_length": 3, "hash_ids": list(range(1_000))}
    path.write_text(json.dumps(line))
    code, out, err = run(simulate_reuse, "--workload", "W4", "--trace", str(path))
    assert (code, out, err) == (2, "", f"{path}: has no request that fits\n")


def test_the_ruler_runs_without_jax(tmp_path):
    program = (
        "import sys; sys.path.insert(0, '.'); from jaxkv.cli import ledger, plan, console\n"
        "from jaxkv.cli import simulate_reuse, simulate_fragmentation, simulate_macs\n"
        "console.run(ledger.main, ['--context', '4k'])\n"
        "console.run(ledger.main, ['--config', 'no/such'])\n"
        "assert 'jax' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_output_ends_nothing(tmp_path, closed):
    program = (
        "from jaxkv.cli import console, simulate_fragmentation\n"
        "code = console.run(simulate_fragmentation.main, ['--requests', '9'])\n"
        f"open({str(tmp_path / 'code')!r}, 'w').write(str(code))"
    )
    line = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} {closed}"
    result = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "code").read_text() == "0"
    assert result.stdout.startswith("| allocator") == (">&-" not in closed.split())


def test_help_teaches(tmp_path):
    for words in (["ledger"], ["plan"], ["simulate", "reuse"], ["report"]):
        result = run_scripts(*words, "--help")
        assert result.returncode == 0
        assert f"jaxkv {' '.join(words)}" in result.stdout
