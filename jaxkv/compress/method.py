"""How to write a score method: the contract between a method and the code that drops tokens.

A score method gives each token of each KV head a score; the tokens with the highest scores are
kept. A method of your own is a frozen dataclass that derives from `ScoreMethod`:

    @dataclass(frozen=True)
    class LongValues(ScoreMethod[None]):
        power: float = 1.0

        def score(self, tokens, statistics, keep):
            return jnp.linalg.norm(tokens.v, axis=-1) ** self.power

    Compression(method=LongValues(power=2.0), budget="50%")

A method that depends on queries also says which ones it needs (`num_queries`) and what it takes
from them (`observe`). It gets the queries in chunks, so that the weights of a long context never
have to be in memory at once, and returns *statistics*: any pytree of arrays. The statistics of all
chunks are combined (`accumulate`, by default their sum) and passed to `score`. Arrays with an entry
per slot are wrapped in `PerSlot`, so that the entries follow their tokens when these move:

    @dataclass(frozen=True)
    class LastQuery(ScoreMethod[PerSlot]):
        @property
        def num_queries(self):
            return 1

        def observe(self, queries, tokens):
            return PerSlot(queries.attention(tokens).sum(axis=2).mean(axis=1))

        def score(self, tokens, statistics, keep):
            return jnp.where(tokens.is_recent(1), FORCED, statistics.values)

The functions are traced by `jax.jit`: they must be pure. Two methods are the same method if they
are equal; only equal methods share compiled functions and the pages of shortened contexts. A frozen
dataclass compares its class and its fields, so parameters belong in fields, and fields must be
hashable (numbers, strings, tuples, other methods).
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.compress.inputs import LayerTokens, Queries

FORCED = 3e38  # score of a token that a method always keeps; only protected tokens rank higher


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PerSlot:
    """Statistics with an entry per slot, which follow the tokens when these move.

    Attributes:
      values: `[K, S]` float32; 0 in slots without a token.
    """

    values: jax.Array


def map_slots(function: Callable[[jax.Array], jax.Array], statistics: Any) -> Any:
    """Applies a function to the values of each `PerSlot` of a pytree; the rest is unchanged."""

    def leaf(x: Any) -> Any:
        return PerSlot(function(x.values)) if isinstance(x, PerSlot) else x

    return jax.tree.map(leaf, statistics, is_leaf=lambda x: isinstance(x, PerSlot))


class ScoreMethod[Statistics]:
    """Base class of the methods that score tokens. `score` is the only function that each method
    has to define; the module's docstring shows how to write one.
    """

    @property
    def num_queries(self) -> int | None:
        """Which queries `observe` gets: 0 for none, N for those of the last N tokens, None for
        those of all tokens, whose statistics are accumulated for as long as the sequence lives."""
        return 0

    @property
    def query_aware(self) -> bool:
        """What is kept answers the last queries. Requests then share a shortened context only if
        their whole prompts are equal, not only their contexts."""
        return self.num_queries != 0

    @property
    def uneven(self) -> bool:
        """KV heads or layers keep different numbers of tokens, so each needs its own pages."""
        return False

    def observe(self, queries: Queries, tokens: LayerTokens) -> Statistics:
        """Returns the statistics of one chunk of queries.

        Args:
          queries: queries of at most a chunk of tokens; some rows may be padding.
          tokens: the layer's tokens; later ones than the queries' may be among them.
        """
        raise NotImplementedError

    def accumulate(self, total: Statistics, new: Statistics) -> Statistics:
        """Combines the statistics of earlier chunks with those of one more chunk."""
        return jax.tree.map(jnp.add, total, new)

    def score(self, tokens: LayerTokens, statistics: Statistics, keep: jax.Array) -> jax.Array:
        """Scores tokens; those with the highest scores are kept.

        Args:
          tokens: the layer's tokens.
          statistics: accumulated over all chunks; None if the method observes no queries.
          keep: int32 scalar, number of tokens that each head keeps.

        Returns:
          `[K, S]` float32, FORCED for tokens that the method always keeps. Values in slots without
          a token are ignored.
        """
        raise NotImplementedError

    def choose(self, scores: jax.Array, keep: jax.Array) -> jax.Array:
        """Returns which tokens are kept, `[K, S]` bool: for each head the `keep` best; of equal
        scores the later token wins.

        Args:
          scores: `[K, S]`, minus infinity in slots without a token, infinity for protected tokens.
          keep: int32 scalar, number of tokens that each head keeps.
        """
        return ranks(scores) < keep

    def budgets(
        self, num_layers: int, num_tokens: int, keep: int, num_protected: int = 0
    ) -> list[int]:
        """Returns how many tokens the heads of each layer keep.

        Args:
          num_layers: layers that drop tokens.
          num_tokens: length of the sequence.
          keep: the average over the layers must be this.
          num_protected: tokens that must be kept, `keep` at most; no layer may keep fewer.
        """
        return [keep] * num_layers


def ranks(scores: jax.Array) -> jax.Array:
    """Returns the rank of each of `[..., S]` scores, 0 for the highest. Of equal scores the later
    one ranks first."""
    order = jnp.argsort(-scores[..., ::-1], axis=-1, stable=True)
    places = jnp.argsort(order, axis=-1, stable=True)
    return places[..., ::-1].astype(jnp.int32)


def part_of(count: jax.Array, part: float) -> jax.Array:
    """Returns `part * count` rounded down, exact for parts of up to three decimals."""
    exact = Fraction(str(part)).limit_denominator(1000)
    return count * exact.numerator // exact.denominator


def check_integer(name: str, value: Any, least: int = 1) -> None:
    """Raises ValueError, which names the field, unless `value` is an int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")


def check_part(name: str, value: Any) -> None:
    """Raises ValueError, which names the field, unless `value` is a number from 0 to 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}")
