"""Shortened contexts are shared: a second request starts from one and has the bits of a cold run,
whatever is evicted, preempted or aborted meanwhile. The pages of the first one do not change."""

from itertools import count

import chex
import numpy as np
import pytest

from jaxkv.compress import METHODS, Compression, Window
from jaxkv.engine import Request
from jaxkv.prefix import Snapshot, check_integrity
from tests.engine.disturbances import logit_bits, preempt_at
from tests.engine.tiny import CheckedEngine, Tiny, random_prompts, run

CONTEXT, *QUESTIONS = random_prompts(90, 10, 20, 1, 7, seed=4)
(OTHER,) = random_prompts(90, seed=5)
NEW, P = 5, 8
QUERY_FREE = ("random", "knorm", "keydiff", "expected_attention")


def engine_of(tiny: Tiny, method: str, interval: int | None = None, **options) -> CheckedEngine:
    options = dict(page_size=P, deterministic=True, budget="0.5") | options
    compression = Compression(method=method, budget=options.pop("budget"), interval=interval)
    return tiny.engine(compression=compression, **options)


def asked(question: tuple[int, ...], context: tuple[int, ...] = CONTEXT, **options) -> Request:
    fields = dict(max_new_tokens=NEW, context=len(context), keep_logits=True)
    return Request(prompt=(*context, *question), **fields | options)


def snapshots(engine: CheckedEngine) -> list[Snapshot]:
    assert engine._dropper.snapshots is not None
    return list(engine._dropper.snapshots)


def contents(engine: CheckedEngine, snapshot: Snapshot) -> list[np.ndarray]:
    """Returns the contents of a snapshot's slots in every layer, up to its last token."""
    found = []
    cache = engine.cache
    for layer, pages in enumerate(cache.layers):
        for group in cache.groups_of(layer):
            ids = np.array(snapshot.pages[group])
            n = snapshot.lens[group]
            for x in pages.paged.values():
                rows = np.asarray(x)[ids[ids > 0]]
                slots = rows.reshape(len(rows), -1)  # whole pages, but for the last
                found.append(slots[:-1] if n % P else slots)
    return found


def scattered(engine: CheckedEngine) -> CheckedEngine:
    """Shuffles the free pages of the pools."""
    rng = np.random.default_rng(0)
    for pool in engine.pools:
        rng.shuffle(pool._free)
    return engine


def pages_of(engine: CheckedEngine, row: int) -> list[list[int]]:
    return [list(ids) for ids in engine._tables._held[row] or []]


@pytest.mark.parametrize(
    "method, interval, kv_format",
    [
        ("knorm", None, "f32"),
        pytest.param("keydiff", 3, "int4", marks=pytest.mark.slow),
        pytest.param("adakv_keydiff", None, "int8", marks=pytest.mark.slow),
        pytest.param("adakv_knorm", 2, "f32", marks=pytest.mark.slow),
        pytest.param("random", 4, "int8", marks=pytest.mark.slow),
    ],
)
def test_a_second_request_starts_from_what_is_left_and_equals_a_cold_run(
    mixed: Tiny, method, interval, kv_format
):
    engine = scattered(engine_of(mixed, method, interval, kv_format=kv_format))
    cold = scattered(engine_of(mixed, method, interval, kv_format=kv_format, prefix_cache=False))
    first = engine.submit(asked(QUESTIONS[0]))
    while not snapshots(engine):
        engine.step()
    (snapshot,) = snapshots(engine)
    before = contents(engine, snapshot)
    second = engine.submit(asked(QUESTIONS[1]))
    while second.queue_seconds is None:
        engine.step()
    rows = [pages_of(engine, s.row) for s in engine._scheduler.running]
    for group, length in enumerate(snapshot.lens):
        whole = length // P
        if engine.spec.groups[group].window is None and interval is None:
            assert whole and rows[0][group][:whole] == rows[1][group][:whole]
            assert rows[0][group][whole:] != rows[1][group][whole:]  # each its own tail
    while engine.has_work:
        engine.step()
    assert (first.cached_tokens, second.cached_tokens) == (0, len(CONTEXT))
    assert second.computed_tokens == len(QUESTIONS[1]) + NEW - 1
    third = run(engine, asked(QUESTIONS[2]))
    assert third.cached_tokens == len(CONTEXT)
    for x, y in zip(before, contents(engine, snapshot), strict=True):
        chex.assert_trees_all_equal(x, y)
    for completion, question in zip((first, second, third), QUESTIONS, strict=False):
        want = run(cold, asked(question))
        chex.assert_trees_all_equal(logit_bits([completion])[0], logit_bits([want])[0])
        assert completion.dropped_tokens == want.dropped_tokens


@pytest.mark.parametrize("method", ["tova", pytest.param("snapkv", marks=pytest.mark.slow)])
def test_a_query_aware_method_shares_only_with_the_same_whole_prompt(mixed: Tiny, method):
    engine = engine_of(mixed, method)
    first, other, again = (run(engine, asked(QUESTIONS[i])) for i in (0, 1, 0))
    assert [one.cached_tokens for one in (first, other, again)] == [0, 89, 90]
    chex.assert_trees_all_equal(*logit_bits([first, again]))
    assert len(snapshots(engine)) == 2


def test_a_context_that_is_the_whole_prompt_is_chosen_once_and_stored_once(mixed: Tiny):
    """Its last token is computed again for the next token; the pages are those of the first."""
    engine = engine_of(mixed, "tova")
    request = asked((), max_new_tokens=8)
    first = run(engine, request)
    (snapshot,) = snapshots(engine)
    choose, calls = engine._dropping._compressor.choose, []
    engine._dropping._compressor.choose = lambda *a, **k: calls.append(1) or choose(*a, **k)
    second = engine.submit(request)
    while not second.tokens:
        engine.step()
    (sequence,) = engine._scheduler.running
    held = pages_of(engine, sequence.row)
    for group, length in enumerate(snapshot.lens):
        if engine.spec.groups[group].window is None:
            assert held[group][: length // P] == snapshot.pages[group][: length // P]
    while engine.has_work:
        engine.step()
    engine._dropping._compressor.choose = choose
    assert not calls and len(snapshots(engine)) == 1
    chex.assert_trees_all_equal(*logit_bits([first, second]))


def test_what_was_asked_for_differently_is_not_shared(mixed: Tiny):
    engine = engine_of(mixed, "knorm")
    run(engine, asked(QUESTIONS[0]))
    for request in (
        asked(QUESTIONS[0], context=CONTEXT[:80]),
        asked(QUESTIONS[0], protect=((0, 3),)),
        asked(QUESTIONS[0], cache_salt="secret"),
        asked(QUESTIONS[0], context=OTHER),
        Request(prompt=(*CONTEXT, *QUESTIONS[0]), max_new_tokens=NEW),
        asked(QUESTIONS[0], prompt_logprobs=True),
    ):
        before = {snapshot.key for snapshot in snapshots(engine)}
        assert run(engine, request).cached_tokens < request_context(request)
        if not request.prompt_logprobs:
            assert len(before) + 1 == len(snapshots(engine))
    assert run(engine, asked(QUESTIONS[0])).cached_tokens == len(CONTEXT)


def request_context(request: Request) -> int:
    return request.context or len(request.prompt)


def abort_some(engine: CheckedEngine, number: int) -> None:
    if number in (2, 5) and engine._sequences:
        engine.abort(min(engine._sequences))


def evict_always(engine: CheckedEngine, number: int) -> None:
    assert engine.index is not None
    for group in range(len(engine.pools)):
        engine.index.evict(group, 1 + number % 3)


def evict_all(engine: CheckedEngine, number: int) -> None:
    assert engine.index is not None
    for group, pool in enumerate(engine.pools):
        before = pool.num_cached
        assert engine.index.evict(group, pool.capacity) <= before and pool.num_cached == 0


def evict_and_preempt(engine: CheckedEngine, number: int) -> None:
    if number < 10:
        preempt_at(number - number % 3)(engine, number)
    evict_always(engine, number)


DISTURBANCES = {
    "preempted": preempt_at(4),
    "evicted": evict_always,
    "all evicted": evict_all,
    "evicted and preempted": evict_and_preempt,
    "aborted": abort_some,
    **{f"preempted at {step}": preempt_at(step) for step in range(1, 12)},
}
CHOICES = [
    ("knorm", None, "f32"),
    ("keydiff", 3, "f32"),
    ("snapkv", 2, "f32"),
    ("adakv_knorm", None, "f32"),
    ("adakv_keydiff", 3, "int8"),
]
FAST = [("knorm", None, "f32", name) for name in ("evicted and preempted", "all evicted")]
SLOW = [(*choice, name) for choice in CHOICES for name in DISTURBANCES]


@pytest.mark.parametrize(
    "method, interval, kv_format, disturbance",
    [*FAST, *[pytest.param(*c, marks=pytest.mark.slow) for c in SLOW if c not in FAST]],
)
def test_nothing_that_is_shared_lost_or_taken_away_changes_a_bit(
    mixed: Tiny, method, interval, kv_format, disturbance
):
    requests = [asked(question) for question in (*QUESTIONS, QUESTIONS[0])]
    requests += [asked(QUESTIONS[0], context=OTHER), asked(())]
    options = dict(kv_format=kv_format)
    cold = engine_of(mixed, method, interval, prefix_cache=False, **options)
    want = logit_bits(cold.generate(requests))
    engine = scattered(engine_of(mixed, method, interval, max_sequences=2, **options))
    for _ in range(2):
        completions = [engine.submit(request) for request in requests]
        for number in count():
            if not engine.has_work:
                break
            DISTURBANCES[disturbance](engine, number)
            engine.step()
        for completion, bits in zip(completions, want, strict=True):
            if completion.finish_reason != "abort":
                chex.assert_trees_all_equal(logit_bits([completion])[0], bits)
    if disturbance == "evicted and preempted":
        assert engine.metrics.num_preemptions > 2 and engine.metrics.evicted_pages > 10


@pytest.mark.slow
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_a_small_pool_frees_snapshots_and_serves_all_requests(mixed: Tiny, eviction):
    contexts = random_prompts(*[64] * 8, seed=9)
    requests = [asked(QUESTIONS[2], context=c, keep_logits=False) for c in contexts * 2]
    want = [run(engine_of(mixed, "knorm", prefix_cache=False), r).tokens for r in requests[:8]]
    engine = engine_of(mixed, "knorm", max_sequences=2, eviction=eviction).squeeze(160)
    assert [c.tokens for c in engine.generate(requests)] == want * 2
    assert engine.metrics.evicted_pages > 0
    run(engine, requests[0])
    assert snapshots(engine)
    for pool, taken in zip(engine.pools, engine._taken, strict=True):
        pool.release(taken)
        taken.clear()
    engine.reset_cache()
    assert not snapshots(engine) and engine.index is not None
    check_integrity(engine.index, engine._tables, snapshots=engine._dropper.snapshots)
    assert all(pool.num_free == pool.capacity for pool in engine.pools)


def test_the_methods_that_ask_no_queries_are_those_that_share_by_context():
    for name, method in METHODS.items():
        if not isinstance(method, Window):
            assert method.query_aware != (name.removeprefix("adakv_") in QUERY_FREE)
