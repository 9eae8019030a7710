"""List the KV caches of a model that fit into a memory: by heads, format, window and page size.

  jaxkv plan --model llama-3.1-8b --memory 24GB --context 32k
  jaxkv plan --model llama-2-7b --memory 80GB --context 32k --batch 8 --all
  jaxkv plan --model qwen3-8b --memory 16GiB --context 128k --formats int8,kivi4

The command combines the model as it is and with half its KV heads, a quarter, .. down to one; the
formats whose quality was measured; the model's own windows and each of --windows; and the
--page-sizes. What fits is listed with the fewest changes to the model first, then by the perplexity
that its format costs, then by bytes. --reserve keeps memory free, for activations and the
framework.

Quality is the perplexity on a text divided by that of the full cache, as `bench formats` measured
it: on the model itself, or else on smollm2-135m; the table says which. Fewer heads and narrower
windows make another model, which has to be trained; what they cost was not measured.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxkv.cli import console
from jaxkv.cli.arguments import ledger as rulers
from jaxkv.cli.arguments.ledger import UNITS as SHOWN_UNITS
from jaxkv.cli.arguments.ledger import (
    LedgerModelOptions,
    add_model_arguments,
    argument,
    count,
    listed,
)
from jaxkv.cli.output import tables
from jaxkv.cli.output.tables import Column, OutputOptions, limit, whole
from jaxkv.kv_format import PAGE_SIZES, split_choices
from jaxkv.ledger import (
    UNITS,
    WEIGHT_BITS,
    Model,
    parse_bytes,
    parse_tokens,
)
from jaxkv.ledger.plan import PLANNED, Option, Plan, fewer_kv_heads, make_plan

DEFAULT = "llama-3.1-8b"
SHOWN = 20  # rows, without --all
NOTHING_FITS = 1  # exit code


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The command line."""

    chosen: LedgerModelOptions
    memory: int
    context: int
    batch: int
    reserve: int
    heads: list[int] | None
    formats: list[str]
    windows: list[int]
    page_sizes: list[int]
    weights: str
    tensor_parallel: int
    units: str
    all: bool
    output: OutputOptions


def parse(argv: list[str]) -> PlanOptions:
    """Reads the command line."""
    parser = console.Parser("jaxkv plan", __doc__)
    add_model_arguments(parser, DEFAULT, several=False)
    add = parser.add_argument
    add("--memory", type=argument(parse_bytes), required=True, metavar="SIZE",
        help="of a device, such as 80GB or 74.5GiB")  # fmt: skip
    add("--context", type=argument(parse_tokens), default=1 << 15, metavar="N",
        help="tokens of each sequence (default: 32k)")  # fmt: skip
    add("--batch", type=argument(count), default=1, metavar="B", help="sequences (default: 1)")
    add("--reserve", type=argument(partial(parse_bytes, least=0)), default=0, metavar="SIZE",
        help="memory to keep free (default: 0)")  # fmt: skip
    add("--heads", type=listed(count), metavar="K,..",
        help="KV heads to try (default: half, a quarter, .. 1)")  # fmt: skip
    add("--formats", type=argument(split_choices), default=list(PLANNED), metavar="F,..",
        help=f"KV formats to try (default: {','.join(PLANNED)})")  # fmt: skip
    add("--windows", type=listed(parse_tokens), default=[4096], metavar="W,..",
        help="windows to try, in addition to the model's own (default: 4k)")  # fmt: skip
    add("--page-sizes", type=listed(count), default=[16, 32, 64], metavar="P,..",
        help="tokens per page to try (default: 16,32,64)")  # fmt: skip
    add("--weights", choices=WEIGHT_BITS, default="bf16",
        help="type in which the weights are stored (default: %(default)s)")  # fmt: skip
    add("--tensor-parallel", type=argument(count), default=1, metavar="N",
        help="devices that share heads and weights (default: 1)")  # fmt: skip
    add("--units", choices=SHOWN_UNITS, default="GiB", help="of the table (default: %(default)s)")
    add("--all", action="store_true", help=f"list all that fit, not only the first {SHOWN}")
    tables.add_output_arguments(parser, plot=None)
    options = parser.read(PlanOptions, argv)
    for size in options.page_sizes:
        if size not in PAGE_SIZES:
            parser.error(f"--page-sizes {size}: must be {PAGE_SIZES[0]} to {PAGE_SIZES[-1]}")
    if options.reserve >= options.memory:
        parser.error("--reserve leaves nothing of --memory")
    return options


def search(model: Model, options: PlanOptions) -> Plan:
    """The combinations that fit."""
    return make_plan(
        model,
        options.memory - options.reserve,
        context=options.context,
        batch=options.batch,
        kv_heads=fewer_kv_heads(model) if options.heads is None else options.heads,
        formats=options.formats,
        windows=options.windows,
        page_sizes=options.page_sizes,
        weights=options.weights,
        devices=options.tensor_parallel,
    )


def main(argv: list[str]) -> int:
    """Prints what fits; returns 1 if nothing does."""
    options = parse(argv)
    model = options.chosen.one(DEFAULT)
    plan, unit, output = search(model, options), options.units, options.output
    if not plan.options:
        need = (plan.least_bytes + options.reserve) / UNITS[unit]
        print(
            f"nothing fits: the smallest of {plan.tried} combinations takes {need:.2f} {unit}, "
            f"--memory is {options.memory / UNITS[unit]:.2f} {unit}",
            file=sys.stderr,
        )
        if output.json:
            print("[]")
        return NOTHING_FITS
    shown = plan.options
    if not (options.all or output.json or output.csv):
        shown = shown[:SHOWN]
    rows = [row_of(model.name, options.context, options.batch, one) for one in shown]
    more = rulers.notes([model], options.context)
    tables.write(rows, columns(unit), output, notes(plan, len(shown), more))
    return 0


def row_of(model: str, context: int, batch: int, one: Option) -> dict[str, Any]:
    """An option as a row."""
    quality = one.quality
    return {
        "model": model,
        "context": context,
        "batch": batch,
        "kv_heads": one.kv_heads,
        "format": one.kv_format,
        "window": one.window,
        "page_size": one.page_size,
        "kv_bytes": one.kv_bytes,
        "total_bytes": one.total_bytes,
        "largest_context": one.largest_context,
        "largest_batch": one.largest_batch,
        "perplexity_ratio": None if quality is None else quality.perplexity_ratio,
        "kl_mean": None if quality is None else quality.kl_mean,
        "measured_on": None if quality is None else quality.model,
        "measured": None if quality is None else quality.date,
    }


def columns(unit: str) -> list[Column]:
    """The table's columns."""

    def size(value: int) -> str:
        return f"{value / UNITS[unit]:,.2f}"

    def or_own(value: int | None) -> str:
        return "its own" if value is None else f"{value:,}"

    return [
        Column("kv_heads", "KV heads", or_own),
        Column("window", "window", or_own),
        Column("format", "format"),
        Column("page_size", "page"),
        Column("kv_bytes", f"KV, {unit}", size),
        Column("total_bytes", f"with weights, {unit}", size),
        Column("largest_context", "longest context", limit),
        Column("largest_batch", "largest batch", whole),
        Column("perplexity_ratio", "perplexity, of full", quality_text),
        Column("measured_on", "measured on", lambda name: name or "-"),
    ]


def quality_text(ratio: float | None) -> str:
    """A measured ratio, or that there is none."""
    return "not measured" if ratio is None else f"{ratio:.4f}"


def notes(plan: Plan, shown: int, more: Iterable[str]) -> list[str]:
    """What the table leaves out."""
    fit = len(plan.options)
    found = [f"{fit} of {plan.tried} combinations fit; {shown} are shown"]
    return [*found, *plan.notes, *more]
