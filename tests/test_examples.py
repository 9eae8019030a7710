"""Every program in examples/ runs as a script and prints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxkv.models.pretrained import RELEASES, cache_dir

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MODEL = "smollm2-135m"


def needs_model(path: Path) -> bool:
    return MODEL in path.read_text()


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if needs_model(path) else [])
        for path in EXAMPLES
    ],
)
def test_an_example_runs_and_prints(path):
    fetched = (cache_dir() / "models" / MODEL / RELEASES[MODEL].file).exists()
    if needs_model(path) and not fetched:
        pytest.skip(f"{MODEL} has not been fetched: `make demo` does")
    command = [sys.executable, "-W", "error", str(path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
