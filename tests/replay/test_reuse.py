"""Prefix caches against lists of earlier sequences, and Belady's order against trying all."""

import itertools
from collections.abc import Sequence
from functools import cache as memo

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxkv.ledger import prefill_macs, preset
from jaxkv.prefix import check_integrity, pack
from jaxkv.replay import (
    CACHES,
    EVICTIONS,
    OPTIMUM,
    Expanded,
    ReplayError,
    Reuse,
    TraceRequest,
    measure_reuse,
    pack_requests,
    read_trace,
    turns,
    workloads,
)
from jaxkv.replay.caches import PageHash, Radix
from tests.test_docs import ROOT

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
REQUESTS = st.lists(
    st.tuples(TOKENS, st.lists(st.integers(0, 1), min_size=1, max_size=5)), max_size=14
)

Lists = Sequence[tuple[list[int], list[int]]]


def replay(requests: Lists, cache: str, **options) -> Reuse:
    return measure_reuse(list(pack_requests(requests)), cache, **options)


def longest_common_prefixes(requests: Lists, P: int) -> int:
    """Prompt tokens that some earlier sequence began with, in whole pages."""
    hits, seen = 0, []
    for prompt, answer in requests:
        best = 0
        for earlier in seen:
            pairs = itertools.takewhile(
                lambda ab: ab[0] == ab[1], zip(prompt[:-1], earlier, strict=False)
            )
            best = max(best, len(list(pairs)) // P * P)
        hits += best
        seen.append((prompt + answer)[:-1])
    return hits


@settings(max_examples=80, deadline=None)
@given(requests=REQUESTS, P=st.sampled_from([1, 2, 3, 4]))
def test_a_cache_that_holds_all_finds_the_longest_prefix_that_was_there_before(requests, P):
    options = {"capacity": 10_000, "page_size": P}
    exact = longest_common_prefixes(requests, 1)
    whole = longest_common_prefixes(requests, P)
    assert replay(requests, "token", **options).hit_tokens == exact
    assert replay(requests, "page", **options).hit_tokens == whole
    assert replay(requests, "hash", **options).hit_tokens == whole
    assert replay(requests, "token", eviction=OPTIMUM, **options).hit_tokens == exact
    assert replay(requests, "page", eviction=OPTIMUM, **options).hit_tokens == whole
    assert replay(requests, "request", **options).hit_tokens == 0
    assert whole <= exact


def best_of_all_orders(requests: Lists, capacity: int, P: int) -> int:
    """The most hits of any choice of what to keep, by trying all of them; pages by their prefix."""

    def pages(tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[: i + P]) for i in range(0, len(tokens) - P + 1, P)]

    asked = [pages(prompt[:-1]) for prompt, _ in requests]
    computed = [(prompt + answer)[:-1] for prompt, answer in requests]

    @memo
    def best(number: int, kept: frozenset) -> int:
        if number == len(requests):
            return 0
        length = -(-len(computed[number]) // P)
        if length > capacity:
            return best(number + 1, kept)
        hit = len(list(itertools.takewhile(kept.__contains__, asked[number]))) * P
        path = frozenset(pages(computed[number]))
        others = sorted(kept - path)
        room = min(len(others), capacity - length)
        return hit + max(
            best(number + 1, path | frozenset(chosen))
            for chosen in itertools.combinations(others, room)
        )

    return best(0, frozenset())


SHORT = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=4),
        st.lists(st.integers(0, 1), min_size=1, max_size=2),
    ),
    max_size=7,
)


# Some of these compute in any case what a later one looks up: until then it need not be kept.
KEPT_IN_VAIN = [
    ([1, 1, 0], [1]),
    ([0, 1, 1, 1], [1, 0]),
    ([1, 0, 0, 1], [1, 0]),
    ([0], [0, 1]),
    ([0], [0]),
    ([0, 0], [0]),
    ([0, 1, 1, 1], [0, 0]),
]


@settings(max_examples=80, deadline=None)
@given(requests=SHORT, capacity=st.integers(2, 8), P=st.sampled_from([1, 2]))
@example(requests=KEPT_IN_VAIN, capacity=7, P=1)
def test_the_optimum_is_the_best_of_all_orders_of_eviction(requests, capacity, P):
    found = replay(requests, "page", eviction=OPTIMUM, capacity=capacity * P, page_size=P)
    assert found.hit_tokens == best_of_all_orders(requests, capacity, P)


@settings(max_examples=60, deadline=None)
@given(
    requests=REQUESTS,
    capacity=st.integers(4, 40),
    P=st.sampled_from([1, 2, 4]),
    cache=st.sampled_from(CACHES[2:]),
    eviction=st.sampled_from(EVICTIONS),
)
def test_no_order_finds_more_than_the_optimum(requests, capacity, P, cache, eviction):
    options = {"capacity": capacity, "page_size": P}
    found = replay(requests, cache, eviction=eviction, **options)
    limit = replay(requests, cache, eviction=OPTIMUM, **options)
    assert found.hit_tokens <= limit.hit_tokens
    assert found.refused == replay(requests, "page", **options).refused
    assert max(found.most_held, limit.most_held) <= -(-capacity // P) * P


@settings(max_examples=40, deadline=None)
@given(requests=REQUESTS, capacity=st.integers(4, 40), P=st.sampled_from([2, 4]))
def test_the_replayed_caches_keep_their_books(requests, capacity, P):
    radix = Radix(capacity, P, "lru", exact=True)
    hashes = [PageHash(capacity, P, eviction) for eviction in EVICTIONS]
    for prompt, answer in requests:
        radix.serve(pack(prompt), pack(answer))
        check_integrity(radix.index)
        for cache in hashes:
            served = cache.serve(pack(prompt), pack(answer))
            cache.pool.check_integrity()
            assert cache.pool.num_held == 0
            assert cache.pool.num_cached * P == served.held


def test_a_refused_request_leaves_the_cache_as_it_was():
    small, large = ([1, 2, 3], [4]), (list(range(100)), [1])
    for cache in CACHES[2:]:
        for eviction in (*EVICTIONS, OPTIMUM):
            served = list(
                turns(
                    list(pack_requests([small, large, small])),
                    cache,
                    capacity=16,
                    page_size=2,
                    eviction=eviction,
                )
            )
            assert [turn.refused for turn in served] == [False, True, False]
            assert [turn.matched for turn in served] == [0, 0, 2]
            assert served[1].inserted == served[1].evicted == 0


def small_workload(name: str) -> tuple[Lists, int]:
    requests, capacity = workloads.stream(name)
    return list(itertools.islice(requests, 600)), capacity // 10


@pytest.mark.parametrize("name", ["W1", "W1g", "W2", "W3"])
def test_exact_hits_are_at_least_those_of_pages_on_these_workloads(name):
    requests, capacity = small_workload(name)
    hits = {c: replay(requests, c, capacity=capacity).hit_tokens for c in CACHES}
    assert hits["token"] >= hits["page"] >= hits["hash"] >= hits["request"] == hits["none"] == 0


@pytest.mark.parametrize(
    "capacity, page, token", [(160_000, 879_104, 891_104), (80_000, 737_792, 734_640)]
)
def test_under_pressure_the_docs_say_where_exact_hits_are_fewer(capacity, page, token):
    talks = list(pack_requests(workloads.conversations(200, at_a_time=100)))
    assert measure_reuse(talks, "page", capacity=capacity).hit_tokens == page
    assert measure_reuse(talks, "token", capacity=capacity).hit_tokens == token
    for folder in ("docs", "docs/zh"):
        text = (ROOT / folder / "ledger.md").read_text("utf-8")
        assert f" {capacity:,} | {page:,} | {token:,} |" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_hits_are_ordered_on_each_workload_and_near_the_optimum_if_all_fits(name, data):
    trace = data / "conversation_trace.jsonl"
    made, capacity = workloads.stream(name, trace)
    requests = list(pack_requests(made))
    rows = {c: measure_reuse(requests, c, capacity=capacity) for c in ("token", "page", "hash")}
    token, page, hashed = (rows[c].hit_tokens for c in ("token", "page", "hash"))
    limit = measure_reuse(requests, "token", capacity=capacity, eviction=OPTIMUM)
    assert limit.hit_tokens >= token
    assert page >= hashed
    if name == "W4":
        # No request needs the ends of answers that the exact index keeps. They take the room of
        # 0.04 % of the prompts' tokens.
        assert 0 < page - token < 0.0005 * rows["token"].prompt_tokens
    else:
        assert token >= page
    if name == "W1g":
        assert limit.hit_rate - rows["token"].hit_rate < 0.05
        assert rows["token"].hit_rate == pytest.approx(0.9321, abs=1e-4)


def test_five_turns_of_a_talk_match_all_that_was_said_before():
    talk = workloads.conversations(1, 5, at_a_time=1)
    rows = list(turns(list(pack_requests(talk)), "token", capacity=2_048))
    assert [row.prompt for row in rows] == [576, 768, 960, 1152, 1344]
    # All but the last token of the answer, which was never computed, and what is new.
    assert [row.matched for row in rows] == [0, 703, 895, 1087, 1279]
    assert [row.recomputed for row in rows] == [576, 65, 65, 65, 65]
    assert [row.inserted for row in rows] == [703, 192, 192, 192, 192]
    assert [row.evicted for row in rows] == [0] * 5
    assert [row.held for row in rows] == [704, 896, 1088, 1280, 1472]


def test_a_pool_too_small_for_two_talks_evicts_the_older_one():
    talks = workloads.conversations(2, 5, at_a_time=2, systems=2)
    requests = list(pack_requests(talks))
    rows, roomy = (list(turns(requests, "token", capacity=n)) for n in (1_024, 8_192))
    # The second talk's first turn takes the tail of the first one's.
    assert rows[1].evicted == 2 * 704 - 1_024
    assert [row.matched for row in rows[:3]] == [0, 0, 1_024 - 704]
    assert [row.matched for row in roomy[:3]] == [0, 0, 703]
    assert all(row.held <= 1_024 for row in rows)


def test_what_a_hit_saves_is_what_its_prefill_would_have_multiplied():
    model = preset("smollm2-135m")
    requests = list(pack_requests(workloads.conversations(2, 3, at_a_time=1)))
    found = measure_reuse(requests, "token", capacity=10_000, model=model)
    rows = list(turns(requests, "token", capacity=10_000))
    prefill = sum(prefill_macs(model, row.prompt).total for row in rows)
    left = sum(prefill_macs(model, row.prompt, row.matched).total for row in rows)
    assert found.prefill_flops == 2 * prefill
    assert found.saved_flops == 2 * (prefill - left)
    assert found.hit_tokens == sum(row.matched for row in rows)
    nothing = measure_reuse(requests, "none", capacity=1, page_size=1, model=model)
    assert nothing.prefill_flops > 50 * found.prefill_flops  # each token computes all before it


def test_a_traces_blocks_are_shared_and_its_answers_are_not():
    trace = [
        TraceRequest(0.0, 600, 3, (5, 6)),
        TraceRequest(0.0, 1_024, 2, (5, 7)),
        TraceRequest(0.0, 30, 2),
    ]
    (one, answer), (two, _), (three, _) = (
        [np.frombuffer(x, np.int32).tolist() for x in pair] for pair in Expanded(trace)
    )
    assert (len(one), len(two), len(three), len(answer)) == (600, 1_024, 30, 3)
    assert one[:512] == two[:512]
    assert len({*one, *two, *three, *answer}) == 600 + 512 + 30 + 3
    found = measure_reuse(Expanded(trace), "token", capacity=4_096)
    assert found.hit_tokens == 512


def test_on_the_real_trace_an_endless_cache_finds_what_its_blocks_share(data):
    trace = read_trace(data / "conversation_trace.jsonl")
    seen: set[int] = set()
    shared_tokens = 0
    for request in trace:
        known = list(itertools.takewhile(seen.__contains__, request.blocks))
        shared_tokens += min(len(known) * 512, request.prompt - 1)
        seen.update(request.blocks)
    found = measure_reuse(Expanded(trace), "token", capacity=30_000_000)
    assert found.hit_tokens == shared_tokens


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"cache": "odd"}, "no cache 'odd'; there are none, request"),
        ({"eviction": "odd"}, "no eviction 'odd'; there are lru, lfu"),
        ({"capacity": 0}, "a cache of 0 tokens"),
        ({"capacity": 8}, "in pages of 16"),
        ({"page_size": 0}, "in pages of 0"),
        ({"capacity": 1 << 40}, "a cache of"),
        ({"capacity": 0, "eviction": OPTIMUM}, "a cache of 0 tokens"),
        ({"cache": "none", "eviction": OPTIMUM}, "needs a cache that keeps pages, not 'none'"),
    ],
)
def test_what_cannot_be_replayed_is_refused(changes, message):
    options = {"cache": "token", "capacity": 64} | changes
    with pytest.raises(ReplayError, match=message):
        replay([([1], [2])], **options)
