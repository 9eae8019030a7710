"""Replay conversations and traces over prefix caches, and count what each saves.

  jaxkv simulate reuse --workload talk                # five turns, a row each
  jaxkv simulate reuse                                # W1g: 2,000 talks, 100 at a time
  jaxkv simulate reuse --workload W2 --caches hash,token --evictions lru,lfu,fifo,optimum
  jaxkv simulate reuse --trace conversation_trace.jsonl --capacity 10m
  jaxkv simulate reuse --workload talks --requests 100000 --caches token

Caches: `none` keeps nothing, not even while a request runs; `request` keeps K and V until their
request ends; `hash` keeps whole pages by a hash of all tokens up to their end; `page` is the radix
index of the engine, but uses whole pages only; `token` is the same index, exact to the token.
Evictions: the index's own orders, and `optimum`, which knows the future requests (Belady's): no
order finds more.

Workloads, one request after the other:
  talk    one conversation of five turns after a system prompt of 512 tokens: a table of its turns
  talks   --requests such turns, 100 conversations at a time, 8 system prompts
  W1      2,000 such conversations, all at a time; W1g: 100 at a time, which fit
  W2      2,000 questions about 50 documents of 8,000 tokens, half of which fit; W2f: all fit
  W3      5,000 prompts that share nothing
  W4      a trace's first 2,000 requests that fit, at an eighth of their size (needs --trace)
With --trace and no --workload, a trace is replayed at its full size. --turns lists every request.

Saved operations are those of prefills of --model; seconds are the same at --flops per second. A
model with constant states is refused: a hit would need a copy of the state at its end.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxkv.arith import ceil_div
from jaxkv.cli import console
from jaxkv.cli.arguments.ledger import (
    LedgerModelOptions,
    add_model_arguments,
    argument,
    count,
    listed,
)
from jaxkv.cli.output import tables
from jaxkv.cli.output.tables import Column, OutputOptions, decimals, percent, whole
from jaxkv.ledger import CacheLedger, Model, parse_rate, parse_tokens
from jaxkv.replay import (
    CACHES,
    EVICTIONS,
    OPTIMUM,
    Expanded,
    ReplayError,
    Reuse,
    Turn,
    check_reusable,
    measure_reuse,
    pack_requests,
    read_trace,
    turns,
    workloads,
)

DEFAULT = "llama-3.1-8b"
ORDERS = (*EVICTIONS, OPTIMUM)
Packed = Collection[tuple[bytes, bytes]]


@dataclass(frozen=True, kw_only=True)
class ReuseOptions:
    """The command line; `parse` fills in the workload."""

    chosen: LedgerModelOptions
    workload: str
    trace: Path | None
    requests: int | None
    caches: list[str] | None
    evictions: list[str] | None
    capacity: int | None
    page_size: int
    flops: float
    turns: bool
    output: OutputOptions
    plot: Path | None


def parse(argv: list[str]) -> ReuseOptions:
    """Reads the command line."""
    parser = console.Parser("jaxkv simulate reuse", __doc__)
    add_model_arguments(parser, DEFAULT, several=False)
    add = parser.add_argument
    add("--workload", choices=("talk", "talks", *workloads.WORKLOADS, "trace"),
        help="requests to replay (default: W1g; with --trace: trace)")  # fmt: skip
    add("--trace", type=Path, metavar="FILE", help="JSON lines with hash_ids")
    add("--requests", type=argument(count), metavar="N",
        help="replay only the first N (default: all)")  # fmt: skip
    add("--caches", type=listed(str), metavar="C,..",
        help=f"caches to compare (default: {','.join(CACHES)})")  # fmt: skip
    add("--evictions", type=listed(str), metavar="E,..",
        help="orders of eviction (default: lru,optimum)")  # fmt: skip
    add("--capacity", type=argument(parse_tokens), metavar="N",
        help="tokens that a cache holds (default: the workload's; for a trace 10m)")  # fmt: skip
    add("--page-size", type=argument(count), default=16, metavar="P",
        help="tokens per page (default: 16)")  # fmt: skip
    add("--flops", type=argument(parse_rate), default=4e14, metavar="R",
        help="operations per second of a prefill (default: 400T)")  # fmt: skip
    add("--turns", action="store_true", help="print a row for each request, for one cache")
    tables.add_output_arguments(parser, plot="hit rates")
    options = parser.read(ReuseOptions, argv)
    workload = options.workload or ("W1g" if options.trace is None else "trace")
    options = replace(options, workload=workload, turns=options.turns or workload == "talk")
    needs_trace = workload in ("W4", "trace")
    if needs_trace != (options.trace is not None):
        how = "needs --trace" if needs_trace else "does not use --trace"
        parser.error(f"--workload {workload} {how}")
    check_names(parser, "--caches", options.caches, CACHES, one=options.turns)
    check_names(parser, "--evictions", options.evictions, ORDERS, one=options.turns)
    tables.check_file(parser, options.plot, "--plot", (".png", ".svg"))
    if options.plot is not None and options.turns:
        parser.error("--plot draws caches, not turns")
    return options


def check_names(
    parser: console.Parser,
    option: str,
    names: Sequence[str] | None,
    known: Sequence[str],
    *,
    one: bool,
) -> None:
    """Ends the run if a name is not known, or if there are several where `one` is wanted."""
    for name in names or ():
        if name not in known:
            parser.error(f"{option} {name}: there are {', '.join(known)}")
    if one and len(names or ()) > 1:
        parser.error(f"a table of turns needs one value of {option}")


def main(argv: list[str]) -> int:
    """Prints a row for each cache and order, or for each turn."""
    options = parse(argv)
    if options.plot is not None:
        from jaxkv.cli.output import plots

        plots.require()  # before minutes of work
    model = options.chosen.one(DEFAULT)
    check_reusable(model)
    requests, capacity = load(options)
    if options.turns:
        rows = [turn_row(model, turn) for turn in one_by_one(requests, capacity, options)]
        tables.write(rows, TURN_COLUMNS, options.output, model.notes)
        return 0
    results = measure(requests, capacity, model, options)
    if options.plot is not None:
        from jaxkv.cli.output import plots

        plots.save(plots.hits([one for one in results if one.eviction != "-"]), options.plot)
    rows = [row_of(one, model, options.flops) for one in results]
    tables.write(rows, COLUMNS, options.output, model.notes)
    return 0


def load(options: ReuseOptions) -> tuple[Packed, int]:
    """The requests of a workload, and the number of tokens that its cache holds.

    Raises:
      ReplayError: the file is no trace, has no hash_ids, or has no request for W4.
    """
    workload, trace = options.workload, options.trace
    if workload == "trace":
        assert trace is not None  # `parse` has seen to it
        requests = Expanded(read_trace(trace, needs="hash_ids")[: options.requests])
        return requests, options.capacity or 10 << 20
    if workload == "talk":
        stream, capacity = workloads.conversations(1, at_a_time=1), 4_096
    elif workload == "talks":
        talks = ceil_div(options.requests or 1_000, 5)
        stream, capacity = workloads.conversations(talks, at_a_time=100), 200_000
    else:
        if trace is not None:
            read_trace(trace, needs="hash_ids")  # checks its lines
        stream, capacity = workloads.stream(workload, trace)
    packed = pack_requests(itertools.islice(stream, options.requests))
    with console.progress(0, unit="request", description="making requests") as bar:
        found = []
        for request in packed:
            found.append(request)
            bar.update()
    if not found:
        raise ReplayError(f"{trace}: has no request that fits")
    return found, options.capacity or capacity


def one_by_one(requests: Packed, capacity: int, options: ReuseOptions) -> Iterator[Turn]:
    """Replays the requests over one cache."""
    return turns(
        requests,
        (options.caches or ["token"])[0],
        capacity=capacity,
        page_size=options.page_size,
        eviction=(options.evictions or ["lru"])[0],
    )


def measure(requests: Packed, capacity: int, model: Model, options: ReuseOptions) -> list[Reuse]:
    """Replays the requests over each cache and order, under a progress bar."""
    runs: list[tuple[str, str]] = []
    for cache in options.caches or CACHES:
        orders = (options.evictions or ["lru", OPTIMUM]) if cache in CACHES[2:] else ["lru"]
        runs += [(cache, order) for order in orders]
    total = len(runs) * len(requests)
    with console.progress(total, unit="request", description="replaying") as bar:
        return [
            measure_reuse(
                requests,
                cache,
                capacity=capacity,
                page_size=options.page_size,
                eviction=order,
                model=model,
                on_request=bar.update,
            )
            for cache, order in runs
        ]


def row_of(one: Reuse, model: Model, flops: float) -> dict[str, Any]:
    """A result as a row."""
    per_token = CacheLedger.of(model).bytes_per_token
    left = one.prefill_flops - one.saved_flops
    return asdict(one) | {
        "model": model.name,
        "hit_rate": one.hit_rate,
        "prefill_seconds": left / flops,
        "saved_seconds": one.saved_flops / flops,
        "most_held_bytes": one.most_held * per_token,
    }


def turn_row(model: Model, turn: Turn) -> dict[str, Any]:
    """A turn as a row."""
    held = turn.held * CacheLedger.of(model).bytes_per_token
    return asdict(turn) | {"model": model.name, "held_bytes": held}


def gib(value: float) -> str:
    """Bytes in GiB."""
    return f"{value / 2**30:,.2f}"


COLUMNS = (
    Column("cache", "cache"),
    Column("eviction", "eviction"),
    Column("hit_tokens", "hit tokens", whole),
    Column("hit_rate", "hits", percent),
    Column("evicted_tokens", "evicted", whole),
    Column("most_held_bytes", "held at most, GiB", gib),
    Column("prefill_seconds", "prefill, s", decimals(1)),
    Column("saved_seconds", "saved, s", decimals(1)),
    Column("saved_flops", "saved, Tflop", lambda n: f"{n / 1e12:,.0f}"),
    Column("refused", "refused", whole),
)
TURN_COLUMNS = (
    Column("number", "turn", whole),
    Column("prompt", "prompt", whole),
    Column("matched", "matched", whole),
    Column("recomputed", "recomputed", whole),
    Column("answer", "answer", whole),
    Column("inserted", "inserted", whole),
    Column("evicted", "evicted", whole),
    Column("held", "held", whole),
    Column("held_bytes", "held, GiB", gib),
)
