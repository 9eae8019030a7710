"""Write one page of HTML with the tables and figures of a model's KV cache.

  jaxkv report                                   # Llama 2 7B, into report.html
  jaxkv report --model llama-3.1-8b --out llama.html --memory 80GB
  jaxkv report --config path/config.json --trace conversation_trace.jsonl

The page has five sections: what a step computes again without a cache, the memory that a cache
takes, pages, shared prefixes, and what fewer heads, formats and windows save. Everything is counted
when the page is made: by closed forms, and by replaying requests over the engine's own pool and
index. The page needs no network and no other file. Figures need matplotlib (the extra `plot`).
"""

import html
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxkv.cli import console, ledger, plan, simulate_fragmentation, simulate_macs, simulate_reuse
from jaxkv.cli.arguments import ledger as rulers
from jaxkv.cli.arguments.ledger import UNITS as SHOWN_UNITS
from jaxkv.cli.arguments.ledger import LedgerModelOptions, add_model_arguments, argument
from jaxkv.cli.output import plots, tables
from jaxkv.cli.output.tables import Column, Row
from jaxkv.ledger import UNITS, CacheLedger, LedgerError, Model, parse_bytes, weight_bytes
from jaxkv.ledger.plan import fewer_kv_heads, make_plan
from jaxkv.printable import printable
from jaxkv.replay import (
    ALLOCATORS,
    CACHES,
    OPTIMUM,
    ReplayError,
    TraceRequest,
    check_reusable,
    draw_requests,
    measure_reuse,
    pack_requests,
    read_trace,
    turns,
    workloads,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT = "llama-2-7b"
CONTEXTS = [1 << 12, 1 << 15, 1 << 17]
LENGTHS = [1, 16, 128, 1024, 8192]

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.7rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0; background: #fff; border-radius: 6px; padding: 0.5rem; }
figure svg { width: 100%; height: auto; }
p.note { font-size: 0.85rem; opacity: 0.8; }
"""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The command line."""

    chosen: LedgerModelOptions
    out: Path
    memory: int | None
    trace: Path | None
    units: str


def parse(argv: list[str]) -> ReportOptions:
    """Reads the command line."""
    parser = console.Parser("jaxkv report", __doc__)
    add_model_arguments(parser, DEFAULT, several=False)
    add = parser.add_argument
    add("--out", type=Path, default=Path("report.html"), metavar="FILE",
        help="the page to write (default: %(default)s)")  # fmt: skip
    add("--memory", type=argument(parse_bytes), metavar="SIZE",
        help="of a device, for the plan (default: a quarter more than the weights)")  # fmt: skip
    add("--trace", type=Path, metavar="FILE",
        help="requests for the section on pages (default: drawn lengths)")  # fmt: skip
    add("--units", choices=SHOWN_UNITS, default="GiB", help="of bytes (default: %(default)s)")
    options = parser.read(ReportOptions, argv)
    tables.check_file(parser, options.out, "--out", (".html", ".htm"))
    plots.require()
    return options


def main(argv: list[str]) -> int:
    """Writes the page."""
    options = parse(argv)
    out, model = options.out, options.chosen.one(DEFAULT)
    memory = options.memory or weight_bytes(model) * 5 // 4
    requests = None if options.trace is None else read_trace(options.trace, needs="timestamp")
    sections = [
        lambda: recomputation(model),
        lambda: memory_bill(model, options.units),
        lambda: fragmentation(requests),
        lambda: prefixes(model),
        lambda: compression(model, memory, options.units),
    ]
    parts = []
    with console.progress(len(sections), unit="section", description="report") as bar:
        for section in sections:
            parts += section()
            bar.update()
    out.write_text(page(model, parts), encoding="utf-8")
    size = console.format_bytes(out.stat().st_size)
    print(f"{printable(str(out))}: {model.name}, {size}")
    return 0


def recomputation(model: Model) -> Iterator[str]:
    """What a step computes again without a cache."""
    rows = [simulate_macs.row_of(model, 1, n, loops=n <= 128) for n in LENGTHS]
    yield "<h2>1. What is computed again</h2>"
    yield (
        "<p>Generating a token needs the keys and values of all tokens before it. Without a cache "
        "they are computed again in each step, so attention over n steps grows with n³; with a "
        "cache it grows with n², and a step with n. Multiply-adds of generating n tokens after a "
        "prompt of one token:</p>"
    )
    yield table(rows, simulate_macs.COLUMNS)
    yield figure(plots.multiply_adds(model, plots.CONTEXTS))


def memory_bill(model: Model, unit: str) -> Iterator[str]:
    """What the cache takes."""
    stored = weight_bytes(model)
    rows, formats = [], []
    for choice in ("bf16", "int8", "kivi4"):
        try:
            cache = CacheLedger.of(model, choice)
        except LedgerError:
            continue  # a latent has no kivi pages; the plan's notes say so
        formats.append(choice)
        for context in CONTEXTS:
            row = ledger.row_of(cache, choice, context, 1, stored, "bf16")
            rows.append(row | {"crossing_context": cache.crossing_context(stored)})
    yield "<h2>2. What the cache takes</h2>"
    level = rows[0]["crossing_context"]
    reach = "never grows as large" if level is None else f"is level with them at {level:,} tokens"
    yield (
        f"<p>The weights take {stored / UNITS[unit]:,.2f} {unit} in bfloat16, whatever is served. "
        f"The cache of one sequence in bfloat16 {reach}; several at once share that length.</p>"
    )
    yield table(rows, ledger.columns(unit, ledger.DeviceOptions()))
    yield figure(plots.cache_sizes([model], formats, "bf16", unit))


def fragmentation(trace: Sequence[TraceRequest] | None) -> Iterator[str]:
    """What allocators waste."""
    requests = draw_requests("chat", 2_000, 10.0) if trace is None else trace
    capacity = 1 << 16 if trace is None else 1 << 20
    runs: list[tuple[str, int]] = [(name, 16) for name in ALLOCATORS] + [("paged", 256)]
    results, unfit = simulate_fragmentation.replay(requests, runs, capacity=capacity)
    yield "<h2>3. Pages</h2>"
    source = "lengths of chats, drawn" if trace is None else "a trace"
    yield (
        f"<p>{len(requests):,} requests ({source}) over a memory of {capacity:,} slots, a token "
        "every 30 ms. An allocator of runs reserves slots before it is known how many will be "
        "needed; pages are allocated as a sequence grows.</p>"
    )
    rows = [simulate_fragmentation.row_of(one) for one in results]
    yield table(rows, simulate_fragmentation.COLUMNS)
    yield from map(note, unfit)
    yield figure(plots.waste(results))


def prefixes(model: Model) -> Iterator[str]:
    """What a radix index finds."""
    yield "<h2>4. Shared prefixes</h2>"
    try:
        check_reusable(model)
    except ReplayError as error:
        yield note(str(error))
        return
    talk = list(pack_requests(workloads.conversations(1, at_a_time=1)))
    rows = [simulate_reuse.turn_row(model, turn) for turn in turns(talk, "token", capacity=4_096)]
    yield (
        "<p>Five turns of a conversation over the engine's index: what was said before is found, "
        "and only what is new is computed.</p>"
    )
    yield table(rows, simulate_reuse.TURN_COLUMNS)
    talks = list(pack_requests(workloads.conversations(200, at_a_time=100)))
    runs = [(cache, "lru") for cache in CACHES] + [("page", OPTIMUM), ("token", OPTIMUM)]
    results = [
        measure_reuse(talks, cache, capacity=80_000, eviction=order, model=model)
        for cache, order in runs
    ]
    yield (
        f"<p>{len(talks):,} requests of 200 conversations, 100 at a time, over 80,000 tokens of "
        "cache, which is less than all of them need; seconds at 400 Tflop/s.</p>"
    )
    yield table(
        [simulate_reuse.row_of(one, model, 4e14) for one in results], simulate_reuse.COLUMNS
    )
    yield note(
        "token finds at least as much as page if nothing is evicted. When memory is short it may "
        "find less: it also keeps the last page of each sequence, and evicts others for it."
    )
    yield figure(plots.hits([one for one in results if one.cache in CACHES[2:]]))


def compression(model: Model, memory: int, unit: str) -> Iterator[str]:
    """What heads, formats and windows save."""
    context = 1 << 15
    options = {"context": context, "kv_heads": fewer_kv_heads(model), "windows": [4096]}
    found = make_plan(model, memory, **options)
    yield "<h2>5. Fewer heads, coarser values, fewer tokens</h2>"
    yield (
        f"<p>Caches of a sequence of {context:,} tokens that fit into "
        f"{memory / UNITS[unit]:,.2f} {unit} next to the weights, those with the fewest changes to "
        "the model first, then by what their format costs in perplexity.</p>"
    )
    shown = found.options[: plan.SHOWN]
    if shown:
        rows = [plan.row_of(model.name, context, 1, one) for one in shown]
        yield table(rows, plan.columns(unit))
    else:
        least = found.least_bytes / UNITS[unit]
        yield f"<p>None fits: the smallest takes {least:,.2f} {unit}.</p>"
    yield from (note(text) for text in plan.notes(found, len(shown), ()))


def page(model: Model, parts: Sequence[str]) -> str:
    """The whole document."""
    title = f"The KV cache of {html.escape(model.name)}"
    facts = [
        f"{model.parameters:,} parameters, {len(model.layers)} layers; attention: {model.kind}.",
        f"Source: {model.source}." if model.source else "",
        *rulers.notes([model], max(CONTEXTS)),
    ]
    head = f'<head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head>'
    body = [f"<h1>{title}</h1>", *map(note, filter(None, facts)), *parts]
    return (
        f'<!doctype html>\n<html lang="en">{head}\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def note(text: str) -> str:
    """A line in small print."""
    return f'<p class="note">{html.escape(text)}</p>'


def table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Rows as a table."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(x)}</{tag}>" for x in cells) + "</tr>"

    head = line("th", [column.title for column in columns])
    body = [line("td", [column.show(row[column.key]) for column in columns]) for row in rows]
    return f'<div class="wide"><table>{head}{"".join(body)}</table></div>'


def figure(drawn: "Figure") -> str:
    """A figure as SVG within the page."""
    file = io.StringIO()
    plots.save(drawn, file)
    text = file.getvalue()
    return f"<figure>{text[text.index('<svg') :]}</figure>"
