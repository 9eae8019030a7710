"""Replay requests over allocators of KV slots, and count what each wastes.

  jaxkv simulate fragmentation
  jaxkv simulate fragmentation --lengths uniform --requests 100000 --page-sizes 16
  jaxkv simulate fragmentation --trace conversation_trace.jsonl --plot waste.svg
  jaxkv simulate fragmentation --allocators paged,buddy --capacity 256k --json

Requests arrive as in a trace, or as a Poisson stream with lengths from a distribution; each token
takes --step seconds. Three allocators reserve one run of slots per sequence: `max-length` for the
longest possible sequence, `buddy` a power of two, `oracle` exactly what the sequence will need.
`paged` takes pages from the engine's pool as a sequence grows, and is run for each page size.

`used` slots hold a token; `reserved` ones will; `internal` ones belong to a sequence that will not
need them; `external` ones are free and would be enough for the waiting request if they were in one
piece. Waste is the share of the last three among all four. `admitted in time` counts the requests
that were running or finished when the last one arrived. A trace is JSON lines with timestamp,
input_length and output_length, as in Mooncake's published traces.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxkv.cli import console
from jaxkv.cli.arguments.ledger import argument, count, listed
from jaxkv.cli.output import tables
from jaxkv.cli.output.tables import Column, OutputOptions, decimals, percent, whole
from jaxkv.ledger import parse_tokens
from jaxkv.replay import (
    ALLOCATORS,
    DISTRIBUTIONS,
    Fragmentation,
    NothingFits,
    TraceRequest,
    draw_requests,
    measure_fragmentation,
    read_trace,
)

PAGE_SIZES = [1, 4, 16, 64, 256]


@dataclass(frozen=True, kw_only=True)
class FragmentationOptions:
    """The command line."""

    lengths: str
    trace: Path | None
    requests: int | None
    rate: float
    seed: int
    capacity: int | None
    allocators: list[str]
    page_sizes: list[int]
    max_length: int | None
    step: float
    output: OutputOptions
    plot: Path | None


def parse(argv: list[str]) -> FragmentationOptions:
    """Reads the command line."""
    parser = console.Parser("jaxkv simulate fragmentation", __doc__)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--lengths", choices=DISTRIBUTIONS, default="chat",
        help="distribution of lengths (default: %(default)s)")  # fmt: skip
    source.add_argument("--trace", type=Path, metavar="FILE", help="requests as JSON lines")
    add("--requests", type=argument(count), metavar="N",
        help="how many (default: 2000, or all of a trace)")  # fmt: skip
    add("--rate", type=float, default=10.0, metavar="R",
        help="requests per second (default: %(default)s)")  # fmt: skip
    add("--seed", type=int, default=0, help="of lengths and arrivals (default: %(default)s)")
    add("--capacity", type=argument(parse_tokens), metavar="N",
        help="slots (default: 64k, for a trace 1m)")  # fmt: skip
    add("--allocators", type=listed(str), default=list(ALLOCATORS), metavar="A,..",
        help=f"allocators to compare (default: {','.join(ALLOCATORS)})")  # fmt: skip
    add("--page-sizes", type=listed(count), default=PAGE_SIZES, metavar="P,..",
        help="for `paged`, 1 to 256 (default: 1,4,16,64,256)")  # fmt: skip
    add("--max-length", type=argument(parse_tokens), metavar="N",
        help="for `max-length` (default: the power of two that holds every request)")  # fmt: skip
    add("--step", type=float, default=0.03, metavar="S",
        help="seconds per token (default: %(default)s)")  # fmt: skip
    tables.add_output_arguments(parser, plot="slots by their use, over time")
    options = parser.read(FragmentationOptions, argv)
    for size in options.page_sizes:
        if size > 256:
            parser.error(f"--page-sizes {size}: must be 1 to 256")
    for name in options.allocators:
        if name not in ALLOCATORS:
            parser.error(f"--allocators {name}: there are {', '.join(ALLOCATORS)}")
    parser.require_at_least(options, seed=0)
    tables.check_file(parser, options.plot, "--plot", (".png", ".svg"))
    return options


def main(argv: list[str]) -> int:
    """Prints a row for each allocator and page size."""
    options = parse(argv)
    if options.plot is not None:
        from jaxkv.cli.output import plots

        plots.require()  # before minutes of work
    results, notes = measure(requests_of(options), options)
    if options.plot is not None:
        from jaxkv.cli.output import plots

        plots.save(plots.waste(results), options.plot)
    tables.write([row_of(one) for one in results], COLUMNS, options.output, notes)
    return 0


def requests_of(options: FragmentationOptions) -> list[TraceRequest]:
    """The requests that are asked for.

    Raises:
      ReplayError: the file is no trace, or the rate is not above 0.
    """
    if options.trace is not None:
        return read_trace(options.trace, needs="timestamp")[: options.requests]
    return draw_requests(options.lengths, options.requests or 2_000, options.rate, options.seed)


def measure(
    requests: list[TraceRequest], options: FragmentationOptions
) -> tuple[list[Fragmentation], list[str]]:
    """Replays the requests over each allocator, under a progress bar; see `replay`."""
    runs: list[tuple[str, int]] = []
    for name in options.allocators:
        runs += [(name, size) for size in (options.page_sizes if name == "paged" else [1])]
    capacity = options.capacity or (1 << 16 if options.trace is None else 1 << 20)
    total = len(runs) * len(requests)
    with console.progress(total, unit="request", description="replaying") as bar:
        return replay(
            requests,
            runs,
            capacity=capacity,
            max_length=options.max_length,
            step_seconds=options.step,
            on_request=bar.update,
        )


def replay(
    requests: Sequence[TraceRequest], runs: Sequence[tuple[str, int]], **options: Any
) -> tuple[list[Fragmentation], list[str]]:
    """The result of each allocator and page size, and a line for each that could serve no request.

    Raises:
      ReplayError: a number is out of range, or no allocator could serve any request.
    """
    found, unfit = [], []
    for name, size in runs:
        try:
            found.append(measure_fragmentation(requests, name, page_size=size, **options))
        except NothingFits as error:
            unfit.append(error)
    if not found:
        raise unfit[0]
    return found, [str(error) for error in unfit]


def row_of(one: Fragmentation) -> dict[str, Any]:
    """A result as a row, without its samples over time."""
    row = asdict(one)
    del row["samples"]
    return row | {"waste": one.waste}


COLUMNS = (
    Column("allocator", "allocator"),
    Column("page_size", "page", lambda size: "-" if size is None else f"{size}"),
    Column("waste", "waste", percent),
    Column("used", "used", whole),
    Column("reserved", "reserved", whole),
    Column("internal", "internal", whole),
    Column("external", "external", whole),
    Column("mean_running", "running", decimals(1)),
    Column("most_running", "at most", whole),
    Column("mean_wait", "wait, s", decimals(1)),
    Column("admitted", "admitted in time", whole),
    Column("refused", "refused", whole),
    Column("preemptions", "preempted", whole),
    Column("seconds", "all served, s", whole),
)
