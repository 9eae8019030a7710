"""`python scripts tradeoff`, `uptrain` and `heads`, on tiny models."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import chex
import pytest

from jaxkv.cli import console, decode
from jaxkv.models.errors import ModelError
from jaxkv.models.loading import load_model
from scripts.studies import heads, tradeoff, uptrain
from tests.models.tiny_checkpoint import random_weights, write_gguf

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("model") / "model.gguf"))


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the tea and the cat in the hat " * 60, "utf-8")
    return str(path)


def tradeoff_argv(model: str, text: str, out: Path, *options: str) -> list[str]:
    sizes = ["--skip", "2", "--context", "24", "--tokens", "12", "--tasks"]
    axes = ["--formats", "f32", "kivi4", "--methods", "none", "knorm"]
    argv = ["--model", model, "--text", text, "--out", str(out), *sizes, *axes]
    return [*argv, "--budgets", "0.5", *options]


@pytest.mark.slow
def test_a_study_has_a_row_for_each_combination_and_goes_on_where_it_stopped(
    tmp_path, capsys, model, text
):
    out = tmp_path / "study"
    assert console.run(tradeoff.main, tradeoff_argv(model, text, out)) == 0
    assert "refused: knorm does not go with format kivi4" in capsys.readouterr().out
    rows = json.loads((out / "results.json").read_text())
    assert [(r["config"]["kv_format"], r["config"]["method"]) for r in rows] == [
        (f, m) for f in ("f32", "kivi4") for m in ("none", "knorm")
    ]
    full, knorm, codes, refused = rows
    assert full["kl_mean"] == 0 and full["top1"] == 1
    assert knorm["kl_mean"] > 0
    assert knorm["nbytes"] < full["nbytes"] and codes["nbytes"] < full["nbytes"]
    assert "refused" in refused and "nbytes" not in refused
    assert all(row["command"].startswith("python scripts tradeoff --model") for row in rows)
    with (out / "results.csv").open(newline="") as file:
        assert [float(row["ratio"]) for row in csv.DictReader(file)] == [0.0, 0.5, 0.0, 0.5]
    page = (out / "report.html").read_text()
    assert page.count("<tr") == 5 and "refused: knorm does not go" in page
    folders = sorted(path for path in out.iterdir() if path.is_dir())
    assert {path.name for folder in folders for path in folder.iterdir()} == {
        "config.yaml",
        "metrics.json",
        "predictions.csv",
    }
    # Killed in the middle of a row: what is whole stays as it is, the rest is measured again.
    marked = {folder: folder / "metrics.json" for folder in folders}
    for file in list(marked.values())[1:]:
        file.write_text(file.read_text().replace('"date": "2', '"date": "1'))
    lost = next(iter(marked.values()))
    before = json.loads(lost.read_text())
    lost.rename(lost.with_suffix(".json.new"))
    assert console.run(tradeoff.main, tradeoff_argv(model, text, out)) == 0
    again = json.loads(lost.read_text())
    assert again == before
    assert sum('"date": "1' in file.read_text() for file in marked.values()) == len(marked) - 1


@pytest.fixture(scope="module")
def study(tmp_path_factory, model) -> Path:
    """A folder with a model, a text, and a study of two rows."""
    folder = tmp_path_factory.mktemp("study")
    shutil.copy(model, folder / "model.gguf")
    (folder / "text.txt").write_text("the tea and the cat in the hat " * 60, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert console.run(tradeoff.main, study_argv(folder)) == 0
    return folder


def study_argv(folder: Path, *options: str) -> list[str]:
    axes = ["--formats", "f32", *options]
    return tradeoff_argv("model.gguf", "text.txt", folder / "out", *axes)


@pytest.fixture
def copied(tmp_path, monkeypatch, study) -> Path:
    """A copy of `study`, whose model and text are named from where they are."""
    shutil.copytree(study, tmp_path, dirs_exist_ok=True, copy_function=shutil.copy2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--tokens", "10"], "tokens was 12, is 10"),
        (["--context", "20"], "context was 24, is 20"),
        (["--skip", "3"], "skip was 2, is 3"),
        (["--lengths", "100"], "lengths was [512], is [100]"),
        (["--samples", "1"], "samples was 2, is 1"),
        (["--seed", "1"], "seed was 42, is 1"),
        (["--heads", "1", "2"], "beside was 2, is 1"),
        ("text", "text_sha256 was "),
        ("model", "weights_sha256 was "),
    ],
)
def test_a_folder_of_one_study_takes_no_row_of_another(copied, capsys, change, named):
    if change == "text":
        (copied / "text.txt").write_text("the tea and the hat in the cat " * 60)
    elif change == "model":
        weights = random_weights()
        weights[next(name for name in weights if "mlp" in name)][0, 0] += 1
        write_gguf(copied / "model.gguf", weights)
    before = contents(copied / "out")
    line = refusal(
        capsys, tradeoff.main, study_argv(copied, *(change if "--" in change[0] else []))
    )
    assert line.startswith(f"{copied / 'out'}: belongs to another run ({named}")
    assert line.count(" was ") == 1 and contents(copied / "out") == before


def test_complete_rows_are_not_measured_again_for_any_spelling_of_a_budget(copied):
    def rows() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in copied.glob("out/*/metrics.json")}

    before = rows()
    assert len(before) == 2
    assert console.run(tradeoff.main, study_argv(copied, "--budgets", "50%", "0.5", "0.50")) == 0
    assert rows() == before


@pytest.mark.parametrize("content", ["5", "{}", "config", "another", "no figure", "run"])
def test_a_file_that_is_no_row_is_one_line_that_names_it(copied, capsys, content):
    (file,) = copied.glob("out/*knorm*/metrics.json")
    row = json.loads(file.read_text())
    if content == "run":
        file = copied / "out" / "run.json"
        file.write_text('{"model": ')
    else:
        found = {
            "5": 5,
            "{}": {},
            "config": {"config": row["config"]},
            "another": row | {"config": row["config"] | {"budget": "0.25"}},
            "no figure": row | {"kl_p99": "high"},
        }[content]
        file.write_text(json.dumps(found))
    assert refusal(capsys, tradeoff.main, study_argv(copied)).startswith(f"{file}: is ")


def test_each_row_has_a_folder_of_its_own(tmp_path, model):
    """Rows differ also if models have one name, or budgets round to the same number."""
    for name, change in (("a", 1), ("b", 2), ("c", 2)):
        weights = random_weights()
        weights[next(name for name in weights if "mlp" in name)][0, 0] += change
        (tmp_path / name).mkdir()
        write_gguf(tmp_path / name / "mqa.gguf", weights)
    models = [str(tmp_path / name / "mqa.gguf") for name in "abc"]
    axes = ["--heads", "1", "2", *models, "--formats", "int8", "int8,0=f32", "int8,1=f32"]
    budgets = ["0.5", "12", "50%", "0.25", "0.252", "1", "1.0", "100%", "0.500000001", "00.5"]
    argv = tradeoff_argv(model, "text.txt", tmp_path / "out", *axes, "--budgets", *budgets)
    args = tradeoff.parse([*argv, "--methods", "none", "knorm", "snapkv", "knorm"])
    rows = tradeoff.setups(args, tradeoff.models_of(args, load_model(model)))
    different = 7  # budgets: 0.5 is 50% and 00.5, 1.0 is 100%
    assert len(rows) == 1 + 5 * 3 * (1 + 2 * different)
    folders = {row.folder(model, 24) for row in rows}
    assert len(folders) == len(rows) and not any("/" in folder for folder in folders)
    write_gguf(tmp_path / "a" / "mqa.gguf")
    again = tradeoff.setups(args, tradeoff.models_of(args, load_model(model)))
    changed = {row.folder(model, 24) for row in again} - folders
    assert len(changed) == len(rows) // 5


@pytest.mark.parametrize("name", tradeoff.QUICK)
def test_a_quick_study_keeps_what_is_given(name):
    """This holds also for the default value of a full study."""
    whole = tradeoff.parse(["--text", "t", "--out", "o"])
    quick = tradeoff.parse(["--text", "t", "--out", "o", "--quick"])
    default = getattr(whole, name)
    assert getattr(quick, name) == tradeoff.QUICK[name] != default
    values = map(str, default if isinstance(default, list) else [default])
    given = tradeoff.parse(["--text", "t", "--out", "o", "--quick", f"--{name}", *values])
    assert vars(given) == vars(quick) | {name: default}


@pytest.mark.slow
def test_a_killed_study_continues_to_the_results_of_one_that_is_not_killed(tmp_path, model, text):
    """The study gets SIGKILL in the middle of its rows, and one row's file is truncated."""
    axes = ["--formats", "f32", "int8", "--methods", "none", "knorm", "keydiff", "random"]

    def start(out: Path) -> subprocess.Popen:
        argv = tradeoff_argv(model, text, out, *axes)
        command = [sys.executable, str(ROOT / "scripts"), "tradeoff", *argv]
        env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
        return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def rows(out: Path) -> list[Path]:
        return sorted(out.glob("*/metrics.json"))

    def results(out: Path) -> list[dict]:
        found = json.loads((out / "results.json").read_text())
        return [{k: v for k, v in row.items() if k not in ("command", "date")} for row in found]

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start(killed)
    while len(rows(killed)) < 3:
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert 3 <= len(rows(killed)) < 8 and not (killed / "results.json").exists()
    torn, *done = rows(killed)
    torn.write_bytes(torn.read_bytes()[:-40])
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in done}
    (killed / "results.csv").write_text("heads,kv_format,me")
    for out in (killed, whole):
        process = start(out)
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors.decode()
    assert {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in done} == before
    assert len(rows(killed)) == 8 and results(killed) == results(whole)
    assert (killed / "results.csv").read_bytes() == (whole / "results.csv").read_bytes()


@pytest.mark.slow
def test_a_study_of_tasks_has_answers_and_times(tmp_path, model, text):
    out = tmp_path / "study"
    argv = tradeoff_argv(model, text, out, "--tasks", "niah_single", "--lengths", "140")
    code = console.run(tradeoff.main, [*argv, "--samples", "1"])
    assert code == 0
    rows = json.loads((out / "results.json").read_text())
    for row in rows:
        if "refused" not in row:
            assert row["tasks"]["niah_single"]["n"] == 3 and row["decode_ms"] > 0
    with next(out.glob("*none*f32*/predictions.csv")).open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [float(row["depth"]) for row in found] == [0.1, 0.5, 0.9]


def test_decode_drops_tokens_of_its_prompts(capsys, model):
    argv = ["--model", model, "--raw", "--max-new-tokens", "3", "--page-size", "8", "--json"]
    argv += ["--ignore-eos", "the tea and the cat in the hat " * 3]
    assert console.run(decode.main, [*argv, "--method", "knorm", "--budget", "50%"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[0])
    n = record["prompt_tokens"]
    assert record["dropped_tokens"] == n - n // 2 and len(record["tokens"]) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "knorm"], "--method needs a --budget"),
        (["--budget", "0.5"], "need a --method"),
        (["--method", "streaming_llm", "--budget", "0.5"], "takes a number of tokens"),
        (["--method", "knorm", "--budget", "half"], "budget 'half'"),
        (["--method", "knorm", "--budget", "0.5", "--kv-format", "kivi4"], "does not go with"),
    ],
)
def test_decode_names_what_does_not_go_together(capsys, model, options, message):
    assert console.run(decode.main, ["--model", model, "--raw", "the", *options]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def uptrain_argv(model: str, text: str, out: Path, *options: str) -> list[str]:
    argv = ["--model", model, "--text", text, "--out", str(out), "--kv-heads", "1"]
    return [*argv, "--steps", "100", "--batch", "2", "--length", "16", "--lr", "3e-3", *options]


def test_a_model_with_fewer_heads_is_trained_written_and_read(tmp_path, capsys, model, text):
    out = tmp_path / "mqa"
    assert console.run(uptrain.main, uptrain_argv(model, text, out, "--fraction", "0.2")) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 KV heads (mean), 20 steps, 0.500 of the cache's bytes" in printed
    loss = [float(x) for x in printed.split("token: ")[1].replace(",", "").split()[1::2]]
    _, pooled, trained = loss
    assert trained < pooled
    new = load_model(str(out))
    assert new.model.config.attention.num_kv_heads == 1 and new.tokenizer is not None
    with (tmp_path / "mqa.training" / "loss.csv").open(newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, 21))
    # The state is that of a finished run: the same command with a new name of the model is quick.
    out.rename(tmp_path / "moved")
    assert console.run(uptrain.main, uptrain_argv(model, text, out, "--fraction", "0.2")) == 0
    again = load_model(str(out)).model
    for one, other in zip(new.model.params, again.params, strict=True):
        chex.assert_trees_all_equal(one, other)


def refusal(capsys, main, argv: list[str]) -> str:
    """Returns the one line with which a command is refused."""
    capsys.readouterr()
    assert console.run(main, argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line


@pytest.fixture(scope="module")
def trained(tmp_path_factory, model) -> Path:
    """A folder with a text and a training of one step, whose model is moved away."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("the tea and the cat in the hat " * 60, "utf-8")
    argv = uptrain_argv(model, str(folder / "text.txt"), folder / "mqa", "--steps", "1")
    assert console.run(uptrain.main, argv) == 0
    (folder / "mqa").rename(folder / "moved")
    return folder


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--seed", "3"], "seed was 0, is 3"),
        (["--init", "first"], "init was mean, is first"),
        ("text", "text_sha256 was "),
        ("model", "weights_sha256 was "),
    ],
)
def test_a_training_goes_on_by_its_own_model_text_and_options_alone(
    tmp_path, capsys, model, trained, change, named
):
    """Contents decide, not file names: both files are at the paths of the first ones."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.gguf"
    shutil.copy(model, path)
    argv = uptrain_argv(str(path), str(tmp_path / "text.txt"), tmp_path / "mqa", "--steps", "1")
    file = tmp_path / "mqa.training" / "run.json"
    file.write_text(file.read_text().replace(model, str(path)))
    if change == "text":
        (tmp_path / "text.txt").write_text("the tea and the cat in the hat " * 59 + "the end")
    elif change == "model":
        weights = random_weights()
        name = next(name for name in weights if "mlp" in name)
        weights[name][0, 0] += 1
        write_gguf(path, weights)
    else:
        argv += change
    before = contents(tmp_path / "mqa.training")
    line = refusal(capsys, uptrain.main, argv)
    assert line.startswith(f"{tmp_path / 'mqa.training'}: belongs to another run ({named}")
    assert line.count(" was ") == 1
    assert contents(tmp_path / "mqa.training") == before and not (tmp_path / "mqa").exists()


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", b""),
        ("run.json", b'{"num_st'),
        ("run.json", b"5"),
        ("run.json", b"\xff"),
        ("run.json", None),
        ("loss.csv", b"step,loss\n1"),
        ("loss.csv", b"step,loss\n2,3.0\n"),
        ("loss.csv", b"\xff\xfe"),
        ("loss.csv", b""),
        ("loss.csv", None),
        ("state/sums.json", b"{"),
    ],
)
def test_a_damaged_file_of_a_training_is_one_line_that_names_it(
    tmp_path, capsys, model, trained, name, content
):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "mqa.training" / name
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    text = tmp_path / "text.txt"
    line = refusal(
        capsys, uptrain.main, uptrain_argv(model, str(text), tmp_path / "mqa", "--steps", "1")
    )
    assert line.startswith(f"{file}: ")


def test_a_training_that_was_killed_before_its_state_was_written_goes_on(
    tmp_path, capsys, model, trained
):
    """Losses are written before the state, so they may be ahead of it, and then come again."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    curve = tmp_path / "mqa.training" / "loss.csv"
    before = curve.read_text()
    curve.write_text(before + "2,9.0\n3,9")
    argv = uptrain_argv(model, str(tmp_path / "text.txt"), tmp_path / "mqa", "--steps", "1")
    assert console.run(uptrain.main, argv) == 0
    assert "1 steps" in capsys.readouterr().out


CELLS = [(0, 4, "none"), (0, 2, "mean"), (0, 1, "mean")]


def heads_row(seed: int, kv_heads: int, init: str, share: float) -> dict:
    row = {"seed": seed, "kv_heads": kv_heads, "init": init, "share": share}
    return row | {"bits_per_byte": 5.0 - share}


def heads_argv(folder: Path, *options: str) -> list[str]:
    argv = ["--text", str(folder / "text.txt"), "--out", str(folder / "out"), "--size", "ci"]
    return [*argv, "--seeds", "1", "--init", "mean", *options]


@pytest.fixture(scope="module")
def done_heads(tmp_path_factory) -> Path:
    """A folder of a text and a study of heads that is done."""
    folder = tmp_path_factory.mktemp("heads")
    (folder / "text.txt").write_bytes(b"a rose is a rose is a rose, " * 400)
    assert console.run(heads.main, heads_argv(folder)) == 0
    return folder


@pytest.mark.slow
def test_a_study_of_heads_goes_on_with_its_own_text_and_size_alone(
    tmp_path, capsys, monkeypatch, done_heads
):
    shutil.copytree(done_heads, tmp_path, dirs_exist_ok=True)
    argv, out = heads_argv(tmp_path), tmp_path / "out"
    before = contents(out)
    twice = [*argv, "--init", "mean", "mean"]
    assert console.run(heads.main, twice) == 0
    assert capsys.readouterr().out.count("| mean |") == 2
    after = contents(out)
    assert after["rows.jsonl"] == before["rows.jsonl"] and after["rows.csv"] == before["rows.csv"]
    small = replace(heads.SIZES["ci"], held_out=1_024)
    monkeypatch.setitem(heads.SIZES, "small", small)
    line = refusal(capsys, heads.main, [*argv, "--size", "small"])
    assert line.startswith(f"{out}: belongs to another run (held_out was 2048, is 1024)")
    (tmp_path / "text.txt").write_bytes(b"a rose is a rose is a nose, " * 400)
    line = refusal(capsys, heads.main, argv)
    assert line.startswith(f"{out}: belongs to another run (text_sha256 was ")
    (out / "run.json").unlink()
    (out / "rows.jsonl").unlink()  # its first training would be gone on with
    assert refusal(capsys, heads.main, argv).startswith(f"{out / 'run.json'}: is missing")
    assert contents(out) == {k: v for k, v in after.items() if k not in ("run.json", "rows.jsonl")}


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_line_that_was_cut_spoils_no_other_one(tmp_path, capsys, done_heads, cut):
    shutil.copytree(done_heads, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "out" / "rows.jsonl"
    before = file.read_bytes()
    file.write_bytes(before[:-cut])
    assert console.run(heads.main, heads_argv(tmp_path)) == 0
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "line", [b"5", b'{"a": 1}', b"\xff\xfe", b"[]", b"null", b'{"seed": 0', b""]
)
def test_a_line_that_is_no_row_is_named_in_one_line(tmp_path, line):
    rows = [heads_row(*cell, share) for cell in CELLS for share in heads.SHARES]
    lines = [json.dumps(row).encode() for row in rows]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\n".join([*lines, b""]))
    read = heads.read_rows(file)
    assert list(read) == CELLS and [row for cell in read.values() for row in cell] == rows
    file.write_bytes(b"\n".join([*lines[:3], line, *lines[3:], b""]))
    with pytest.raises(ModelError, match="line 4 is not a row") as error:
        heads.read_rows(file)
    assert str(error.value).startswith(f"{file}: ") and "\n" not in str(error.value)


@pytest.mark.slow
def test_a_study_of_heads_goes_on_where_it_stopped(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_bytes(b"a rose is a rose is a rose, " * 400)
    argv = ["--text", str(text), "--out", str(tmp_path / "heads"), "--size", "ci", "--seeds", "2"]
    argv += ["--init", "mean", "first"]
    assert console.run(heads.main, argv) == 0
    first = capsys.readouterr().out
    rows = tmp_path / "heads" / "rows.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    assert len(lines) == 2 * 5 * 5  # seeds, the whole model and two ways of each of two numbers
    rows.write_text("".join(lines[:-7]) + lines[-7][:20])
    assert console.run(heads.main, argv) == 0
    assert capsys.readouterr().out == first
    summary = json.loads((tmp_path / "heads" / "summary.json").read_text())
    assert {(row["kv_heads"], row["seeds"]) for row in summary} == {(4, 2), (2, 2), (1, 2)}


@pytest.mark.parametrize(
    ("main", "options", "message"),
    [
        (tradeoff.main, ["--methods", "snap"], "no 'snap'; there are none, sliding_window"),
        (tradeoff.main, ["--budgets", "1.5"], "budget '1.5'"),
        (tradeoff.main, ["--context", "9999"], "has too few tokens"),
        (tradeoff.main, ["--tasks", "qa"], "no 'qa'; there are niah_single"),
        (tradeoff.main, ["--heads", "0"], "0 KV heads do not divide the model's 2"),
        (tradeoff.main, ["--heads", "2", "7"], "7 KV heads do not divide the model's 2"),
        (tradeoff.main, ["--heads", "2", "no-such-model"], "'no-such-model' is no model"),
        (tradeoff.main, ["--formats", "f32", "int9"], "--formats int9: "),
        (
            tradeoff.main,
            ["--context", "250"],
            "--context 250 and --tokens 12: 262 tokens; the model takes 256",
        ),
        (tradeoff.main, ["--tasks", "vt", "--lengths", "16"], "--lengths 16: vt does not fit into"),
        (tradeoff.main, ["--tasks", "vt", "--lengths", "9000"], "--lengths 9000: 9016 tokens"),
        (tradeoff.main, ["--tasks", "vt", "--lengths", "240"], "--lengths 240: vt has"),
        (tradeoff.main, ["--text", os.devnull], f"{os.devnull}: is empty"),
        (uptrain.main, ["--text", os.devnull], f"{os.devnull}: is empty"),
        (uptrain.main, ["--kv-heads", "3"], "3 KV heads do not divide the model's 2"),
        (uptrain.main, ["--fraction", "2"], "--fraction and --distil must be 0 to 1"),
        (uptrain.main, ["--lr", "inf"], "--lr must be above 0, and a finite float32"),
        (uptrain.main, ["--lr", "1e39"], "--lr must be above 0, and a finite float32"),
        (uptrain.main, ["--lr", "1e30", "--steps", "3"], "a lower --lr may help"),
        (uptrain.main, ["--length", "99999"], "too few for --length"),
        (uptrain.main, ["--text", "/no/such"], "/no/such"),
    ],
)
def test_each_mistake_is_one_line(tmp_path, capsys, model, text, main, options, message):
    make = tradeoff_argv if main is tradeoff.main else uptrain_argv
    try:
        code = console.run(main, make(model, text, tmp_path / "out", *options))
    except SystemExit as exit:  # argparse's own
        code = exit.code
    assert code == 2 and not list((tmp_path / "out").glob("*"))
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
