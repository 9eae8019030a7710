"""The files of a row of `tradeoff`: one folder per row, in kvpress's layout.

    config.yaml, predictions.csv, metrics.json

This module is not a command.
"""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from jaxkv.eval import Quality
from jaxkv.models.errors import ModelError
from jaxkv.models.whole_files import write_whole

DEPTHS = (0.1, 0.5, 0.9)  # positions in the context of the text that is asked for
TEXT_FIGURES = (
    *(field.name for field in fields(Quality)),
    *("ratio", "bits_per_byte", "bytes_per_token", "tokens_per_gib"),
)
COST_FIGURES = ("prefill_seconds", "decode_ms", "decode_us_per_cached_token")
TASK_FIGURES = ("string_match", "stderr")


def scores(predictions: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns mean and standard error of each task in percent, in total and by depth."""
    found = {}
    for task in dict.fromkeys(row["task"] for row in predictions):
        own = [100 * row["score"] for row in predictions if row["task"] == task]
        depths = {
            str(depth): mean(
                100 * row["score"]
                for row in predictions
                if (row["task"], row["depth"]) == (task, depth)
            )
            for depth in DEPTHS
        }
        error = stdev(own) / math.sqrt(len(own)) if len(own) > 1 else 0.0
        found[task] = {"string_match": mean(own), "stderr": error, "n": len(own), "depths": depths}
    return found


def measured(file: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """Reads a row's results; None if there are none, or they are incomplete.

    Raises:
      ModelError: the folder has no row of this configuration.
    """
    try:
        found = json.loads(file.read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if isinstance(found, dict) and found.get("config") == config and is_row(found):
        return found
    raise ModelError(f"{file}: is no row of this study; remove it, and the row is measured again")


def is_row(found: dict[str, Any]) -> bool:
    """Whether the results have everything that reports need."""
    if "refused" in found:
        return isinstance(found["refused"], str)
    names, tasks = found["config"]["tasks"], found.get("tasks", {})
    if not isinstance(tasks, dict) or list(tasks) != names:
        return False
    figures = [found.get(name) for name in TEXT_FIGURES + (COST_FIGURES if names else ())]
    for task in tasks.values():
        figures += [task.get(name) if isinstance(task, dict) else None for name in TASK_FIGURES]
    return all(isinstance(figure, int | float) for figure in figures)


def write_row(
    folder: Path, config: dict[str, Any], predictions: list[dict[str, Any]], metrics: dict[str, Any]
) -> None:
    """Writes a row's folder; metrics.json is written last, and atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{name}: {json.dumps(value)}" for name, value in config.items()]
    (folder / "config.yaml").write_text("\n".join(lines) + "\n", "utf-8")
    with (folder / "predictions.csv").open("w", newline="", encoding="utf-8") as file:
        if predictions:
            writer = csv.DictWriter(file, fieldnames=list(predictions[0]))
            writer.writeheader()
            writer.writerows(predictions)
    write_whole(folder / "metrics.json", json.dumps(metrics, indent=1) + "\n")
