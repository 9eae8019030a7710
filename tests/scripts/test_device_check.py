"""`device check` where there is no GPU: the same program, on toy sizes, simulated."""

import json

import jax
import pytest

from tests.scripts.test_console import run_scripts

pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="would run in earnest")


@pytest.mark.slow
def test_without_a_gpu_it_simulates_and_every_row_has_a_result_or_a_reason(tmp_path):
    path = tmp_path / "check.json"
    result = run_scripts("device", "check", "--minutes", "4", "--json", str(path))
    assert result.returncode == 0, result.stderr
    found = json.loads(path.read_text())
    assert found["device"] == "simulated"
    assert f"jax {jax.__version__}" in result.stdout
    rows = found["rows"]
    assert len(rows) == result.stdout.count("\n| ") - 1  # and a row of heads
    ours = [row for row in rows if row["system"] == "mosaic_gpu" and row["section"] != "model"]
    assert len(ours) == 3
    for row in ours:
        assert row.get("error", row.get("off")) < 2e-2
    assert all("error" in row or "off" in row or row["reason"] for row in rows)
    assert not any("seconds" in row for row in rows)


def test_no_time_left_is_a_reason_and_no_failure(tmp_path):
    path = tmp_path / "check.json"
    result = run_scripts("device", "check", "--minutes", "0.0001", "--json", str(path))
    assert result.returncode == 0, result.stderr
    rows = json.loads(path.read_text())["rows"]
    assert rows
    assert {row["reason"] for row in rows if row["section"] != "model"} == {"no time was left"}


def test_minutes_that_are_none_cost_one_line():
    result = run_scripts("device", "check", "--minutes=nan")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
