"""Count the bytes of a model's KV cache and compare them with its weights, from its config only.

  jaxkv ledger                                    # Llama 2 7B at 4k, 32k and 128k tokens
  jaxkv ledger --model llama-2-7b,llama-3.1-8b --context 4k,32k,128k --format bf16,int8
  jaxkv ledger --config path/config.json --context 8k --batch 1,16 --tensor-parallel 2
  jaxkv ledger --model qwen3-8b --memory 80GB --bandwidth 3.35TB --plot kv.svg
  jaxkv ledger --models                           # the presets

KV bytes are those of whole pages, with the parameters of formats and all that windows keep;
`x weights` is their ratio to the bytes of the weights, and `level at` is the context at which both
are equal. --memory adds the longest context for the batch, and the largest batch for the context,
that fit next to the weights. --bandwidth adds the least time of a decode step, and its operations
per byte. --flops adds the operations of a prefill of the context, the share of attention in them,
and the time that they take. With --tensor-parallel, bytes are per device.

Tokens: 4k is 4,096. Bytes: 80GB is 80e9, 80GiB is 80 * 2^30; the table is in one --units.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxkv.cli import console
from jaxkv.cli.arguments.ledger import UNITS as SHOWN_UNITS
from jaxkv.cli.arguments.ledger import (
    LedgerModelOptions,
    add_model_arguments,
    argument,
    count,
    listed,
    notes,
)
from jaxkv.cli.output import tables
from jaxkv.cli.output.tables import Column, OutputOptions, decimals, limit, percent, whole
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


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """What is known of the device; None where nothing was given.

    Attributes:
      memory: bytes.
      bandwidth: bytes of its memory per second.
      flops: operations per second.
    """

    memory: int | None = None
    bandwidth: int | None = None
    flops: float | None = None


@dataclass(frozen=True, kw_only=True)
class LedgerOptions:
    """The command line."""

    chosen: LedgerModelOptions
    models: bool
    context: list[int]
    batch: list[int]
    format: list[str]
    page_size: int | None
    weights: str
    tensor_parallel: int
    device: DeviceOptions
    units: str
    output: OutputOptions
    plot: Path | None


def parse(argv: list[str]) -> LedgerOptions:
    """Reads the command line."""
    parser = console.Parser("jaxkv ledger", __doc__)
    add_model_arguments(parser, DEFAULT, several=True)
    add = parser.add_argument
    add("--models", action="store_true", help="list the presets and end")
    tokens = listed(parse_tokens)
    add("--context", type=tokens, default=[1 << 12, 1 << 15, 1 << 17], metavar="N,..",
        help="tokens of a sequence (default: 4k,32k,128k)")  # fmt: skip
    add("--batch", type=listed(count), default=[1], metavar="B,..", help="sequences (default: 1)")
    add("--format", type=argument(split_choices), default=["bf16"], metavar="F,..",
        help="KV formats; kivi4,window=bf16 is one choice, by layer (default: bf16)")  # fmt: skip
    add("--page-size", type=argument(count), metavar="P",
        help="tokens per page (default: 16; for kivi formats 32)")  # fmt: skip
    add("--weights", choices=WEIGHT_BITS, default="bf16",
        help="type in which the weights are stored (default: %(default)s)")  # fmt: skip
    add("--tensor-parallel", type=argument(count), default=1, metavar="N",
        help="devices that share heads and weights (default: 1)")  # fmt: skip
    add("--memory", type=argument(parse_bytes), metavar="SIZE", help="of a device, such as 80GB")
    add("--bandwidth", type=argument(parse_bytes), metavar="SIZE",
        help="bytes of a device's memory per second, such as 3.35TB")  # fmt: skip
    add("--flops", type=argument(parse_rate), metavar="R",
        help="operations per second of a device, such as 400T")  # fmt: skip
    add("--units", choices=SHOWN_UNITS, default="GiB", help="of the table (default: %(default)s)")
    tables.add_output_arguments(parser, plot="KV bytes against the context")
    options = parser.read(LedgerOptions, argv)
    if options.page_size is not None and options.page_size not in PAGE_SIZES:
        parser.error(f"--page-size must be {PAGE_SIZES[0]} to {PAGE_SIZES[-1]}")
    tables.check_file(parser, options.plot, "--plot", (".png", ".svg"))
    if options.models and options.plot is not None:
        parser.error("--plot draws what is counted, not the list of --models")
    return options


def main(argv: list[str]) -> int:
    """Prints a row for each model, context, batch and format, or the presets."""
    options = parse(argv)
    if options.models:
        tables.write(preset_rows(), PRESET_COLUMNS, options.output)
        return 0
    models = options.chosen.models(DEFAULT)
    if options.plot is not None:
        from jaxkv.cli.output import plots

        drawn = plots.cache_sizes(models, options.format, options.weights, options.units)
        plots.save(drawn, options.plot)
    counted = rows(models, options)
    shown = columns(options.units, options.device)
    tables.write(counted, shown, options.output, notes(models, max(options.context)))
    return 0


def preset_rows() -> list[dict[str, Any]]:
    """A row for each preset."""
    found = []
    for model in map(preset, preset_names()):
        found.append(
            {
                "model": model.name,
                "parameters": model.parameters,
                "active_parameters": model.active_parameters,
                "layers": len(model.layers),
                "attention": model.kind,
                "bytes_per_token": CacheLedger.of(model).bytes_per_token,
                "max_context": model.max_context,
                "source": model.source,
                "notes": list(model.notes),
            }
        )
    return found


PRESET_COLUMNS = (
    Column("model", "model"),
    Column("parameters", "parameters", whole),
    Column("layers", "layers"),
    Column("attention", "attention"),
    Column("bytes_per_token", "KV bytes per token, bf16", whole),
    Column("max_context", "made for", whole),
    Column("source", "source"),
)


def rows(models: Sequence[Model], options: LedgerOptions) -> list[dict[str, Any]]:
    """A row for each model, context, batch and format.

    Raises:
      LedgerError: a format, page size or split does not fit a model.
    """
    found = []
    for model in models:
        stored = weight_bytes(model, options.weights, options.tensor_parallel)
        ledgers = {
            choice: CacheLedger.of(
                model, choice, page_size=options.page_size, devices=options.tensor_parallel
            )
            for choice in options.format
        }
        for choice, ledger in ledgers.items():
            for batch in options.batch:
                crossing = ledger.crossing_context(stored, batch)
                for context in options.context:
                    row = row_of(ledger, choice, context, batch, stored, options.weights)
                    row["crossing_context"] = crossing
                    row |= limits(ledger, row, options.device)
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


def limits(ledger: CacheLedger, row: dict[str, Any], device: DeviceOptions) -> dict[str, Any]:
    """What fits into the device's memory, and the least times that its rates allow."""
    found: dict[str, Any] = {}
    context, batch = row["context"], row["batch"]
    if device.memory is not None:
        rest = device.memory - row["weight_bytes"]
        found["memory_bytes"] = device.memory
        found["largest_context"] = ledger.largest_context(rest, batch)
        found["largest_batch"] = ledger.largest_batch(rest, context)
    if device.bandwidth is not None:
        found["step_seconds"] = step_seconds(
            ledger, device.bandwidth, num_tokens=context, batch=batch, weights=row["weights"]
        )
    if device.flops is not None:
        found["prefill_seconds"] = row["prefill_flops"] / device.flops / ledger.devices
    return found


def columns(unit: str, device: DeviceOptions) -> list[Column]:
    """The table's columns; `unit` is that of bytes."""

    def size(value: int) -> str:
        return f"{value / UNITS[unit]:,.2f}"

    shown = [
        Column("model", "model"),
        Column("attention", "attention"),
        Column("context", "context", whole),
        Column("batch", "batch", whole),
        Column("format", "format"),
        Column("bytes_per_token", "bytes per token", whole),
        Column("kv_bytes", f"KV, {unit}", size),
        Column("weight_bytes", f"weights, {unit}", size),
        Column("ratio", "x weights", decimals(2)),
        Column("crossing_context", "level at", whole),
    ]
    if device.memory is not None:
        shown.append(Column("largest_context", "longest context", limit))
        shown.append(Column("largest_batch", "largest batch", whole))
    if device.bandwidth is not None:
        shown.append(Column("step_seconds", "ms per step", lambda s: f"{s * 1e3:.2f}"))
        shown.append(Column("flops_per_byte", "flops per byte", decimals(1)))
    if device.flops is not None:
        shown.append(Column("prefill_flops", "prefill, Tflop", lambda n: f"{n / 1e12:,.1f}"))
        shown.append(Column("attention_share", "attention's share", percent))
        shown.append(Column("prefill_seconds", "prefill, s", decimals(2)))
    return shown
