"""`python scripts calibrate` and `bench formats`, on a tiny model."""

import json
from pathlib import Path

import pytest

from jaxkv.cache import KVRanges
from jaxkv.cli import calibrate, console, decode
from scripts.bench import formats as bench_formats
from tests.models.tiny_checkpoint import write_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("model") / "model.gguf"))


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the tea and the cat in the hat " * 8, "utf-8")
    return str(path)


def test_measured_ranges_serve_static_formats(tmp_path, capsys, model, text):
    out = tmp_path / "ranges.json"
    argv = ["--model", model, "--text", text, "--out", str(out), "--tokens", "20"]
    assert console.run(calibrate.main, argv) == 0
    assert capsys.readouterr().out.startswith(f"{out}: ranges {KVRanges.load(out).id} of ")
    options = ["--model", model, "--raw", "--max-new-tokens", "3", "--kv-ranges", str(out)]
    assert console.run(decode.main, [*options, "--kv-format", "int8_static", "--json", "the"]) == 0
    totals = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert totals["kv_format"] == f"int8_static@{KVRanges.load(out).id}"
    assert totals["kv_part_of_bf16"] == 0.5


def test_the_table_has_a_row_for_each_format(capsys, model, text):
    argv = ["--model", model, "--text", text, "--skip", "2", "--tokens", "30", "--at", "64"]
    argv += ["--formats", "int8 kivi4", "--page-size", "8"]
    assert console.run(bench_formats.main, [*argv, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["format"] for row in rows] == ["f32", "int8", "kivi4"]
    assert [row["page_size"] for row in rows] == [8, 8, 8]
    full, int8, _ = rows
    assert (full["perplexity_ratio"], full["kl_mean"], full["bytes_of_bf16"]) == (1.0, 0.0, 2.0)
    assert 0.0 < int8["kl_mean"] < 0.01
    assert 0.5 < int8["bytes_of_bf16"] < 1.0


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("calibrate", ["--tokens", "0"], "--tokens"),
        ("calibrate", ["--text", "/no/such"], "/no/such"),
        ("calibrate", ["--out", "/no/such/x.json"], "/no/such: no such folder"),
        ("bench", ["--formats", "int3"], "no KV format 'int3'"),
        ("calibrate", ["--out", "/"], "/: is a folder"),
        ("bench", ["--formats", " "], "--formats names no format"),
        ("bench", ["--formats", "int8_static"], "needs scales"),
        ("bench", ["--tokens", "9999"], "has fewer than 10001 tokens"),
        ("bench", ["--page-size", "7"], "--page-size must be 8 to 256"),
    ],
)
def test_each_mistake_is_one_line(tmp_path, capsys, model, text, command, options, message):
    main, more = bench_formats.main, ["--skip", "2", "--tokens", "9"]
    if command == "calibrate":
        main, more = calibrate.main, ["--out", str(tmp_path / "out.json")]
    try:
        code = console.run(main, ["--model", model, "--text", text, *more, *options])
    except SystemExit as exit:  # argparse's own
        code = exit.code
    assert code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("content", "message"), [(b"", "is empty"), (b"\xff\xfe", "not UTF-8")])
def test_a_text_of_nothing_is_refused(tmp_path, capsys, model, content, message):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    argv = ["--model", model, "--text", str(path), "--out", str(tmp_path / "out.json")]
    assert console.run(calibrate.main, argv) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
