"""Time the host side only: page pools, prefix index and page tables, without a model.

  python scripts bench host
  python scripts bench host --workload W1 --page 16 --json
  python scripts bench host --workload W5 --leaves 200000
  python scripts bench host --workload W4 --trace conversation_trace.jsonl

Each request goes through prep (its tokens are packed), match, alloc (with evictions if needed),
insert, extend by its answer, and finish. Costs are CPU time of the thread, per request.

  W1      2,000 conversations of 5 turns, served turn by turn; only the 8 system prompts fit
  W1g     the same with 100 conversations at a time, which fit
  W2      2,000 questions about 50 documents of 8,000 tokens, of which half fit
  W2f     the same with room for all documents
  W3      5,000 prompts that share nothing
  W4      a trace of hashed blocks; --trace names another than the first 1,500 requests of
          Mooncake's conversations, tests/data/conversation_trace.jsonl
  W5      one allocation that evicts, from a full pool of --leaves cached sequences
  W6      the tables of one decode step of 64 sequences
  step    such a step in the engine without the jitted call; wall time
  growth  one match, among 1,000, 10,000 and 100,000 cached conversations
"""

import gc
import json
import random
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxkv.arith import ceil_div
from jaxkv.cli import console
from jaxkv.prefix import Namespace, PagePool, PageTables, PrefixIndex, check_integrity, pack
from jaxkv.replay.workloads import LONGEST, VOCAB, Requests, random_tokens, stream

OPS = ("prep", "match", "alloc", "insert", "extend", "finish")
WORKLOADS = ("W1", "W1g", "W2", "W2f", "W3", "W4", "W5", "W6", "step", "growth")
TRACE = Path(__file__).resolve().parents[2] / "tests" / "data" / "conversation_trace.jsonl"

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class HostBenchOptions:
    """The command line."""

    workload: str
    page: int
    leaves: int
    trace: Path
    json: bool


def parse(argv: list[str]) -> HostBenchOptions:
    """Reads the command line."""
    parser = console.Parser("python scripts bench host", __doc__)
    add = parser.add_argument
    add("--workload", choices=(*WORKLOADS, "all"), default="all", help="default: %(default)s")
    add("--page", type=int, default=16, metavar="P", help="tokens per page (default: %(default)s)")
    add(
        "--leaves",
        type=int,
        default=20_000,
        metavar="N",
        help="leaves of W5 (default: %(default)s)",
    )
    add("--trace", type=Path, metavar="PATH", default=TRACE, help="trace of W4, JSON lines")
    add("--json", action="store_true", help="one JSON object per workload, one per line")
    options = parser.read(HostBenchOptions, argv)
    parser.require_at_least(options, page=1, leaves=1)
    return options


def main(argv: list[str]) -> int:
    """Runs workloads and prints their costs."""
    options = parse(argv)
    for name in WORKLOADS if options.workload == "all" else [options.workload]:
        result = {"system": "jaxkv", "page": options.page, "workload": name}
        result |= measure(name, options)
        print(json.dumps(result) if options.json else _lines(result), flush=True)
    return 0


def measure(name: str, options: HostBenchOptions) -> Result:
    """Runs one workload."""
    if name == "W5":
        return eviction(options.page, options.leaves)
    if name == "W6":
        return decoding(options.page)
    if name == "step":
        return engine_step(options.page)
    if name == "growth":
        return growth(options.page)
    requests, capacity = stream(name, options.trace)
    return serve(name, requests, capacity, options.page)


class Request:
    """A request in flight."""

    def __init__(self, prompt: list[int]):
        self.tokens = pack(prompt)
        self.num_tokens = len(prompt)
        self.row = 0


class Host:
    """Pool, index and tables, and the operations of the workloads.

    Attributes:
      evict_seconds, num_evicts: wall time of evictions, and their number.
    """

    namespace = Namespace()

    def __init__(self, capacity: int, page_size: int, max_sequences: int = 64):
        self.page_size = page_size
        pool = PagePool(ceil_div(capacity, page_size) + 1)
        self.index = PrefixIndex([pool], page_size)
        self.tables = PageTables(
            [pool],
            page_size,
            max_sequences=max_sequences,
            max_pages=ceil_div(2 * LONGEST, page_size),
            index=self.index,
        )
        self.evict_seconds, self.num_evicts = 0.0, 0

    def time_evictions(self) -> None:
        """Counts and times evictions from now on."""
        evict = self.index.evict

        def timed(group: int, num_pages: int) -> int:
            start = time.perf_counter()
            freed = evict(group, num_pages)
            self.evict_seconds += time.perf_counter() - start
            self.num_evicts += 1
            return freed

        self.index.evict = timed

    def match(self, request: Request) -> int:
        """Opens a row with the cached tokens; returns their number."""
        request.row = self.tables.open()
        return self.tables.match(request.row, request.tokens[:-4], self.namespace)[0]

    def alloc(self, request: Request) -> None:
        """Allocates pages for the prompt."""
        self.tables.grow(request.row, request.num_tokens)

    def insert(self, request: Request) -> None:
        """Adds the prompt's whole pages to the index."""
        whole = request.num_tokens // self.page_size * self.page_size
        self.tables.publish(request.row, request.tokens[: 4 * whole], self.namespace)

    def extend(self, request: Request, answer: list[int]) -> None:
        """Appends an answer and allocates its pages; no step computes its last token."""
        request.tokens += pack(answer)
        request.num_tokens += len(answer)
        self.tables.grow(request.row, request.num_tokens - 1)

    def finish(self, request: Request) -> None:
        """Adds all computed tokens to the index, and closes the row."""
        self.tables.publish(request.row, request.tokens[:-4], self.namespace)
        self.tables.close(request.row)


def serve(name: str, incoming: Requests, capacity: int, page_size: int) -> Result:
    """Runs one request after another; returns the cost of each operation and the hit rate."""
    requests = list(_shown(incoming, None, f"{name}: making requests"))
    gc.collect()
    gc.freeze()  # excludes the requests from garbage collection, which is not to be timed
    rss = _rss_mb()
    host, clock = Host(capacity, page_size), Clock()
    host.time_evictions()
    prompt_tokens, hit_tokens, most_rss, start = 0, 0, 0.0, time.perf_counter()
    for i, (prompt, answer) in enumerate(_shown(requests, len(requests), name)):
        request = clock.time("prep", Request, prompt)
        prompt_tokens += len(prompt)
        hit_tokens += clock.time("match", host.match, request)
        clock.time("alloc", host.alloc, request)
        clock.time("insert", host.insert, request)
        clock.time("extend", host.extend, request, answer)
        clock.time("finish", host.finish, request)
        if i % 500 == 0:
            most_rss = max(most_rss, _rss_mb())
    wall = time.perf_counter() - start
    most_rss = max(most_rss, _rss_mb())
    gc.unfreeze()
    check_integrity(host.index, host.tables)
    n, cpu, total = len(requests), sum(clock.cpu.values()), sum(clock.wall.values())
    evict_us = host.evict_seconds / max(1, host.num_evicts) * 1e6
    return {
        "window": 1,
        "requests": n,
        "prompt_tokens": prompt_tokens,
        "hit_tokens": hit_tokens,
        "hit_rate": round(hit_tokens / prompt_tokens, 4),
        "host_cpu_s": round(cpu, 3),
        "cpu_us_per_req": round(cpu / n * 1e6, 1),
        "cpu_op_us": {op: round(clock.cpu[op] / n * 1e6, 2) for op in OPS},
        "host_s": round(total, 3),
        "wall_s": round(wall, 3),
        "us_per_req": round(total / n * 1e6, 1),
        "per_op_us": {op: round(clock.wall[op] / n * 1e6, 2) for op in OPS}
        | {"evict": round(evict_us, 2)},
        "total_op_s": {op: round(clock.wall[op], 3) for op in OPS}
        | {"evict": round(host.evict_seconds, 3)},
        "max_op_ms": {op: round(clock.longest[op] * 1e3, 2) for op in OPS},
        "evict_calls": host.num_evicts,
        "evicted_tokens": host.index.counters.evicted_pages * page_size,
        "rss_delta_mb": round(most_rss - rss, 1),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


class Clock:
    """Seconds in each operation: CPU time, wall time, and the longest call."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = dict.fromkeys(OPS, 0.0)
        self.wall, self.longest = self.cpu.copy(), self.cpu.copy()

    def time[**A, R](self, op: str, function: Callable[A, R], *args: A.args, **kw: A.kwargs) -> R:
        """Calls a function."""
        cpu, wall = time.thread_time(), time.perf_counter()
        result = function(*args, **kw)
        wall = time.perf_counter() - wall
        self.cpu[op] += time.thread_time() - cpu
        self.wall[op] += wall
        self.longest[op] = max(self.longest[op], wall)
        return result


def eviction(page_size: int, num_leaves: int) -> Result:
    """Fills a pool with sequences of 64 tokens, then times the allocation for 300 more."""
    rng = random.Random(5)
    host = Host(num_leaves * 64, page_size)

    def one() -> float:
        request = Request(random_tokens(rng, 64))
        host.match(request)
        start = time.thread_time()
        host.alloc(request)
        seconds = time.thread_time() - start
        host.insert(request)
        host.extend(request, [1])
        host.finish(request)
        return seconds

    start = time.thread_time()
    for _ in _shown(range(num_leaves), num_leaves, "W5: filling the pool"):
        one()
    fill = time.thread_time() - start
    seconds = [one() for _ in range(300)]
    check_integrity(host.index, host.tables)
    return {"leaves": num_leaves, "fill_s": round(fill, 2)} | _spread(
        seconds, "alloc_with_evict_us_p50", "p95", "max"
    )


def decoding(page_size: int) -> Result:
    """Times the tables of 64 sequences of 1,024 tokens that grow by a token in 128 steps."""
    rng = random.Random(6)
    batch, num_steps = 64, 128
    host = Host(200_000, page_size)
    requests = [Request(random_tokens(rng, 1_024)) for _ in range(batch)]
    for request in requests:
        host.match(request)
        host.alloc(request)
        host.insert(request)
    rows = [request.row for request in requests]
    tokens = np.zeros((batch, num_steps), np.int32)
    sampled = [random_tokens(rng, batch) for _ in range(num_steps)]

    def step(number: int) -> None:
        tokens[:, number] = sampled[number]
        host.tables.grow_lacking(rows, [1_025 + number] * batch)

    seconds = [_cpu_seconds(step, number) for number in range(num_steps)]
    check_integrity(host.index, host.tables)
    mean = sum(seconds) / num_steps * 1e6
    return (
        {"batch": batch, "step_us_mean": round(mean, 1)}
        | _spread(seconds, "step_us_p50", "step_us_p95", "step_us_max")
        | {"us_per_req_step": round(mean / batch, 3)}
    )


def engine_step(page_size: int) -> Result:
    """Times decode steps of 64 sequences through an engine."""
    from scripts.bench.host_step import step_seconds  # imports jax, which --help does not need

    batch = 64
    seconds = step_seconds(page_size, batch)
    return {"batch": batch} | _spread(seconds, "step_us_p50", "step_us_p95", "step_us_max")


def growth(page_size: int) -> Result:
    """Times matches of 1,032 tokens, 1,024 of them cached, in an index that grows."""
    rng = np.random.default_rng(7)
    sizes, per_size, host = (1_000, 10_000, 100_000), 300, Host(100_000 * 128, page_size)
    system = rng.integers(0, VOCAB, 896).tolist()
    talks: list[list[int]] = []
    results: Result = {"conversations": list(sizes)}
    with console.progress(sizes[-1], unit="talk", description="growth") as bar:
        for size in sizes:
            for own in rng.integers(0, VOCAB, (size - len(talks), 128), np.int32).tolist():
                request = Request(system + own)
                host.match(request)
                host.alloc(request)
                host.extend(request, [0])
                host.finish(request)
                talks.append(own)
                bar.update()
            seconds = []
            for place in rng.integers(0, size, per_size).tolist():
                request = Request(system + talks[place] + [VOCAB] * 8)
                seconds.append(_cpu_seconds(host.match, request))
                host.tables.close(request.row)
            for name, value in _spread(seconds, "match_us_p50", "p95", "max").items():
                results.setdefault(name, []).append(value)
    return results


def _cpu_seconds[T](function: Callable[[T], object], argument: T) -> float:
    start = time.thread_time()
    function(argument)
    return time.thread_time() - start


def _spread(seconds: list[float], median: str, p95: str, longest: str) -> dict[str, float]:
    ordered, n = sorted(seconds), len(seconds)
    picked = ordered[n // 2], ordered[int(n * 0.95)], ordered[-1]
    return {
        name: round(value * 1e6, 1)
        for name, value in zip((median, p95, longest), picked, strict=True)
    }


def _shown[T](items: Iterable[T], total: int | None, description: str) -> Iterator[T]:
    """Yields the items, with a progress bar on a terminal."""
    return iter(tqdm(items, total=total, desc=description, disable=None, leave=False))


def _rss_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def _lines(result: Result) -> str:
    head = f"{result['workload']}, page {result['page']}"
    rest = {k: v for k, v in result.items() if k not in ("system", "workload", "page", "window")}
    return "\n".join([head, *(f"  {name:24} {value}" for name, value in rest.items())])
