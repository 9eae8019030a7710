"""An eviction policy from outside the package serves an engine."""

import pytest

from jaxkv.engine import EngineConfig, Request
from jaxkv.prefix import LRU, Evictable
from tests.engine.tiny import Tiny, random_prompts, run


class PopularLast:
    """Evicts the oldest leaf first, and popular leaves after all others.

    Args:
      popular: number of hits from which an entry is popular.
    """

    def __init__(self, popular: int):
        self.popular = popular
        self.entries: dict[Evictable, None] = {}
        self.deferred: set[Evictable] = set()
        self.evicted_hits: list[int] = []

    def touch(self, path):
        self.entries |= dict.fromkeys(path)

    def forget(self, entry):
        del self.entries[entry]
        self.evicted_hits.append(entry.hits)

    def victim(self):
        leaves = [e for e in self.entries if not e.children and e not in self.deferred]
        return min(leaves, key=lambda e: (e.hits >= self.popular, e.born), default=None)

    def defer(self, entry):
        self.deferred.add(entry)

    def resume(self):
        self.deferred.clear()


@pytest.mark.parametrize("own", [True, False], ids=["own", "lru"])
def test_an_engine_serves_with_a_policy_that_is_defined_here(tiny: Tiny, own):
    policy = PopularLast(popular=6)
    engine = tiny.engine(page_size=8, eviction=policy if own else "lru").squeeze(160)
    popular, *others = random_prompts(60, 20, 24, 28, 20, 24, 28, 20, seed=3)
    for prompt in [popular] * 4 + others:
        assert run(engine, Request(prompt=prompt, max_new_tokens=4)).tokens == tiny.greedy(
            prompt, 4
        )
    assert engine.metrics.evicted_pages > 0
    cached = run(engine, Request(prompt=popular, max_new_tokens=1)).cached_tokens
    if own:
        assert policy.evicted_hits and max(policy.evicted_hits) < 6
        assert cached >= 56  # the last page, which has a part of the answer, may go
    else:
        assert cached == 0


def test_a_policy_serves_one_engine(tiny: Tiny):
    policy = LRU()
    engine = tiny.engine(eviction=policy)
    run(engine, Request(prompt=random_prompts(20)[0], max_new_tokens=1))
    with pytest.raises(ValueError, match="serves another index"):
        tiny.engine(eviction=policy)


@pytest.mark.parametrize("eviction", ["mru", LRU, None, 3, ["lru"]], ids=str)
def test_what_is_no_policy_is_refused(eviction):
    with pytest.raises(ValueError, match=r"eviction must be of .* or a policy"):
        EngineConfig(eviction=eviction)
