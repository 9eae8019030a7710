"""Attention over the cache: the one place that knows both its pages and the kernels.

A step's inputs say which tokens of which sequences are computed; where each token's K and V go
follows from the page table, on the device. Not here: projections, RoPE and norms (the model's).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxkv.cache import KVCache, write
from pallas_kernels.attention.api import BACKENDS
from pallas_kernels.attention.ragged import Ragged
from pallas_kernels.pages import Layout

BACKEND_NAMES = tuple(sorted(BACKENDS))


def preferred_layout() -> Layout:
    """Physical page layout that attention reads fastest on this process's platform."""
    return "token_major" if jax.default_backend() == "tpu" else "head_major"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """One step over T query tokens of B sequences, concatenated; padding comes last.

    Attributes:
      tokens: `[T]` int32 token ids; anything in padding rows.
      kv_lens: `[B]` int32, tokens in the cache after this step; 0 for an unused row.
      query_starts: `[B + 1]` int32, first row of each sequence; `query_starts[B]` on is padding.
      page_tables: for each layer group `[B, M]` int32, logical page to physical page.
    """

    tokens: jax.Array
    kv_lens: jax.Array
    query_starts: jax.Array
    page_tables: tuple[jax.Array, ...]

    def places(self) -> tuple[jax.Array, jax.Array]:
        """Sequence `[T]` and position `[T]` of each row, int32; position < 0 marks padding."""
        return Ragged(kv_lens=self.kv_lens, query_starts=self.query_starts).rows(
            self.tokens.shape[0]
        )

    def slots(self, group: int, page_size: int) -> jax.Array:
        """`[T]` int32, the slot of each row in a group; 0, of the null page, for padding."""
        seq, position = self.places()
        table = self.page_tables[group]
        page = table[seq, jnp.clip(position // page_size, 0, table.shape[1] - 1)]
        return jnp.where(position < 0, 0, page * page_size + position % page_size)


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """How attention is run; a static choice that never changes what is computed.

    Attributes:
      name: a backend of `pallas_kernels.ragged_paged_attention`, or None for the platform's best.
      query_tile: fixed tile of query rows, for bits that do not depend on the batch; None picks.
    """

    name: str | None = None
    query_tile: int | None = None


def update_and_attend(
    cache: KVCache,
    layer: int,
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    step: StepInputs,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    backend: AttentionBackend,
) -> tuple[jax.Array, KVCache]:
    """Writes a step's K and V into a layer's pages, then attends over them.

    The layer's window is that of its group.

    Args:
      cache: the cache; donated by the caller's jit, it is updated in place.
      layer: index of the layer.
      qkv: `[T, H, D]`, `[T, K, D]`, `[T, K, D]`, rotated.
      step: the step's inputs.
      scale: factor on q.k.
      soft_cap: bound on the logits; None leaves them.
      sinks: `[H]` float32 sink logits, or None.
      backend: how attention is run.

    Returns:
      `[T, H, D]` in q's dtype, zero in padding rows, and the new cache.
    """
    q, k, v = qkv
    group = cache.groups[layer]
    cache = write(cache, layer, k, v, step.slots(group, cache.page_size))
    out = pallas_kernels.ragged_paged_attention(
        q,
        cache.layers[layer],
        step.page_tables[group],
        step.kv_lens,
        step.query_starts,
        scale=scale,
        window=cache.windows[group],
        sinks=sinks,
        soft_cap=soft_cap,
        query_tile=backend.query_tile,
        backend=backend.name,
    )
    assert isinstance(out, jax.Array)  # no lse was asked for
    return out, cache
