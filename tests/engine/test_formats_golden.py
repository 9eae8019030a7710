"""The golden rule under every KV format: hit or miss, chunked or not, single or batched, evicted,
preempted or forked, a sequence gets the same tokens, and with `deterministic` the same bits."""

from functools import cache

import chex
import jax
import numpy as np
import pytest

from jaxkv.cache import KVRanges
from jaxkv.engine import Request
from tests.engine.disturbances import Disturb, logit_bits, preempt_at
from tests.engine.test_prefix_golden import evict_always, preempt_and_evict, talk
from tests.engine.tiny import CheckedEngine, Tiny, random_prompts

RANGES = KVRanges(((3.0, 1.5, 2.0, 2.5), (2.0, 2.0, 2.5, 1.5)))
FORMATS = (
    "int8",
    "fp8_e4m3",
    "fp8_e5m2_static",
    "int8_static",
    "int4",
    "kivi4",
    "kivi2",
    "kivi_k4v2",
    "kivi2_r20_s2",
    "kivi4_s1,window=int4",
    "int8,window=kivi2_r9",
)
DISTURBANCES: dict[str, Disturb | None] = {
    "quiet": None,
    "preempted and evicted": preempt_and_evict,
    "evicted": evict_always,
    "preempted at 3": preempt_at(3),
    "preempted at 9": preempt_at(9),
}
FAST = ("int8", "int4", "kivi2_r20_s2", "kivi4_s1,window=int4")
CASES = [  # each further format and configuration compiles its own step
    pytest.param(
        kv_format,
        disturbance,
        marks=[] if kv_format in FAST and i < 2 else [pytest.mark.slow],
        id=f"{kv_format}-{disturbance}",
    )
    for kv_format in FORMATS
    for i, disturbance in enumerate(DISTURBANCES)
]
P = 8


def engine_of(tiny: Tiny, kv_format: str, **config) -> CheckedEngine:
    ranges = RANGES if "static" in kv_format else None
    return tiny.engine(page_size=P, kv_format=kv_format, kv_ranges=ranges, **config)


@pytest.fixture(scope="module")
def plain_bits(tiny: Tiny):
    """Logits of `talk` in long chunks, without an index, undisturbed."""

    @cache
    def bits(kv_format: str) -> list[np.ndarray]:
        engine = engine_of(tiny, kv_format, deterministic=True, prefix_cache=False)
        return logit_bits(talk(engine, keep_logits=True))

    return bits


@pytest.mark.parametrize(("kv_format", "disturbance"), CASES)
def test_hits_chunks_evictions_and_preemptions_change_no_bit(
    tiny: Tiny, plain_bits, kv_format, disturbance
):
    engine = engine_of(tiny, kv_format, deterministic=True, token_budget=16)
    done = talk(engine, DISTURBANCES[disturbance], keep_logits=True)
    for got, want in zip(logit_bits(done), plain_bits(kv_format), strict=True):
        chex.assert_trees_all_equal(got, want)
    if disturbance == "quiet":
        assert engine.metrics.cached_tokens > 100  # all but the first prompt begin with a hit


@pytest.mark.parametrize("kv_format", ["int4", "kivi2_r20_s2"])
def test_one_at_a_time_changes_no_bit(tiny: Tiny, plain_bits, kv_format):
    engine = engine_of(tiny, kv_format, deterministic=True, max_sequences=1)
    done = talk(engine, keep_logits=True)
    for got, want in zip(logit_bits(done), plain_bits(kv_format), strict=True):
        chex.assert_trees_all_equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["int8", "kivi2_r20_s2"])
def test_steps_of_any_shape_give_the_same_tokens(tiny: Tiny, kv_format):
    alone = talk(engine_of(tiny, kv_format, max_sequences=1, token_budget=64, prefix_cache=False))
    together = talk(engine_of(tiny, kv_format, token_budget=24))
    assert [c.tokens for c in together] == [c.tokens for c in alone]


@pytest.mark.parametrize("kv_format", ["int8", "kivi4_s1,window=int4"])
def test_answers_forked_within_a_page_are_those_of_lone_requests(tiny: Tiny, kv_format):
    (prompt,) = random_prompts(3 * P + 5, seed=11)
    engine = engine_of(tiny, kv_format, deterministic=True)
    first = engine.submit(Request(prompt=prompt, max_new_tokens=3 * P), stepwise=True)
    while not first.tokens:
        engine.step()
    forks = {token: engine.fork(first.request_id, last_token=token) for token in (3, 50)}
    for completion in forks.values():
        while len(completion.tokens) < 2 * P:
            for one in list(forks.values()):
                if engine._sequences[one.request_id].paused:
                    engine.resume(one.request_id, one.tokens[-1])
            engine.step()
    for token, completion in forks.items():
        lone = engine_of(tiny, kv_format, deterministic=True, prefix_cache=False)
        request = Request(prompt=(*prompt, token), max_new_tokens=2 * P - 1)
        (want,) = lone.generate([request])
        assert completion.tokens[: 2 * P] == [token, *want.tokens]


@pytest.mark.parametrize("kv_format", ["kivi2_r20_s2"])
def test_codes_of_a_sealed_page_never_change(tiny: Tiny, kv_format):
    """Another conversation shares, evicts and copies pages meanwhile."""
    (prompt,) = random_prompts(5 * P + 3, seed=12)
    engine = engine_of(tiny, kv_format, deterministic=True)
    running = engine.submit(Request(prompt=prompt, max_new_tokens=30))
    while not running.tokens:
        engine.step()
    (row,) = [s.row for s in engine._scheduler.running]
    full_layer = 1
    (group,) = engine.cache.groups_of(full_layer)
    ids = engine._tables.pages[group][row, :5].copy()

    def codes() -> list[np.ndarray]:
        pages = jax.device_get(engine.cache.layers[full_layer].paged)
        return [array[ids].copy() for array in pages.values()]

    before = codes()
    other = engine.submit(Request(prompt=(*prompt[: 2 * P + 3], 7, 9), max_new_tokens=30))
    engine.step()
    assert other.cached_tokens == 2 * P + 3  # the third page is copied
    while engine.has_work:
        evict_always(engine, 1)
        engine.step()
        for was, now in zip(before, codes(), strict=True):
            chex.assert_trees_all_equal(was, now)
