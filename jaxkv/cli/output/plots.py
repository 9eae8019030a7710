"""Figures, drawn by matplotlib (the extra `plot`): how all are begun and saved, and those of the
ledger, the simulators and `chat --demo`.

A figure is made without a display, and its SVG is the same for the same numbers. The curves of
experiments are in `line_plots`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from jaxkv.errors import UsageError
from jaxkv.ledger import (
    UNITS,
    CacheLedger,
    Model,
    decode_macs,
    generation_macs,
    prefill_macs,
    weight_bytes,
)
from jaxkv.replay import Fragmentation, Reuse

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 7.5, 4.2  # inches
CONTEXTS = [1 << n for n in range(9, 21)]
# Okabe and Ito's colours, which colour-blind readers tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
PARTS = (("used", "#009E73"), ("reserved", "#56B4E9"), ("internal", "#E69F00"),
         ("external", "#D55E00"))  # fmt: skip


def require() -> None:
    """Raises UsageError, with the way to install it, if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError("figures need matplotlib: pip install 'jaxkv[plot]'") from None


def new_figure(height: float = HEIGHT) -> "tuple[Figure, Axes]":
    """A figure of one plot, so many inches high; raises UsageError as `require` does."""
    require()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def save(figure: "Figure", file: Path | TextIO) -> None:
    """Writes a figure as what a path ends with, PNG or SVG; into an open file as SVG."""
    import matplotlib

    kind = file.suffix[1:].lower() if isinstance(file, Path) else "svg"
    with matplotlib.rc_context({"svg.hashsalt": "jaxkv", "svg.fonttype": "none"}):
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(file, dpi=150, format=kind, metadata=metadata)


def cache_sizes(
    models: Sequence[Model], choices: Sequence[str], weights: str, unit: str
) -> "Figure":
    """KV bytes of one sequence against its length, and the weights as a level line."""
    figure, axes = new_figure()
    for i, model in enumerate(models):
        colour = COLOURS[i % len(COLOURS)]
        for j, choice in enumerate(choices):
            ledger = CacheLedger.of(model, choice)
            sizes = [ledger.sequence_bytes(n) / UNITS[unit] for n in CONTEXTS]
            style = ("-", "--", ":", "-.")[j % 4]
            axes.plot(
                CONTEXTS, sizes, style, color=colour, label=literal(f"{model.name}, {choice}")
            )
        level = weight_bytes(model, weights) / UNITS[unit]
        name = literal(f"{model.name}, weights in {weights}")
        axes.axhline(level, color=colour, linewidth=0.8, alpha=0.6, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _context_ticks(axes, CONTEXTS[::2])
    axes.set(xlabel="context, tokens", ylabel=f"KV cache of one sequence, {unit}")
    axes.legend(fontsize=7)
    return figure


def multiply_adds(model: Model, lengths: Sequence[int]) -> "Figure":
    """Multiply-adds of a step, and of a whole generation, with a cache and without."""
    require()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = {
        "with cache": [decode_macs(model, n - 1) for n in lengths],
        "without": [prefill_macs(model, n) for n in lengths],
    }
    totals = {
        "with cache": [generation_macs(model, 1, n, cache=True) for n in lengths],
        "without": [generation_macs(model, 1, n, cache=False) for n in lengths],
    }
    for axes, series, title in (
        (left, steps, "one more token after n"),
        (right, totals, "n tokens, one after the other"),
    ):
        for i, (name, macs) in enumerate(series.items()):
            colour = COLOURS[(0, 3)[i]]
            axes.plot(lengths, [one.total for one in macs], color=colour, label=f"{name}, all")
            attention = [one.attention for one in macs]
            axes.plot(lengths, attention, "--", color=colour, label=f"{name}, attention")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlabel="n, tokens", title=title)
        axes.grid(alpha=0.3)
    left.set_ylabel(literal(f"multiply-adds, {model.name}"))
    left.legend(fontsize=7)
    return figure


def waste(results: Sequence[Fragmentation]) -> "Figure":
    """Slots by what they are, a bar an allocator, and over time."""
    require()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT + 1.6 * len(results)), layout="constrained")
    grid = figure.subplots(len(results) + 1, 1, height_ratios=[2, *([1] * len(results))])
    for axes in grid[2:]:
        axes.sharex(grid[1])
    top = grid[0]
    names = [allocator_name(one) for one in results]
    left = [0.0] * len(results)
    for part, colour in PARTS:
        shares = [getattr(one, part) / one.capacity for one in results]
        top.barh(names, shares, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    top.invert_yaxis()
    top.set(xlim=(0, 1), xlabel="share of all slots, mean over time")
    top.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.16))
    for axes, one, name in zip(grid[1:], results, names, strict=True):
        minutes = [sample.seconds / 60 for sample in one.samples]
        series = [[getattr(x, part) / one.capacity for x in one.samples] for part, _ in PARTS]
        axes.stackplot(minutes, series, colors=[colour for _, colour in PARTS], step="post")
        axes.set(ylim=(0, 1), ylabel=name)
        axes.yaxis.label.set(rotation=0, ha="right", fontsize=8)
    grid[-1].set_xlabel("minutes")
    return figure


def hits(results: Sequence[Reuse]) -> "Figure":
    """Hit rates, a bar a cache and order."""
    figure, axes = new_figure(0.7 + 0.34 * len(results))
    names = [f"{one.cache}, {one.eviction}" for one in results]
    colours = [COLOURS[4 if one.eviction == "optimum" else 0] for one in results]
    bars = axes.barh(names, [one.hit_rate for one in results], color=colours)
    axes.bar_label(bars, [f"{one.hit_rate:.1%}" for one in results], fontsize=8, padding=3)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.1), xlabel="share of prompt tokens found")
    return figure


def turns(counts: Sequence[tuple[int, int]]) -> "Figure":
    """Prompt tokens of each turn of a conversation: cached, and computed."""
    figure, axes = new_figure(0.9 + 0.42 * len(counts))
    names = [f"turn {number}" for number in range(1, len(counts) + 1)]
    cached, computed = ([count[i] for count in counts] for i in (0, 1))
    kinds = (
        ("found in the cache", cached, [0] * len(counts), "#009E73"),
        ("computed", computed, cached, "#D55E00"),
    )
    for label, widths, left, colour in kinds:
        bars = axes.barh(names, widths, left=left, color=colour, label=label)
        axes.bar_label(
            bars, [f"{n}" if n else "" for n in widths], label_type="center", color="white"
        )
    axes.invert_yaxis()
    axes.set_xlabel("tokens of the prompt, which is the whole conversation so far")
    axes.legend(fontsize=8, loc="upper right")
    return figure


def allocator_name(result: Fragmentation) -> str:
    """An allocator, with its page size where it has one."""
    return result.allocator if result.page_size is None else f"paged, {result.page_size}"


def literal(text: str) -> str:
    """A label that shows a name as it is: a `$` would begin a formula, a `_` hide it."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def _context_ticks(axes: "Axes", lengths: Sequence[int]) -> None:
    axes.set_xticks(lengths, [tokens_text(n) for n in lengths])


def tokens_text(n: int) -> str:
    """A number of tokens as it may be typed: `32k`."""
    for shift, letter in ((20, "m"), (10, "k")):
        if n >> shift and not n % (1 << shift):
            return f"{n >> shift}{letter}"
    return str(n)
