"""Plots that the mains of experiments share. This module is no command.

matplotlib comes with the extra `plot`. Without it experiments write their tables only.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxkv.cli.output import plots

SUFFIXES = (".png", ".svg")

Line = Sequence[tuple[float, float, float]]  # x, y and the spread of y


def save_lines(
    path: Path,
    lines: Mapping[str, Line],
    *,
    labels: tuple[str, str],
    title: str,
    levels: Mapping[str, float] | None = None,
    joined: bool = True,
    log_y: bool = False,
) -> list[Path]:
    """Draws lines with error bars, as PNG and SVG.

    Args:
      path: without a suffix.
      lines: points by name.
      labels: names of the axes x and y.
      title: title of the plot.
      levels: further values of y, by name, drawn across.
      joined: points of a line are joined.
      log_y: the y axis is logarithmic.

    Returns:
      The files; none where matplotlib is absent.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return []
    figure, axes = plots.new_figure()
    for name, points in lines.items():
        x, y, spread = zip(*points, strict=True)
        errors: Any = spread if any(spread) else None
        axes.errorbar(
            x, y, yerr=errors, label=name, marker="o", linestyle="-" if joined else "", capsize=3
        )
    for name, level in (levels or {}).items():
        axes.axhline(level, linestyle="--", linewidth=1, color="grey")
        axes.annotate(name, (1, level), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    if log_y:
        axes.set_yscale("log")
    axes.set(xlabel=labels[0], ylabel=labels[1], title=title)
    axes.legend(fontsize="small")
    files = [path.with_name(path.name + suffix) for suffix in SUFFIXES]
    for file in files:
        plots.save(figure, file)
    return files
