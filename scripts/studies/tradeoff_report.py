"""The reports of `tradeoff`: tables, plots of quality over bytes, and one page with everything.

This module is not a command.
"""

import base64
import csv
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from jaxkv.cli.output.line_plots import save_lines

_FIELDS = """
heads kv_format method budget ratio perplexity stderr bits_per_byte kl_mean kl_p99 kl_max
top1 nbytes bytes_per_token tokens_per_gib accuracy prefill_seconds decode_ms
decode_us_per_cached_token refused
"""
FIELDS: tuple[str, ...] = tuple(_FIELDS.split())  # columns of results.csv
COLUMNS = {
    "heads": "KV heads",
    "kv_format": "format",
    "method": "method",
    "budget": "budget",
    "ratio": "removed",
    "part": "bytes of the full cache",
    "tokens_per_gib": "tokens in 1 GiB",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
    "kl_mean": "KL mean",
    "kl_p99": "KL p99",
    "top1": "top-1",
    "prefill_seconds": "prefill, s",
    "decode_ms": "decode step, ms",
    "decode_us_per_cached_token": "us per cached token",
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em }
table { border-collapse: collapse; font-size: 13px } th { text-align: left }
td, th { border: 1px solid #ccc; padding: 3px 7px; text-align: right } img { max-width: 49% }
.best { background: #e8f4e8 } code { background: #f4f4f4; padding: 0 3px }
"""


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row's results by the names of FIELDS; unmeasured ones are empty."""
    found = row["config"] | row
    tasks = row.get("tasks") or {}
    if tasks:
        found["accuracy"] = mean(task["string_match"] for task in tasks.values())
    return {name: found.get(name, "") for name in FIELDS}


def write_results(out: Path, results: list[dict[str, Any]]) -> None:
    """Writes all rows as CSV and JSON."""
    with (out / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=FIELDS)
        writer.writeheader()
        writer.writerows(map(flat, results))
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")


def table(results: list[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [
        "| KV heads | format | method | budget | bytes | perplexity | bits/byte | KL mean | KL p99 "
        "| top-1 | tasks |",
        "|" + "---|" * 11,
    ]
    full = results[0]["nbytes"]
    for row in map(flat, results):
        names = f"| {row['heads']} | {row['kv_format']} | {row['method']} | {row['budget'] or ''} |"
        if row["refused"]:
            lines.append(f"{names} refused: {row['refused']} |" + " |" * 6)
            continue
        tasks = f"{row['accuracy']:.0f}" if row["accuracy"] != "" else ""
        lines.append(
            f"{names} {row['nbytes'] / full:.3f} | {row['perplexity']:.3f} "
            f"| {row['bits_per_byte']:.4f} | {row['kl_mean']:.4f} | {row['kl_p99']:.3f} "
            f"| {row['top1']:.3f} | {tasks} |"
        )
    return "\n".join(lines)


def write_report(out: Path, results: Sequence[Mapping[str, Any]], command: str) -> list[Path]:
    """Writes the plots (with matplotlib) and report.html; returns the files."""
    rows = [row for row in results if "refused" not in row]
    plots: list[Path] = []
    for name, label, log in (
        ("kl_mean", "KL(full || this), nats", True),
        ("perplexity", "perplexity", True),
        ("accuracy", "tasks, % right", False),
    ):
        lines = points(rows, name)
        if lines:
            plots += save_lines(
                out / f"pareto_{name}",
                lines,
                labels=("bytes, as a part of the full float32 cache", label),
                title=f"{label} against bytes",
                joined=False,
                log_y=log,
            )
    page = out / "report.html"
    page.write_text(render(results, command, [file for file in plots if file.suffix == ".png"]))
    return [page, *plots]


def points(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, list[tuple]]:
    """Returns bytes and one figure of each row, by heads, format and method."""
    full = rows[0]["nbytes"]
    lines: dict[str, list[tuple]] = {}
    for row in rows:
        value, config = figure(row, name), row["config"]
        if value is None or (name == "kl_mean" and value <= 0):
            continue
        line = f"{config['heads']} KV heads, {config['kv_format']}, {config['method']}"
        lines.setdefault(line, []).append((row["nbytes"] / full, *value_and_spread(row, name)))
    return lines


def figure(row: Mapping[str, Any], name: str) -> float | None:
    """Returns one figure of a row; None if it was not measured."""
    if name != "accuracy":
        return row.get(name)
    tasks = (row.get("tasks") or {}).values()
    return sum(task["string_match"] for task in tasks) / len(tasks) if tasks else None


def value_and_spread(row: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Returns the figure, with its standard error if that is known."""
    value = figure(row, name)
    assert value is not None
    if name == "perplexity":
        return value, value * row["stderr"]
    tasks = (row.get("tasks") or {}).values()
    if name == "accuracy" and tasks:
        return value, sum(task["stderr"] ** 2 for task in tasks) ** 0.5 / len(tasks)
    return value, 0.0


def pareto(rows: Sequence[Mapping[str, Any]]) -> set[int]:
    """Returns, by `id`, the rows that no other row beats in both bytes and KL."""
    return {
        id(row)
        for row in rows
        if not any(
            other["nbytes"] <= row["nbytes"]
            and other["kl_mean"] <= row["kl_mean"]
            and (other["nbytes"], other["kl_mean"]) != (row["nbytes"], row["kl_mean"])
            for other in rows
        )
    }


def render(results: Sequence[Mapping[str, Any]], command: str, plots: Sequence[Path]) -> str:
    """Returns the page: command, plots, and the table with the best rows marked."""
    measured = [row for row in results if "refused" not in row]
    best, full = pareto(measured), measured[0]["nbytes"]
    tasks = list(dict.fromkeys(task for row in measured for task in row.get("tasks") or {}))
    head = "".join(f"<th>{html.escape(x)}</th>" for x in (*COLUMNS.values(), *tasks))
    body = []
    for row in results:
        found = row["config"] | row
        if "refused" in row:
            names = "".join(f"<td>{cell(found.get(x))}</td>" for x in list(COLUMNS)[:4])
            rest = len(COLUMNS) + len(tasks) - 4
            reason = html.escape(row["refused"])
            body.append(f"<tr>{names}<td colspan={rest}>refused: {reason}</td></tr>")
            continue
        found["part"] = row["nbytes"] / full
        cells = [cell(found.get(name)) for name in COLUMNS]
        for task in tasks:
            score = (row.get("tasks") or {}).get(task)
            cells.append(
                "" if score is None else f"{score['string_match']:.0f} ± {score['stderr']:.0f}"
            )
        mark = ' class="best"' if id(row) in best else ""
        body.append(f"<tr{mark}>" + "".join(f"<td>{x}</td>" for x in cells) + "</tr>")
    images = "".join(
        f'<img alt="{file.stem}" src="data:image/png;base64,'
        f'{base64.b64encode(file.read_bytes()).decode()}">'
        for file in plots
    )
    words = (
        "Rows that no other row beats in both bytes and KL are marked. KL is KL(full || row) of "
        "the next-token distributions after the context, in nats; tasks are per cent right ± "
        "standard error."
    )
    return (
        "<!doctype html><meta charset=utf-8><title>KV cache trade-offs</title>"
        f"<style>{STYLE}</style><h1>KV cache trade-offs</h1>"
        f"<p><code>{html.escape(command)}</code></p><p>{words}</p>{images}"
        f"<table><tr>{head}</tr>{''.join(body)}</table>"
    )


def cell(value: Any) -> str:
    """Returns a value of the table as text."""
    if value is None:
        return ""
    return html.escape(f"{value:.4g}" if isinstance(value, float) else str(value))
