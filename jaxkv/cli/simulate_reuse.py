"""Replay conversations and traces over prefix caches, and count what each saves.

  jaxkv simulate reuse --workload talk                # five turns, a row each
  jaxkv simulate reuse                                # W1g: 2,000 talks, 100 at a time
  jaxkv simulate reuse --workload W2 --caches hash,token --evictions lru,lfu,fifo,optimum
  jaxkv simulate reuse --trace conversation_trace.jsonl --capacity 10m
  jaxkv simulate reuse --workload talks --requests 100000 --caches token

Caches: `none` keeps nothing, not even while a request runs; `request` keeps K and V as long as
their request; `hash` whole pages by a hash of all tokens up to their end; `page` is the radix index
of the engine, of which whole pages are used; `token` the same, exact to the token. Evictions: the
index's own orders, and `optimum`, which knows what will be asked (Belady's): no order finds more.

Workloads, one request after the other:
  talk    one conversation of five turns behind a system prompt of 512 tokens: a table of its turns
  talks   --requests of such turns, 100 conversations at a time, 8 system prompts
  W1      2,000 such conversations, all at a time; W1g: 100 at a time, which fit
  W2      2,000 questions about 50 documents of 8,000 tokens, of which half fit; W2f: all fit
  W3      5,000 prompts that share nothing
  W4      a trace's first 2,000 requests that fit, an eighth of their size (needs --trace)
With --trace alone a trace is replayed at its full size. --turns lists every request.

Saved operations are those of prefills of --model, seconds the same over --flops a second. A model
with constant states is refused: a hit would need a copy of them from its end.
"""

import argparse
import itertools
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxkv.cli import console
from jaxkv.cli.arguments.ledger import add_model_arguments, argument, count, listed, one_model
from jaxkv.cli.output import tables
from jaxkv.cli.output.tables import Column, decimals, percent, whole
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


def main(argv: list[str]) -> int:
    """Prints a row for each cache and order, or for each turn."""
    parser = console.Parser("jaxkv simulate reuse", __doc__)
    add_model_arguments(parser, DEFAULT, several=False)
    add = parser.add_argument
    add("--workload", choices=("talk", "talks", *workloads.WORKLOADS, "trace"),
        help="(default: W1g; with --trace trace)")  # fmt: skip
    add("--trace", type=Path, metavar="FILE", help="JSON lines with hash_ids")
    add("--requests", type=argument(count), metavar="N", help="the first so many (default: all)")
    add("--caches", type=listed(str), metavar="C,..", help=f"(default: {','.join(CACHES)})")
    add("--evictions", type=listed(str), metavar="E,..", help="(default: lru,optimum)")
    add("--capacity", type=argument(parse_tokens), metavar="N",
        help="tokens that a cache holds (default: the workload's; of a trace 10m)")  # fmt: skip
    add("--page-size", type=argument(count), default=16, metavar="P", help="(default: 16)")
    add("--flops", type=argument(parse_rate), default=4e14, metavar="R",
        help="operations a second of a prefill (default: 400T)")  # fmt: skip
    add("--turns", action="store_true", help="a row for each request, of one cache")
    tables.add_output_arguments(parser, plot="hit rates")
    args = parser.parse_args(argv)
    check(parser, args)
    model = one_model(parser, args, DEFAULT)
    check_reusable(model)
    requests, capacity = load(args)
    if args.turns:
        cache, eviction = (args.caches or ["token"])[0], (args.evictions or ["lru"])[0]
        options = {"capacity": capacity, "page_size": args.page_size, "eviction": eviction}
        found = list(turns(requests, cache, **options))
        rows = [turn_row(model, turn) for turn in found]
        tables.write(rows, TURN_COLUMNS, args, model.notes)
        return 0
    results = measure(requests, capacity, model, args)
    if args.plot is not None:
        from jaxkv.cli.output import plots

        plots.save(plots.hits([one for one in results if one.eviction != "-"]), args.plot)
    rows = [row_of(one, model, args.flops) for one in results]
    tables.write(rows, COLUMNS, args, model.notes)
    return 0


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the run where arguments do not go together; fills in the workload."""
    if args.workload is None:
        args.workload = "W1g" if args.trace is None else "trace"
    needs_trace = args.workload in ("W4", "trace")
    if needs_trace != (args.trace is not None):
        how = "needs --trace" if needs_trace else "has no use for --trace"
        parser.error(f"--workload {args.workload} {how}")
    args.turns = args.turns or args.workload == "talk"
    for option, known in (("caches", CACHES), ("evictions", ORDERS)):
        values = getattr(args, option) or []
        for value in values:
            if value not in known:
                parser.error(f"--{option} {value}: there are {', '.join(known)}")
        if args.turns and len(values) > 1:
            parser.error(f"a table of turns is of one of --{option}")
    tables.check_file(parser, args.plot, "--plot", (".png", ".svg"))
    if args.plot is not None:
        from jaxkv.cli.output import plots

        plots.require()  # before minutes of work
        if args.turns:
            parser.error("--plot is of caches, not of turns")


def load(args: argparse.Namespace) -> tuple[Packed, int]:
    """The requests of a workload, and the tokens that its cache holds.

    Raises:
      ReplayError: the trace is none, or has none for W4; or is without hash_ids.
    """
    if args.workload == "trace":
        requests = Expanded(read_trace(args.trace, needs="hash_ids")[: args.requests])
        return requests, args.capacity or 10 << 20
    if args.workload == "talk":
        stream, capacity = workloads.conversations(1, at_a_time=1), 4_096
    elif args.workload == "talks":
        talks = -(-(args.requests or 1_000) // 5)
        stream, capacity = workloads.conversations(talks, at_a_time=100), 200_000
    else:
        if args.workload == "W4":
            read_trace(args.trace, needs="hash_ids")  # its lines are checked
        stream, capacity = workloads.stream(args.workload, args.trace)
    packed = pack_requests(itertools.islice(stream, args.requests))
    with console.progress(0, unit="request", description="making requests") as bar:
        found = []
        for request in packed:
            found.append(request)
            bar.update()
    if not found:
        raise ReplayError(f"{args.trace}: has no request that fits")
    return found, args.capacity or capacity


def measure(requests: Packed, capacity: int, model: Model, args: argparse.Namespace) -> list[Reuse]:
    """Replays the requests over each cache and order, under a progress bar."""
    runs: list[tuple[str, str]] = []
    for cache in args.caches or CACHES:
        orders = (args.evictions or ["lru", OPTIMUM]) if cache in CACHES[2:] else ["lru"]
        runs += [(cache, order) for order in orders]
    total = len(runs) * len(requests)
    with console.progress(total, unit="request", description="replaying") as bar:
        return [
            measure_reuse(
                requests,
                cache,
                capacity=capacity,
                page_size=args.page_size,
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
