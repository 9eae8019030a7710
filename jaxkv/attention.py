"""Attention over the cache: the one place that knows both its pages and the kernels.

A step's inputs say which tokens of which sequences are computed; where each token's K and V go
follows from the page table, on the device. Not here: projections, RoPE and norms (the model's).
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxkv.cache import KVCache, LayerSpec, Observed, seal, write
from jaxkv.cache.rotation import rotate
from pallas_kernels import Backend as Backend
from pallas_kernels import KeyPart, merge_partials
from pallas_kernels.attention.api import BACKENDS
from pallas_kernels.attention.ragged import Ragged, owner
from pallas_kernels.chips import not_hopper
from pallas_kernels.codes import finite
from pallas_kernels.pages import Layout

BACKEND_NAMES = tuple(sorted(backend.name for backend in BACKENDS))
ALL_KEYS = 1 << 29  # more than a sequence has, and far from overflow
# D is stored as a multiple of it where kernels read K and V: half the lanes of a TPU's register (V
# fills the other half), the rows of a GPU's product.
ROW = 64


def preferred_layout() -> Layout:
    """Physical page layout that attention reads fastest on this platform."""
    return "paired" if jax.default_backend() == "tpu" else "head_major"


def stored_layers(layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Layers with the D that their pages should have on this platform: more than the model's where
    rows would not fill a TPU's registers, since XLA then converts all of the pool at each step, or
    the products of a GPU that has a kernel, which then does not take them."""
    platform = jax.default_backend()
    if platform == "cpu" or (platform == "gpu" and not_hopper()):
        return layers
    return tuple(
        dataclasses.replace(layer, head_dim=-(-layer.head_dim // ROW) * ROW) for layer in layers
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """One step over T query tokens of B sequences, concatenated; padding comes last.

    Attributes:
      tokens: `[T]` int32 token ids; anything in padding rows.
      kv_lens: `[B]` int32, tokens in the cache after this step; 0 for an unused row.
      query_starts: `[B + 1]` int32, first row of each sequence; `query_starts[B]` on is padding.
      page_tables: for each layer group `[B, M]` int32, logical page to physical page.
      dropped: `[groups, B]` int32, how many of a sequence's tokens a layer group no longer has; the
        rest stand in its pages one after the other. None where no group lacks any.
    """

    tokens: jax.Array
    kv_lens: jax.Array
    query_starts: jax.Array
    page_tables: tuple[jax.Array, ...]
    dropped: jax.Array | None = None

    def places(self) -> tuple[jax.Array, jax.Array]:
        """Sequence `[T]` and position `[T]` of each row, int32; position < 0 marks padding."""
        return Ragged(kv_lens=self.kv_lens, query_starts=self.query_starts).rows(
            self.tokens.shape[0]
        )

    def filled_pages(
        self, groups: tuple[int, ...], page_size: int
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """The pages whose last slot this step writes, in each of some groups.

        Returns:
          Page ids `[T // P + B]` int32 for each group, the same logical pages in all, and how many
          of them there are, an int32 scalar; what follows is padding.
        """
        (T,), (B,) = self.tokens.shape, self.kv_lens.shape
        query_lens = self.query_starts[1:] - self.query_starts[:-1]
        before, after = (self.kv_lens - query_lens) // page_size, self.kv_lens // page_size
        ends = jnp.cumsum(after - before, dtype=jnp.int32)
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
        index = jnp.arange(T // page_size + B, dtype=jnp.int32)
        seq = jnp.minimum(owner(starts, index), B - 1)
        place = before[seq] + index - starts[seq]
        tables = (self.page_tables[group] for group in groups)
        return tuple(table.at[seq, place].get(mode="clip") for table in tables), starts[-1]

    def lens(self, group: int) -> jax.Array:
        """`[B]` int32, the tokens that are in the pages of a group after this step."""
        return self.kv_lens if self.dropped is None else self.kv_lens - self.dropped[group]

    def apart(self, groups: range) -> tuple["StepInputs", jax.Array]:
        """The step as a layer sees it whose K KV heads have pages and lengths of their own: each
        sequence is K sequences that follow each other, with one KV head each.

        Args:
          groups: of the heads.

        Returns:
          A step of T * K rows and B * K sequences with one group, and `[T, K]` int32, which of its
          rows each row and head is.
        """
        T, K = self.tokens.shape[0], len(groups)
        starts, heads = self.query_starts, jnp.arange(K, dtype=jnp.int32)
        query_lens = starts[1:] - starts[:-1]
        begins = K * starts[:-1, None] + query_lens[:, None] * heads[None]
        seq, position = self.places()
        row = jnp.arange(T, dtype=jnp.int32)
        own = begins[seq] + (row - starts[seq])[:, None]
        rows = jnp.where((position < 0)[:, None], K * row[:, None] + heads[None], own)
        tables = jnp.stack([self.page_tables[group] for group in groups], axis=1)
        lens = jnp.stack([self.lens(group) for group in groups], axis=1)
        step = StepInputs(
            tokens=jnp.zeros(T * K, jnp.int32),
            kv_lens=lens.reshape(-1),
            query_starts=jnp.concatenate([begins.reshape(-1), K * starts[-1:]]),
            page_tables=(tables.reshape(-1, tables.shape[2]),),
        )
        return step, rows

    def slots(self, group: int, page_size: int) -> jax.Array:
        """`[T]` int32, the slot of each row in a group; 0, of the null page, for padding."""
        seq, position = self.places()
        if self.dropped is not None:
            position = position - self.dropped[group][seq]
        table = self.page_tables[group]
        page = table[seq, jnp.clip(position // page_size, 0, table.shape[1] - 1)]
        return jnp.where(position < 0, 0, page * page_size + position % page_size)


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """How attention is run; a static choice that never changes what is computed.

    Attributes:
      name: a backend of `pallas_kernels.ragged_paged_attention` by its name, a `Backend` of your
        own, or None for the platform's best.
      query_tile: fixed tile of query rows, for bits that do not depend on the batch; None picks.
    """

    name: str | Backend | None = None
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
    sink_q: jax.Array | None = None,
    backend: AttentionBackend,
) -> tuple[jax.Array, KVCache]:
    """Writes a step's K and V into a layer's pages, then attends over them.

    Both as the layer's format has it. The layer's window is that of its group. Pages may have a
    larger D than the model (`stored_layers`): it is filled with zeros.

    Args:
      cache: the cache; donated by the caller's jit, it is updated in place.
      layer: index of the layer.
      qkv: `[T, H, D]`, `[T, K, D]`, `[T, K, D]`, rotated.
      step: the step's inputs.
      scale: factor on q.k.
      soft_cap: bound on the logits; None leaves them.
      sinks: `[H]` float32 sink logits, or None.
      sink_q: `[T, H, D]`, q rotated as if at `cache.sink_position`: what the layer's sink tokens
        are seen by. None for a layer without any.
      backend: how attention is run.

    Returns:
      `[T, H, D]` in q's dtype, zero in padding rows, and the new cache.
    """
    q, k, v = qkv
    if cache.observed is not None:
        seen = q.astype(jnp.float32) * scale
        cache = cache.with_observed(layer, Observed(q=seen, soft_cap=soft_cap))
    if cache.formats[layer].rotates:
        q, k, v = (rotate(x) for x in (q, k, v))
        sink_q = None if sink_q is None else rotate(sink_q)
    D, stored = q.shape[2], cache.layers[layer].head_dim
    q, k, v = (_widen(x, stored) for x in (q, k, v))
    sink_q = None if sink_q is None else _widen(sink_q, stored)
    options = dict(
        scale=scale,
        window=cache.windows[cache.groups[layer]],
        soft_cap=soft_cap,
        query_tile=backend.query_tile,
        backend=backend.name,
    )
    if cache.heads_apart[layer] > 1:
        out, cache = _update_and_attend_apart(cache, layer, (q, k, v), step, sinks, options)
    else:
        cache = _write(cache, layer, k, v, step)
        out = _attend((q, sink_q), cache, layer, step, sinks, options)
    out = out[:, :, :D]
    return (rotate(out) if cache.formats[layer].rotates else out), cache


def _widen(x: jax.Array, head_dim: int) -> jax.Array:
    """`[T, heads, D]` with zeros behind, where pages have a larger D."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, head_dim - x.shape[2])))


def _update_and_attend_apart(
    cache: KVCache,
    layer: int,
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    step: StepInputs,
    sinks: jax.Array | None,
    options: dict[str, Any],
) -> tuple[jax.Array, KVCache]:
    """The same for a layer whose KV heads have pages of their own: see `StepInputs.apart`."""
    q, k, v = qkv
    (T, H, D), K = q.shape, k.shape[1]
    if sinks is not None:
        raise ValueError("a layer whose KV heads are apart takes no sink logits")
    step, rows = step.apart(cache.groups_of(layer))

    def by_head(x: jax.Array) -> jax.Array:
        parts = x.reshape(T, K, -1, D)
        return jnp.zeros((T * K, *parts.shape[2:]), x.dtype).at[rows].set(parts)

    if cache.observed is None:
        cache = write(cache, layer, by_head(k), by_head(v), step.slots(0, cache.page_size))
    pages, table = cache.layers[layer], step.page_tables[0]
    out = pallas_kernels.ragged_paged_attention(
        by_head(q), pages, table, step.kv_lens, step.query_starts, **options
    )
    assert isinstance(out, jax.Array)
    return out[rows].reshape(T, H, D), cache


def _write(cache: KVCache, layer: int, k: jax.Array, v: jax.Array, step: StepInputs) -> KVCache:
    """Writes a step's K and V, and what pages they fill as codes where the format does so."""
    if cache.observed is not None:  # they are in the pages
        return cache
    P, exact = cache.page_size, cache.exact[layer]
    if exact is None:
        return write(cache, layer, k, v, step.slots(cache.groups[layer], P))
    # What is read exactly for a while is finite like the codes that it becomes.
    k, v = finite(k), finite(v)
    cache = write(cache, exact, k, v, step.slots(cache.groups[exact], P))
    groups = cache.groups[exact], cache.groups[layer]
    (source, target), count = step.filled_pages(groups, P)
    return seal(cache, layer, source, target, count)


def _attend(
    queries: tuple[jax.Array, jax.Array | None],
    cache: KVCache,
    layer: int,
    step: StepInputs,
    sinks: jax.Array | None,
    options: dict[str, Any],
) -> jax.Array:
    """Attends over the pages of a layer: in parts, where it has sink tokens or exact pages.

    Which part a key is in, and which pages it is read from, depends on its position and the query's
    alone: a prefix gives the same output whether it was computed in this step or found.
    """

    P = cache.page_size
    q, sink_q = queries

    def attend(
        index: int, q: jax.Array, sinks: jax.Array | None, keys: KeyPart | None, **others: Any
    ) -> tuple[jax.Array, jax.Array]:
        result = pallas_kernels.ragged_paged_attention(
            q,
            cache.layers[index],
            step.page_tables[cache.groups[index]],
            step.lens(cache.groups[index]),
            step.query_starts,
            sinks=sinks,
            keys=keys,
            return_lse=True,
            **(options | others),
        )
        assert isinstance(result, tuple)
        return result

    if first := cache.sink_tokens[cache.groups[layer]]:
        assert sink_q is not None
        part = functools.partial(KeyPart, page_size=P, recent=ALL_KEYS, first=first)
        merged = merge_partials(
            *attend(layer, sink_q.astype(jnp.float32), None, part(part="first"), window=None),
            *attend(layer, q.astype(jnp.float32), sinks, part(part="recent")),
        )
        return merged[0].astype(q.dtype)
    kept, exact = cache.formats[layer].exact, cache.exact[layer]
    if kept is None or exact is None:
        return attend(layer, q, sinks, None)[0]
    part = functools.partial(
        KeyPart, page_size=P, recent=kept.recent + 1, first=kept.sink_pages * P
    )
    wide = q.astype(jnp.float32)
    merged = merge_partials(
        *attend(layer, wide, None, part(part="middle")),
        *attend(exact, wide, sinks, part(part="recent")),
    )
    if kept.sink_pages:
        merged = merge_partials(*attend(exact, wide, None, part(part="first")), *merged)
    return merged[0].astype(q.dtype)
