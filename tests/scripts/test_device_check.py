"""`device check`: what it makes of workers that answer, hang and die, which here are a few lines of
Python; and the whole program where there is no GPU, on toy sizes, simulated."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from scripts.__main__ import FOLDER
from scripts.device import check as device_check
from scripts.device.check import Report, Run, ask_all, table
from scripts.device.correct import difference
from tests.cli.test_console import run_scripts

without_gpu = pytest.mark.skipif(jax.default_backend() == "gpu", reason="would run in earnest")
# Answers by the name that it is asked for.
WORKER = """
import json, subprocess, sys
print(json.dumps(dict(device="toy", real=True, versions=dict(jax="0"))), flush=True)
for line in sys.stdin:
    name = json.loads(line)["name"]
    if name == "hangs":
        subprocess.run(["sleep", "600"])  # which ends with it, or the output stays open
    if name == "dies":
        print("a page fault", file=sys.stderr)
        sys.exit(7)
    # As where the device takes nothing any more.
    wrong = dict(reason="out[3] is 5, should be 1", failed=True, last=True)
    print(json.dumps(wrong if name == "wrong" else dict(error=1e-3)), flush=True)
    if name == "wrong":
        break
"""


def command(worker: str = WORKER) -> tuple[str, ...]:
    return sys.executable, "-c", worker


def ask(report: Report, asked: list[tuple[str, str, str]], worker: str = WORKER) -> None:
    run = Run(report, time.monotonic() + 60, command(worker))
    try:
        ask_all(run, asked, minutes=1)
    finally:
        run.close()


def test_a_kernel_that_hangs_dies_or_is_wrong_loses_only_its_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(device_check.SECONDS, "correct", 1.0)
    names = ("right", "hangs", "right", "dies", "wrong", "right")
    report = Report(tmp_path / "check.json")
    ask(report, [("correct", name, "mosaic_gpu") for name in names])
    reasons = [row.get("reason") for row in report.rows]
    hung, died = "no answer in 1 s", "the process ended with 7: a page fault"
    assert reasons == [None, hung, None, died, "out[3] is 5, should be 1", None]
    assert report.failed
    told = capsys.readouterr().out.splitlines()
    assert told == [
        f"FAILED: correct {name}: {reason}"
        for name, reason in zip(names, reasons, strict=True)
        if reason
    ]
    saved = json.loads(report.path.read_text())
    assert saved == dict(device="toy", versions=dict(jax="0"), rows=report.rows)
    assert table(report).count("FAILED") == 3
    assert table(report).count("1.0e-03") == 3


def test_another_systems_failure_is_none_of_ours(tmp_path, capsys):
    report = Report(tmp_path / "check.json")
    ask(report, [("decode", "dies", "flashinfer"), ("decode", "x", "mosaic_gpu")])
    assert not report.failed
    assert capsys.readouterr().out == ""
    assert report.rows[1]["error"] == 1e-3


def test_a_gpu_that_is_gone_after_a_fault_is_not_simulated(tmp_path):
    report, came_up = Report(tmp_path / "check.json"), tmp_path / "came_up"
    once = f"import pathlib; first = not pathlib.Path({str(came_up)!r}).exists()\n"
    once += f"pathlib.Path({str(came_up)!r}).touch()\n"
    worker = once + WORKER.replace("real=True", "real=first")
    ask(report, [("correct", name, "mosaic_gpu") for name in ("dies", "right")], worker)
    assert report.rows[1]["reason"] == "JAX no longer sees the GPU"
    assert report.device == "toy" and report.failed


def test_correctness_leaves_half_of_the_time_and_the_model_gets_some(tmp_path):
    asked = [(section, "x", "xla") for section in ("correct", "decode", "model")]
    # Of 100 s that were given, so many are left.
    for left, answered in ((60, 3), (40, 2), (20, 1), (0, 0)):
        report = Report(tmp_path / "check.json")
        run = Run(report, time.monotonic() + left, command())
        ask_all(run, asked, minutes=100 / 60)
        run.close()
        late = [row.get("reason") == "no time was left" for row in report.rows]
        assert late == [True] * (3 - answered) + [False] * answered


def test_rows_that_cannot_be_saved_are_in_the_table_still(tmp_path, capsys):
    report = Report(tmp_path)  # a folder
    for name in ("a", "b"):
        report.add("copy", name, "xla", dict(seconds=1.0))
    assert capsys.readouterr().err == f"{tmp_path}: Is a directory; rows are not saved\n"
    assert table(report).count("| 1000000.0 |") == 2


def test_a_device_that_does_not_come_up_is_a_failure_with_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(device_check, "COMMAND", command("raise SystemExit('no driver')"))
    assert device_check.main(["--json", str(tmp_path / "check.json")]) == 1
    told = capsys.readouterr().out
    assert "FAILED: the process that uses the device: the process ended with 1: no dri" in told


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--minutes", minutes] for minutes in ("0", "-1", "nan", "inf", "soon")),
        ["--json", "no/such/folder/check.json"],
        ["--json", "."],
        ["--tables"],
    ],
    ids=" ".join,
)
def test_a_wrong_argument_costs_one_line_and_nothing_runs(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device_check, "COMMAND", ("/no/such/program",))
    with pytest.raises((SystemExit, OSError)) as raised:
        device_check.main(arguments)
    if isinstance(raised.value, SystemExit):
        assert raised.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1
    else:  # which `console.run` tells in a line, with exit code 2
        assert str(raised.value.filename) == arguments[1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "stop", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM], ids=str
)
def test_who_is_stopped_prints_the_table_of_what_was_found(tmp_path, stop):
    worker, path = tmp_path / "worker.py", tmp_path / "check.json"
    worker.write_text(WORKER.replace('name == "hangs"', 'name.startswith("prefill")'))
    main = "; ".join(
        [
            "from jaxkv.cli import console; from scripts.device import check as device_check",
            f"device_check.COMMAND = {(sys.executable, str(worker))}",
            f"raise SystemExit(console.run(device_check.main, {['--json', str(path)]}))",
        ]
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "-c", main],
        cwd=FOLDER.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (path.exists() and path.read_text().count('"error"') >= 5):
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(stop)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted\n")
    assert out.count("| correct | decode") == 5


def test_a_difference_is_told_by_its_place_and_infinities_count(tmp_path):
    want = np.array([[0.0, -np.inf], [1.0, 2.0]], np.float32)
    assert difference(want + np.float32(1e-3), want, "lse") == pytest.approx(1e-3, rel=1e-3)
    for wrong in (np.nan, 0.5, np.inf):
        got = want.copy()
        got[0, 1] = wrong
        with pytest.raises(ValueError, match=r"lse\[0, 1\] is .*, should be -inf; 1 of 4 are off"):
            difference(got, want, "lse")
    with pytest.raises(ValueError, match=r"out\[1, 1\] is nan, should be 2"):
        difference(np.where(want == 2, np.nan, want), want, "out")


@without_gpu
@pytest.mark.slow
def test_without_a_gpu_it_simulates_and_every_row_has_a_result_or_a_reason(tmp_path):
    path = tmp_path / "check.json"
    result = run_scripts("device", "check", "--minutes", "60", "--json", str(path))
    assert result.returncode == 0, result.stdout
    assert result.stderr == "JAX sees no GPU: simulated on toy sizes, nothing is timed\n"
    found = json.loads(path.read_text())
    assert found["device"] == "simulated"
    assert f"jax {jax.__version__}" in result.stdout
    rows = found["rows"]
    assert len(rows) == result.stdout.count("\n| ") - 1  # and a row of heads
    ours = [row for row in rows if row["system"] == "mosaic_gpu" and row["section"] != "model"]
    assert len(ours) == 7
    for row in ours:
        assert row.get("error", row.get("off")) < 2e-2
    assert all("error" in row or "off" in row or row["reason"] for row in rows)
    assert not any("seconds" in row for row in rows)


@without_gpu
def test_no_time_left_is_a_reason_and_no_failure(tmp_path):
    path = tmp_path / "check.json"
    result = run_scripts("device", "check", "--minutes", "0.0001", "--json", str(path))
    assert result.returncode == 0, result.stderr
    rows = json.loads(path.read_text())["rows"]
    assert rows
    assert {row["reason"] for row in rows} == {"no time was left"}
