"""Methods from outside the package: what they get, how they are told apart, and what they share."""

from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.compress import (
    H2O,
    AdaKV,
    Compression,
    Knorm,
    LayerTokens,
    PerSlot,
    Queries,
    ScoreMethod,
    SnapKV,
    StreamingLLM,
)
from jaxkv.engine import Request
from tests.engine.disturbances import logit_bits
from tests.engine.tiny import CheckedEngine, Tiny, random_prompts, run

(PROMPT,) = random_prompts(100)


@dataclass(frozen=True)
class LastTokens(ScoreMethod[None]):
    """Keeps the last tokens, or with `first` the first ones."""

    first: bool = False

    def score(self, tokens: LayerTokens, statistics: None, keep: jax.Array) -> jax.Array:
        scores = jnp.broadcast_to(tokens.slots, tokens.live.shape).astype(jnp.float32)
        return -scores if self.first else scores


@dataclass(frozen=True)
class Heaviest(H2O):
    """H2O under another name, which makes it another method."""


def worth(position):
    return position * 37 % 101


@dataclass(frozen=True)
class Worth(ScoreMethod[PerSlot]):
    """Keeps the tokens whose positions are worth most; it learns them from the tokens' queries."""

    @property
    def num_queries(self) -> None:
        return None

    def observe(self, queries: Queries, tokens: LayerTokens) -> PerSlot:
        own = tokens.slots[None, None] == queries.slots[:, :, None]
        own &= queries.live[None, :, None]
        worths = worth(queries.positions)[None, :, None].astype(jnp.float32)
        return PerSlot(jnp.where(own, worths, 0.0).max(axis=1))

    def accumulate(self, total: PerSlot, new: PerSlot) -> PerSlot:
        return PerSlot(jnp.maximum(total.values, new.values))

    def score(self, tokens: LayerTokens, statistics: PerSlot, keep: jax.Array) -> jax.Array:
        return statistics.values


def engine_of(tiny: Tiny, method: ScoreMethod, interval: int | None = None, **options):
    compression = Compression(method=method, budget=30, interval=interval)
    return tiny.engine(compression=compression, **dict(page_size=8, deterministic=True) | options)


def kept_of(engine: CheckedEngine, new: int = 6) -> list[np.ndarray]:
    """Positions that the first head of the first layer keeps, after each drop."""
    engine.submit(Request(prompt=PROMPT, max_new_tokens=new))
    (sequence,) = engine._sequences.values()
    found, last = [], None
    while engine.has_work:
        engine.step()
        kept = sequence.drop.kept
        if kept is not None and kept is not last:
            last = kept
            found.append(np.asarray(last.positions)[0, 0, : last.counts[0, 0]])
    return found


def test_an_engine_keeps_the_tokens_that_a_custom_method_scores_best(mixed: Tiny):
    (last,), (first,) = (kept_of(engine_of(mixed, LastTokens(first))) for first in (False, True))
    assert last.tolist() == list(range(70, 100)) and first.tolist() == list(range(30))


def test_statistics_are_accumulated_by_the_method_and_follow_their_tokens(full: Tiny):
    kept = kept_of(engine_of(full, Worth(), 2))
    there, end = range(100), 100
    for positions in kept:
        want = sorted(sorted(there, key=worth)[-30:])
        assert positions.tolist() == want
        there, end = [*want, end, end + 1], end + 2
    assert len(kept) == 3


@pytest.mark.parametrize(
    "method, other",
    [
        (SnapKV(), SnapKV(window=32)),
        (SnapKV(), SnapKV(kernel_size=7)),
        (H2O(), Heaviest()),
        (LastTokens(), LastTokens(first=True)),
        (AdaKV(SnapKV()), AdaKV(SnapKV(window=32))),
        (AdaKV(Knorm()), AdaKV(Knorm(), safeguard=0.5)),
        (StreamingLLM(), StreamingLLM(sink_tokens=2)),
    ],
)
def test_methods_are_equal_if_class_and_parameters_are(method, other):
    one, same, two = (Compression(method=m, budget=64) for m in (method, method, other))
    assert one == same and hash(one) == hash(same)
    assert one != two and len({one, same, two}) == 2
    assert one.method_name != two.method_name


def test_equal_methods_share_compiled_functions_and_others_do_not(mixed: Tiny):
    engines = [engine_of(mixed, m) for m in (LastTokens(), LastTokens(), LastTokens(first=True))]
    a, b, c = (
        engine.steps.compressor(engine.config.compression.score_method(), engine.cache)
        for engine in engines
    )
    assert a is b and a is not c


def test_what_a_method_shortened_is_shared_with_an_equal_one_only(mixed: Tiny):
    """Two engines would need two indexes, so the keys are compared."""
    keys = []
    for method in (SnapKV(window=16), SnapKV(window=16), SnapKV(window=8), LastTokens()):
        engine = engine_of(mixed, method)
        run(engine, Request(prompt=PROMPT, max_new_tokens=2))
        assert engine._dropper.snapshots is not None
        (snapshot,) = engine._dropper.snapshots
        keys.append(snapshot.key)
    assert keys[0] == keys[1] and len(set(keys)) == 3
    windows = [
        mixed.engine(compression=Compression(method=StreamingLLM(n), budget=24), page_size=8)
        for n in (4, 4, 2)
    ]
    assert windows[0].namespace() == windows[1].namespace() != windows[2].namespace()
    assert windows[0].namespace() != mixed.engine().namespace()


def test_a_parameter_changes_what_is_kept_and_a_second_request_starts_from_it(mixed: Tiny):
    wide, narrow = (engine_of(mixed, SnapKV(window=window, kernel_size=3)) for window in (20, 4))
    (kept_wide,), (kept_narrow,) = kept_of(wide), kept_of(narrow)
    assert set(range(80, 100)) <= set(kept_wide) and not np.array_equal(kept_wide, kept_narrow)
    asked = Request(prompt=PROMPT, max_new_tokens=3, keep_logits=True)
    again = run(wide, asked)
    assert again.cached_tokens == 100 - 1
    cold = engine_of(mixed, SnapKV(window=20, kernel_size=3), prefix_cache=False)
    chex.assert_trees_all_equal(*logit_bits([again, run(cold, asked)]))


def test_a_method_that_cannot_be_told_apart_is_refused():
    @dataclass
    class Mutable(ScoreMethod[None]):
        weight: float = 1.0

    @dataclass(frozen=True)
    class WithList(ScoreMethod[None]):
        weights: list[float]

    for method in (Mutable(), WithList([1.0])):
        with pytest.raises(ValueError, match="must be a frozen dataclass with hashable fields"):
            Compression(method=method, budget=9)


def test_a_method_without_a_score_says_so(mixed: Tiny):
    with pytest.raises(NotImplementedError):
        run(engine_of(mixed, ScoreMethod()), Request(prompt=PROMPT, max_new_tokens=2))


@dataclass(frozen=True)
class Wrong(LastTokens):
    """Returns something else than what is asked for, in one of its functions."""

    where: str = ""

    def score(self, tokens: LayerTokens, statistics: None, keep: jax.Array) -> jax.Array:
        scores = super().score(tokens, statistics, keep)
        wrong = {"rows": scores[:1], "integers": scores.astype(jnp.int32)}
        return wrong.get(self.where, scores)

    def choose(self, scores: jax.Array, keep: jax.Array) -> jax.Array:
        return scores if self.where == "choice" else super().choose(scores, keep)

    def budgets(self, num_layers: int, *others: int) -> list[int]:
        budgets = super().budgets(num_layers, *others)
        return {"fewer": budgets[:-1], "none": [0] * num_layers}.get(self.where, budgets)


@pytest.mark.parametrize(
    "where, message",
    [
        ("rows", r"score of .* must be \[K, S\]"),
        ("integers", r"score of .* must be \[K, S\] = .* floating, got .* int32"),
        ("choice", r"choose of .* must be \[K, S\] = .* bool"),
        ("fewer", "budgets of .* must be . positive numbers"),
        ("none", "budgets of .* must be . positive numbers"),
    ],
)
def test_a_method_that_returns_something_else_is_named(where, message):
    compression = Compression(method=Wrong(where=where), budget=20)
    engine = Tiny.random().engine(compression=compression)
    with pytest.raises(ValueError, match=message):
        engine.generate([Request(prompt=PROMPT, max_new_tokens=2)])
