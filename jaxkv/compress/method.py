"""What a method that drops tokens is: a score for each token of each KV head, higher for what is to
be kept.

Scores are pure functions of a layer's K and V and, for some, of queries. A method that looks at
queries sums up what it sees of them chunk by chunk (`look`), so that a long context never has to be
there at once; one that does not is a function of the keys alone. Not here: how many tokens are kept
(`budget`), how they are moved (`compressor`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

Seen = dict[str, jax.Array]
FORCED = 3e38  # score of a token that a method keeps in any case; protected ones are above


@dataclass(frozen=True)
class LayerTokens:
    """K and V of one layer of one sequence, as they are while a function is traced.

    Attributes:
      k, v: `[K, S, D]` float32, in the basis in which the model made them, RoPE applied; 0 in slots
        that hold no token.
      lens: `[K]` int32, tokens of each head; they are in its first slots, in the order of the text.
      num_tokens: int32 scalar, tokens of the sequence, dropped ones included.
      layer: int32 scalar, index of the layer.
      turn: rotates `[T, heads, D]` on by `[T]` positions, as the layer's RoPE does.
    """

    k: jax.Array
    v: jax.Array
    lens: jax.Array
    num_tokens: jax.Array
    layer: jax.Array
    turn: Callable[[jax.Array, jax.Array], jax.Array]

    @property
    def slots(self) -> jax.Array:
        """`[S]` int32."""
        return jnp.arange(self.k.shape[1], dtype=jnp.int32)

    @property
    def live(self) -> jax.Array:
        """`[K, S]` bool, slots with a token."""
        return self.slots[None] < self.lens[:, None]

    def is_recent(self, num_tokens: int | jax.Array) -> jax.Array:
        """`[K, S]` bool, the last so many tokens of each head, and the slots behind them."""
        return self.slots[None] >= self.lens[:, None] - num_tokens


@dataclass(frozen=True)
class Queries:
    """Queries of T tokens of one layer of one sequence, as they are while a function is traced.

    Attributes:
      q: `[T, H, D]` float32, RoPE and the softmax's scale applied.
      positions: `[T]` int32 in the sequence; negative in rows that are none.
      slots: `[K, T]` int32, the slot of each query's own token.
      soft_cap: see `pallas_kernels.ragged_paged_attention`.
    """

    q: jax.Array
    positions: jax.Array
    slots: jax.Array
    soft_cap: float | None

    @property
    def live(self) -> jax.Array:
        """`[T]` bool, rows that are queries."""
        return self.positions >= 0

    def attention(self, tokens: LayerTokens) -> jax.Array:
        """Weights `[K, G, T, S]` that causal attention gives each slot; 0 in rows that are none."""
        T, H, D = self.q.shape
        K = tokens.k.shape[0]
        grouped = self.q.reshape(T, K, H // K, D)
        logits = jnp.einsum("tkgd,ksd->kgts", grouped, tokens.k, precision="highest")
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        seen = tokens.slots[None, None] <= self.slots[:, :, None]
        seen &= tokens.live[:, None] & self.live[None, :, None]
        logits = jnp.where(seen[:, None], logits, -jnp.inf)
        largest = logits.max(axis=-1, keepdims=True)
        weights = jnp.exp(logits - jnp.where(jnp.isneginf(largest), 0.0, largest))
        total = weights.sum(axis=-1, keepdims=True)
        return weights / jnp.where(total == 0.0, 1.0, total)


class ScoreMethod:
    """A method; the base of those in the files of this package.

    Attributes:
      name: what users call it; the one that kvpress has, where it has one.
      num_queries: of how many last tokens it looks at queries; None for all, which are added up for
        as long as a sequence lasts.
      by_head: each KV head of a layer keeps another number of tokens.
      by_layer: each layer does.
      by_slot: of what is added up, the names of what has an entry a slot, `[K, S]`: it goes with
        the tokens that stay.
      query_aware: what stays depends on what the last queries ask for, so that others with the same
        prompt alone go on from it.
      same_tokens: all heads of a layer keep the same tokens.
    """

    name: str
    num_queries: int | None = 0
    by_head: bool = False
    by_layer: bool = False
    by_slot: tuple[str, ...] = ()
    query_aware: bool = False
    same_tokens: bool = False

    def look(self, queries: Queries, tokens: LayerTokens) -> Seen:
        """What a chunk of queries tells; the sums over all chunks are what `score` gets."""
        return {}

    def score(self, tokens: LayerTokens, seen: Seen, keep: jax.Array) -> jax.Array:
        """Scores `[K, S]` float32, FORCED for what is kept in any case.

        Args:
          tokens: of the layer.
          seen: sums of what `look` returned.
          keep: int32 scalar, tokens that each head keeps.
        """
        raise NotImplementedError

    def choose(self, scores: jax.Array, keep: jax.Array) -> jax.Array:
        """Which tokens stay, `[K, S]` bool: of each head the `keep` best, of equals the last.

        Args:
          scores: `[K, S]`, minus infinity in slots without a token, infinite for protected tokens.
          keep: int32 scalar, tokens of each head.
        """
        return ranks(scores) < keep

    def budgets(
        self, num_layers: int, num_tokens: int, keep: int, num_protected: int = 0
    ) -> list[int]:
        """Tokens that each layer's heads keep, `keep` on average, and none more than there are or
        fewer than are protected (`keep` at most)."""
        return [keep] * num_layers


def ranks(scores: jax.Array) -> jax.Array:
    """Place of each of `[..., S]` scores when sorted, highest first, of equals the last first."""
    order = jnp.argsort(-scores[..., ::-1], axis=-1, stable=True)
    places = jnp.argsort(order, axis=-1, stable=True)
    return places[..., ::-1].astype(jnp.int32)
