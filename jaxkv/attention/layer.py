"""How one layer writes a step's K and V and attends over its pages: interface and plain case.

Layers with more than one kind of keys, and pages that store something else than the model computes,
have a class each that offers the same two methods (`sink_tokens`, `exact_tokens`, `split_heads`,
`stored`). `api` chooses among them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import jax

from jaxkv.attention.step import StepInputs
from jaxkv.cache import KVCache, write
from pallas_kernels import AnyPages, Backend, ragged_paged_attention
from pallas_kernels.attention.options import AttentionOptions

QueryAt = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """How attention is run; a static choice that never changes what is computed.

    Attributes:
      name: name of a backend of `pallas_kernels.ragged_paged_attention`, a `Backend` of your own,
        or None for the best one of the platform.
      query_tile: number of query rows that a backend works on together. A fixed number of 64 or
        more gives bits that do not depend on the rest of the batch; None lets the backend choose.
    """

    name: str | Backend | None = None
    query_tile: int | None = None


PLATFORM_BACKEND = AttentionBackend()


@dataclass(frozen=True, kw_only=True)
class Queries:
    """The queries of a step in one layer, and how they attend.

    Attributes:
      q: `[T, H, D]`, rotated to the positions of their tokens.
      at: returns them rotated to other positions `[T]`; None where the model does not offer it.
      step: the inputs of the step.
      options: what is computed.
      backend: see `AttentionBackend.name`.
    """

    q: jax.Array
    at: QueryAt | None
    step: StepInputs
    options: AttentionOptions
    backend: str | Backend | None

    def map(self, change: Callable[[jax.Array], jax.Array]) -> "Queries":
        """The same with each `[T, H, D]` changed."""
        at = self.at
        changed_at = None if at is None else lambda position: change(at(position))
        return replace(self, q=change(self.q), at=changed_at)


class LayerAttention(Protocol):
    """How one layer writes and reads its pages."""

    def write(self, cache: KVCache, k: jax.Array, v: jax.Array, step: StepInputs) -> KVCache:
        """Writes K and V `[T, K, D]` of a step's tokens."""
        ...

    def read(self, cache: KVCache, queries: Queries) -> jax.Array:
        """Attends over what is written; returns `[T, H, D]` in the dtype of the queries."""
        ...


@dataclass(frozen=True)
class PlainLayer:
    """A layer with one set of pages, which has all tokens that its queries see.

    Attributes:
      index: number of the layer.
    """

    index: int

    def write(self, cache: KVCache, k: jax.Array, v: jax.Array, step: StepInputs) -> KVCache:
        """See `LayerAttention`."""
        (group,) = cache.groups_of(self.index)
        return write(cache, self.index, k, v, step.slots(group, cache.page_size))

    def read(self, cache: KVCache, queries: Queries) -> jax.Array:
        """See `LayerAttention`."""
        (group,) = cache.groups_of(self.index)
        return paged_attention(cache.layers[self.index], group, queries)[0]


def paged_attention(pages: AnyPages, group: int, queries: Queries) -> tuple[jax.Array, jax.Array]:
    """Attends over the pages of one group.

    Returns:
      `out [T, H, D]` in the dtype of the queries, and the log of the softmax's denominator,
      `[T, H]` float32.
    """
    step, options = queries.step, queries.options
    result = ragged_paged_attention(
        queries.q,
        pages,
        step.page_tables[group],
        step.kv_lens[group],
        step.query_starts,
        scale=options.scale,
        window=options.window,
        soft_cap=options.soft_cap,
        query_tile=options.query_tile,
        keys=options.keys,
        return_lse=True,
        backend=queries.backend,
    )
    assert isinstance(result, tuple)
    return result
