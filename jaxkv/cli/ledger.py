"""Count what a model's KV cache takes beside its weights, from its config alone.

  jaxkv ledger                                    # Llama 2 7B at 4k, 32k and 128k tokens
  jaxkv ledger --model llama-2-7b,llama-3.1-8b --context 4k,32k,128k --format bf16,int8
  jaxkv ledger --config path/config.json --context 8k --batch 1,16 --tensor-parallel 2
  jaxkv ledger --model qwen3-8b --memory 80GB --bandwidth 3.35TB --plot kv.svg
  jaxkv ledger --models                           # the presets

KV bytes are of whole pages, with the parameters of formats and all that windows keep; `x weights`
is their part of the weights', and `level at` the context at which they have grown as large. With
--memory come the longest context of the batch, and the most sequences of the context, that fit
beside the weights; with --bandwidth the time that a decode step cannot be shorter than, and its
operations for each byte; with --flops the operations of a prefill of the context, attention's share
of them, and the time that they take. With --tensor-parallel bytes are of one device.

Tokens: 4k is 4,096. Bytes: 80GB is 80e9, 80GiB is 80 * 2^30; the table is in one --units.
"""

import argparse
from typing import Any

from jaxkv.cli import console
from jaxkv.cli.arguments.ledger import UNITS as SHOWN_UNITS
from jaxkv.cli.arguments.ledger import add_model_arguments, argument, count, listed, models, notes
from jaxkv.cli.output import tables
from jaxkv.cli.output.tables import Column, decimals, limit, percent, whole
from jaxkv.kv_format import PAGE_SIZES, split_choices
from jaxkv.ledger import (
    UNITS,
    WEIGHT_BITS,
    CacheLedger,
    Model,
    arithmetic_intensity,
    parse_bytes,
    parse_rate,
    parse_tokens,
    prefill_macs,
    preset,
    preset_names,
    step_seconds,
    weight_bytes,
)

DEFAULT = "llama-2-7b"


def main(argv: list[str]) -> int:
    """Prints a row for each model, context, batch and format."""
    parser = console.Parser("jaxkv ledger", __doc__)
    add_model_arguments(parser, DEFAULT, several=True)
    add = parser.add_argument
    add("--models", action="store_true", help="list the presets, and end")
    tokens = listed(parse_tokens)
    add("--context", type=tokens, default=[1 << 12, 1 << 15, 1 << 17], metavar="N,..",
        help="tokens of a sequence (default: 4k,32k,128k)")  # fmt: skip
    add("--batch", type=listed(count), default=[1], metavar="B,..", help="sequences (default: 1)")
    add("--format", type=argument(split_choices), default=["bf16"], metavar="F,..",
        help="KV formats; kivi4,window=bf16 is one choice, by layer (default: bf16)")  # fmt: skip
    add("--page-size", type=argument(count), metavar="P",
        help="tokens a page (default: 16, with kivi formats 32)")  # fmt: skip
    add("--weights", choices=WEIGHT_BITS, default="bf16", help="stored as (default: %(default)s)")
    add("--tensor-parallel", type=argument(count), default=1, metavar="N",
        help="devices that share heads and weights (default: 1)")  # fmt: skip
    add("--memory", type=argument(parse_bytes), metavar="SIZE", help="of a device, as 80GB")
    add("--bandwidth", type=argument(parse_bytes), metavar="SIZE",
        help="of a device's memory a second, as 3.35TB")  # fmt: skip
    add("--flops", type=argument(parse_rate), metavar="R",
        help="operations a second of a device, as 400T")  # fmt: skip
    add("--units", choices=SHOWN_UNITS, default="GiB", help="of the table (default: %(default)s)")
    tables.add_output_arguments(parser, plot="KV bytes against the context")
    args = parser.parse_args(argv)
    if args.page_size is not None and args.page_size not in PAGE_SIZES:
        parser.error(f"--page-size must be {PAGE_SIZES[0]} to {PAGE_SIZES[-1]}")
    tables.check_file(parser, args.plot, "--plot", (".png", ".svg"))
    if args.models:
        if args.plot is not None:
            parser.error("--plot is of what is counted, not of the list of --models")
        return list_models(args)
    chosen = models(args, DEFAULT)
    if args.plot is not None:
        from jaxkv.cli.output import plots

        plots.save(plots.cache_sizes(chosen, args.format, args.weights, args.units), args.plot)
    tables.write(rows(chosen, args), columns(args), args, notes(chosen, max(args.context)))
    return 0


def list_models(args: argparse.Namespace) -> int:
    """Prints the presets."""
    found = []
    for model in map(preset, preset_names()):
        ledger = CacheLedger.of(model)
        found.append(
            {
                "model": model.name,
                "parameters": model.parameters,
                "active_parameters": model.active_parameters,
                "layers": len(model.layers),
                "attention": model.kind,
                "bytes_per_token": ledger.bytes_per_token,
                "max_context": model.max_context,
                "source": model.source,
                "notes": list(model.notes),
            }
        )
    shown = (
        Column("model", "model"),
        Column("parameters", "parameters", whole),
        Column("layers", "layers"),
        Column("attention", "attention"),
        Column("bytes_per_token", "KV bytes a token, bf16", whole),
        Column("max_context", "made for", whole),
        Column("source", "source"),
    )
    tables.write(found, shown, args)
    return 0


def rows(chosen: list[Model], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each model, context, batch and format.

    Raises:
      LedgerError: a format, page size or split does not fit a model.
    """
    found = []
    for model in chosen:
        stored = weight_bytes(model, args.weights, args.tensor_parallel)
        ledgers = {
            choice: CacheLedger.of(
                model, choice, page_size=args.page_size, devices=args.tensor_parallel
            )
            for choice in args.format
        }
        for choice, ledger in ledgers.items():
            for batch in args.batch:
                crossing = ledger.crossing_context(stored, batch)
                for context in args.context:
                    row = row_of(ledger, choice, context, batch, stored, args.weights)
                    row["crossing_context"] = crossing
                    row |= limits(ledger, row, args)
                    row["notes"] = list(model.notes)
                    found.append(row)
    return found


def row_of(
    ledger: CacheLedger, choice: str, context: int, batch: int, stored: int, weights: str
) -> dict[str, Any]:
    """What a cache takes at a context and batch."""
    kv_bytes = batch * ledger.sequence_bytes(context) + ledger.constant_bytes
    prefill = prefill_macs(ledger.model, context)
    return {
        "model": ledger.model.name,
        "attention": ledger.model.kind,
        "context": context,
        "batch": batch,
        "format": choice,
        "page_size": ledger.page_size,
        "tensor_parallel": ledger.devices,
        "bytes_per_token": ledger.bytes_per_token,
        "kv_bytes": kv_bytes,
        "state_bytes": batch * ledger.state_bytes,
        "weights": weights,
        "weight_bytes": stored,
        "ratio": kv_bytes / stored,
        "prefill_flops": 2 * batch * prefill.total,
        "attention_share": prefill.attention_share,
        "flops_per_byte": arithmetic_intensity(
            ledger, num_tokens=context, batch=batch, weights=weights
        ),
    }


def limits(ledger: CacheLedger, row: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """What a memory holds, and what a bandwidth allows."""
    found: dict[str, Any] = {}
    context, batch = row["context"], row["batch"]
    if args.memory is not None:
        rest = args.memory - row["weight_bytes"]
        found["memory_bytes"] = args.memory
        found["largest_context"] = ledger.largest_context(rest, batch)
        found["largest_batch"] = ledger.largest_batch(rest, context)
    if args.bandwidth is not None:
        found["step_seconds"] = step_seconds(
            ledger, args.bandwidth, num_tokens=context, batch=batch, weights=args.weights
        )
    if args.flops is not None:
        found["prefill_seconds"] = row["prefill_flops"] / args.flops / ledger.devices
    return found


def columns(args: argparse.Namespace) -> list[Column]:
    """The table's columns."""

    def size(value: int) -> str:
        return f"{value / UNITS[args.units]:,.2f}"

    shown = [
        Column("model", "model"),
        Column("attention", "attention"),
        Column("context", "context", whole),
        Column("batch", "batch", whole),
        Column("format", "format"),
        Column("bytes_per_token", "bytes a token", whole),
        Column("kv_bytes", f"KV, {args.units}", size),
        Column("weight_bytes", f"weights, {args.units}", size),
        Column("ratio", "x weights", decimals(2)),
        Column("crossing_context", "level at", whole),
    ]
    if args.memory is not None:
        shown.append(Column("largest_context", "longest context", limit))
        shown.append(Column("largest_batch", "largest batch", whole))
    if args.bandwidth is not None:
        shown.append(Column("step_seconds", "ms a step", lambda s: f"{s * 1e3:.2f}"))
        shown.append(Column("flops_per_byte", "flops a byte", decimals(1)))
    if args.flops is not None:
        shown.append(Column("prefill_flops", "prefill, Tflop", lambda n: f"{n / 1e12:,.1f}"))
        shown.append(Column("attention_share", "of it attention", percent))
        shown.append(Column("prefill_seconds", "prefill, s", decimals(2)))
    return shown
