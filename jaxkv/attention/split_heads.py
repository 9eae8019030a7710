"""A layer of which each KV head has pages and lengths of its own.

The kernel sees each sequence as K sequences that follow each other, with one KV head each.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxkv.attention.layer import Queries, paged_attention
from jaxkv.attention.step import StepInputs
from jaxkv.cache import KVCache, write


@dataclass(frozen=True)
class SplitHeadsLayer:
    """Writes and reads a layer whose KV heads have pages of their own.

    Attributes:
      index: number of the layer.
    """

    index: int

    def write(self, cache: KVCache, k: jax.Array, v: jax.Array, step: StepInputs) -> KVCache:
        """See `LayerAttention`."""
        by_head, rows = split_step(step, cache.groups_of(self.index))
        slots = by_head.slots(0, cache.page_size)
        return write(cache, self.index, _split(k, rows), _split(v, rows), slots)

    def read(self, cache: KVCache, queries: Queries) -> jax.Array:
        """See `LayerAttention`."""
        by_head, rows = split_step(queries.step, cache.groups_of(self.index))
        split = replace(queries, q=_split(queries.q, rows), step=by_head)
        out, _ = paged_attention(cache.layers[self.index], 0, split)
        return out[rows].reshape(queries.q.shape)


def _split(x: jax.Array, rows: jax.Array) -> jax.Array:
    """`[T * K, heads / K, D]`: the rows of `[T, heads, D]` by KV head, at `rows` `[T, K]`."""
    (T, _, D), K = x.shape, rows.shape[1]
    parts = x.reshape(T, K, -1, D)
    return jnp.zeros((T * K, *parts.shape[2:]), x.dtype).at[rows].set(parts)


def split_step(step: StepInputs, groups: range) -> tuple[StepInputs, jax.Array]:
    """The step as a layer sees it whose K KV heads have pages of their own.

    Args:
      step: the step.
      groups: the layer group of each KV head.

    Returns:
      A step of T * K rows and B * K sequences with one group, and `[T, K]` int32, which of its rows
      each row and head is.
    """
    T, K = step.tokens.shape[0], len(groups)
    starts, heads = step.query_starts, jnp.arange(K, dtype=jnp.int32)
    query_lens = starts[1:] - starts[:-1]
    begins = K * starts[:-1, None] + query_lens[:, None] * heads[None]
    seq, position = step.places()
    row = jnp.arange(T, dtype=jnp.int32)
    own = begins[seq] + (row - starts[seq])[:, None]
    rows = jnp.where((position < 0)[:, None], K * row[:, None] + heads[None], own)
    tables = jnp.stack([step.page_tables[group] for group in groups], axis=1)
    by_head = StepInputs.of(
        jnp.zeros(T * K, jnp.int32),
        step.kv_lens[groups.start : groups.stop].T.reshape(-1),
        jnp.concatenate([begins.reshape(-1), K * starts[-1:]]),
        tables.reshape(-1, tables.shape[2]),
    )
    return by_head, rows
