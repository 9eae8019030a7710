"""What a score method reads: the K and V of one layer of one sequence, and a chunk of its queries.

Both exist only while a function is traced: their arrays may be tracers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class LayerTokens:
    """The tokens that one layer holds of one sequence.

    Each KV head has S slots. Its tokens fill the first slots, in the order of the text.

    Attributes:
      k, v: `[K, S, D]` float32, as the model computed them, with RoPE applied to `k`; 0 in slots
        without a token.
      lens: `[K]` int32, number of tokens that each KV head holds.
      num_tokens: int32 scalar, length of the sequence, dropped tokens included.
      layer: int32 scalar, index of the layer.
      turn: rotates `[T, heads, D]` by `[T]` further positions, as the layer's RoPE does.
    """

    k: jax.Array
    v: jax.Array
    lens: jax.Array
    num_tokens: jax.Array
    layer: jax.Array
    turn: Callable[[jax.Array, jax.Array], jax.Array]

    @property
    def slots(self) -> jax.Array:
        """Slot indices, `[S]` int32."""
        return jnp.arange(self.k.shape[1], dtype=jnp.int32)

    @property
    def live(self) -> jax.Array:
        """`[K, S]` bool: the slot holds a token."""
        return self.slots[None] < self.lens[:, None]

    def is_recent(self, num_tokens: int | jax.Array) -> jax.Array:
        """`[K, S]` bool: the slot holds one of the last `num_tokens` tokens of its head, or comes
        after them."""
        return self.slots[None] >= self.lens[:, None] - num_tokens


@dataclass(frozen=True)
class Queries:
    """Queries of T tokens of one layer of one sequence. Some rows may be padding.

    Attributes:
      q: `[T, H, D]` float32, with RoPE and the scale of the softmax applied.
      positions: `[T]` int32, positions in the sequence; negative in rows that are padding.
      slots: `[K, T]` int32, the slot of each query's own token.
      soft_cap: soft cap of the attention logits (`pallas_kernels.ragged_paged_attention`).
    """

    q: jax.Array
    positions: jax.Array
    slots: jax.Array
    soft_cap: float | None

    @property
    def live(self) -> jax.Array:
        """`[T]` bool: the row is a query, not padding."""
        return self.positions >= 0

    def attention(self, tokens: LayerTokens) -> jax.Array:
        """Weights `[K, G, T, S]` of causal attention to each slot; 0 in rows that are padding."""
        T, H, D = self.q.shape
        K = tokens.k.shape[0]
        grouped = self.q.reshape(T, K, H // K, D)
        logits = jnp.einsum("tkgd,ksd->kgts", grouped, tokens.k, precision="highest")
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        visible = tokens.slots[None, None] <= self.slots[:, :, None]
        visible &= tokens.live[:, None] & self.live[None, :, None]
        logits = jnp.where(visible[:, None], logits, -jnp.inf)
        largest = logits.max(axis=-1, keepdims=True)
        weights = jnp.exp(logits - jnp.where(jnp.isneginf(largest), 0.0, largest))
        total = weights.sum(axis=-1, keepdims=True)
        return weights / jnp.where(total == 0.0, 1.0, total)
