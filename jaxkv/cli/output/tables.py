"""Rows of numbers as a table, as CSV or as JSON. Pictures are drawn by `plots`."""

import argparse
import csv
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv.printable import printable

Row = Mapping[str, Any]


class Column(NamedTuple):
    """A column of a table: a row's key, its title, and how a value is shown."""

    key: str
    title: str
    show: Callable[[Any], str] = str


def whole(value: float | None) -> str:
    """A number without decimals, in groups of three digits; a dash for none."""
    return "-" if value is None else f"{value:,.0f}"


def limit(value: int | None) -> str:
    """A whole number that None leaves open."""
    return "no limit" if value is None else whole(value)


def decimals(count: int, suffix: str = "") -> Callable[[float | None], str]:
    """A way of showing numbers with so many decimals."""
    return lambda value: "-" if value is None else f"{value:,.{count}f}{suffix}"


def percent(value: float | None) -> str:
    """A share, with two decimals."""
    return "-" if value is None else f"{value:.2%}"


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """How rows are printed: as JSON, as CSV, or else as a table."""

    json: bool
    csv: bool


def add_output_arguments(parser: argparse.ArgumentParser, *, plot: str | None) -> None:
    """Adds the arguments of `OutputOptions`, and `--plot` for a figure of what `plot` says."""
    group = parser.add_argument_group("output (default: a table)")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--json", action="store_true", help="a JSON list of rows, raw numbers")
    one.add_argument("--csv", action="store_true", help="CSV with a header, raw numbers")
    if plot is not None:
        group.add_argument(
            "--plot", type=Path, metavar="FILE", help=f"draw {plot} into a .png or .svg"
        )


def check_file(
    parser: argparse.ArgumentParser, path: Path | None, option: str, suffixes: Sequence[str]
) -> None:
    """Ends the run if a file that is to be written cannot be, before minutes of work."""
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        parser.error(f"{option} {path}: must end with {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        parser.error(f"{option} {path}: no such folder")
    if path.is_dir():
        parser.error(f"{option} {path}: is a folder")


def write(
    rows: Sequence[Row],
    columns: Sequence[Column],
    output: OutputOptions,
    notes: Iterable[str] = (),
) -> None:
    """Prints rows; notes go under a table, or to stderr if the rows are CSV or JSON."""
    notes = list(dict.fromkeys(notes))
    if output.json:
        print(json.dumps(rows, indent=1))
    elif output.csv:
        writer = csv.DictWriter(sys.stdout, rows[0].keys() if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: _cell(v) for k, v in row.items()} for row in rows)
    else:
        print_table(rows, columns)
    for note in notes:
        print(
            f"note: {printable(note)}", file=sys.stderr if output.json or output.csv else sys.stdout
        )


def print_table(rows: Sequence[Row], columns: Sequence[Column]) -> None:
    """Prints a table: drawn on a terminal, Markdown elsewhere."""
    cells = [[printable(column.show(row[column.key])) for column in columns] for row in rows]
    titles = [column.title for column in columns]
    if sys.stdout.isatty():
        draw(titles, cells)
    else:
        print(markdown(titles, cells))


def draw(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Draws a table on a terminal; words wrap, and no figure is cut.

    Where it is too wide, a column that says the same in each row becomes a line above it.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, emoji=False)  # `[x]` in a model's name is no style
    wrapped = [[_wrapped(title, 12) for title in titles]]
    wrapped += [[_wrapped(text, 24) for text in row] for row in cells]
    widths = [max(map(_width, column)) + 3 for column in zip(*wrapped, strict=True)]
    kept = list(range(len(titles)))
    if sum(widths) > console.width and len(cells) > 1:
        alike = [i for i in kept if len({row[i] for row in cells}) == 1]
        kept = [i for i in kept if i not in alike] or kept[:1]
        print("; ".join(f"{titles[i]}: {cells[0][i]}" for i in alike))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i in kept:
        numeric = all(_is_number(row[i]) for row in cells)
        justify = "right" if numeric else "left"
        table.add_column(wrapped[0][i], justify=justify, no_wrap=True)
    for row in wrapped[1:]:
        table.add_row(*(row[i] for i in kept))
    console.width = max(console.width, sum(widths[i] for i in kept))
    console.print(table)


def markdown(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Cells as a Markdown table."""
    lines = [titles, ["---"] * len(titles), *cells]
    return "\n".join(f"| {' | '.join(x.replace('|', '/') for x in line)} |" for line in lines)


def _cell(value: Any) -> Any:
    return "; ".join(map(str, value)) if isinstance(value, list | tuple) else value


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def _width(text: str) -> int:
    return max(map(len, text.split("\n")))


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text == "-"
