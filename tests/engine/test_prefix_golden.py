"""The golden rule with a prefix index: what is cached, evicted or preempted changes nothing."""

from collections.abc import Iterator
from itertools import count

import chex
import numpy as np
import pytest

from jaxkv.engine import Completion, Engine, Request
from tests.engine.disturbances import Disturb, logit_bits, preempt_at
from tests.engine.tiny import Tiny, random_prompts

NEW = 6
SYSTEM, *USERS = random_prompts(37, 5, 11, 3, 20, 1, 9, seed=3)


def talk(engine: Engine, disturb: Disturb | None = None, **options) -> list[Completion]:
    """Three conversations of two turns with one system prompt, a turn of all served together."""
    histories, done, steps = [SYSTEM] * 3, [], count()
    for turn in (USERS[:3], USERS[3:6]):
        histories = [h + user for h, user in zip(histories, turn, strict=True)]
        requests = [Request(prompt=h, max_new_tokens=NEW, **options) for h in histories]
        completions = [engine.submit(request) for request in requests]
        while engine.has_work:
            if disturb:
                disturb(engine, next(steps))
            engine.step()
        histories = [h + tuple(c.tokens) for h, c in zip(histories, completions, strict=True)]
        done += completions
    return done


def evict_always(engine: Engine, number: int) -> None:
    """Evicts a part of the cached pages before each step."""
    if engine.index is not None:
        for group in range(len(engine.pools)):
            engine.index.evict(group, 1 + number % 3)


def preempt_and_evict(engine: Engine, number: int) -> None:
    """Evicts always and preempts ten times: a request that always loses all would never end."""
    if number < 10:
        preempt_at(number - number % 3)(engine, number)
    evict_always(engine, number)


DISTURBANCES = {
    "quiet": None,
    "evicted": evict_always,
    "preempted and evicted": preempt_and_evict,
    **{f"preempted at {step}": preempt_at(step) for step in range(20)},
}
CONFIGS = {
    "16, chunks": dict(page_size=16, token_budget=16),
    "8": dict(page_size=8),
    "24, two at a time": dict(page_size=24, max_sequences=2),
    "64, fcfs, lfu": dict(page_size=64, scheduling="fcfs", eviction="lfu"),
    "128, no index": dict(page_size=128, prefix_cache=False),
}
CASES = [
    pytest.param(config, disturb, id=f"{config_name}-{name}")
    for i, (config_name, config) in enumerate(CONFIGS.items())
    for j, (name, disturb) in enumerate(DISTURBANCES.items())
    if i == 0 or j < 4  # every step number with one configuration
]
# Each further configuration compiles its own steps; the test of bits has every step number.
BATCHED = [*CASES[: len(DISTURBANCES) : 4], *CASES[1:3], *CASES[len(DISTURBANCES) :][:4]]


def naive(tiny: Tiny) -> Iterator[list[int]]:
    """The tokens of `talk`, each after a recompute of all that came before."""
    histories = [SYSTEM] * 3
    for turn in (USERS[:3], USERS[3:6]):
        histories = [h + user for h, user in zip(histories, turn, strict=True)]
        answers = [tiny.greedy(history, NEW) for history in histories]
        yield from answers
        histories = [h + tuple(a) for h, a in zip(histories, answers, strict=True)]


@pytest.fixture(scope="module")
def plain_bits(tiny: Tiny) -> list[np.ndarray]:
    """Logits of `talk` without an index, undisturbed."""
    engine = tiny.engine(deterministic=True, prefix_cache=False)
    return logit_bits(talk(engine, keep_logits=True))


@pytest.mark.parametrize(("config", "disturb"), BATCHED)
def test_nothing_that_is_cached_or_lost_changes_a_token(tiny: Tiny, config, disturb):
    completions = talk(tiny.engine(**config), disturb)
    assert [completion.tokens for completion in completions] == list(naive(tiny))


@pytest.mark.parametrize(("config", "disturb"), CASES)
def test_nothing_that_is_cached_or_lost_changes_a_bit(tiny: Tiny, plain_bits, config, disturb):
    engine = tiny.engine(deterministic=True, **config)
    for got, want in zip(
        logit_bits(talk(engine, disturb, keep_logits=True)), plain_bits, strict=True
    ):
        chex.assert_trees_all_equal(got, want)
