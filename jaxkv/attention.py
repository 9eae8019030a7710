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
from jaxkv.cache import KVCache, LayerSpec, seal, write
from jaxkv.cache.rotation import rotate
from pallas_kernels import KeyPart, merge_partials
from pallas_kernels.attention.api import BACKENDS
from pallas_kernels.attention.ragged import Ragged, owner
from pallas_kernels.codes import finite
from pallas_kernels.pages import Layout

BACKEND_NAMES = tuple(sorted(BACKENDS))


TPU_ROW = 64  # elements of K that fill half a register's lanes; V fills the other half


def preferred_layout() -> Layout:
    """Physical page layout that attention reads fastest on this platform."""
    return "paired" if jax.default_backend() == "tpu" else "head_major"


def stored_layers(layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Layers with the D that their pages should have on this platform: more than the model's where
    rows would not fill registers, since XLA then converts all of the pool at each step."""
    if preferred_layout() != "paired":
        return layers
    return tuple(
        dataclasses.replace(layer, head_dim=-(-layer.head_dim // TPU_ROW) * TPU_ROW)
        for layer in layers
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
      backend: how attention is run.

    Returns:
      `[T, H, D]` in q's dtype, zero in padding rows, and the new cache.
    """
    q, k, v = qkv
    if cache.formats[layer].rotates:
        q, k, v = (rotate(x) for x in (q, k, v))
    D, stored = q.shape[2], cache.layers[layer].head_dim
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, stored - D))) for x in (q, k, v))
    cache = _write(cache, layer, k, v, step)
    options = dict(
        scale=scale,
        window=cache.windows[cache.groups[layer]],
        soft_cap=soft_cap,
        query_tile=backend.query_tile,
        backend=backend.name,
    )
    out = _attend(q, cache, layer, step, sinks, options)[:, :, :D]
    return (rotate(out) if cache.formats[layer].rotates else out), cache


def _write(cache: KVCache, layer: int, k: jax.Array, v: jax.Array, step: StepInputs) -> KVCache:
    """Writes a step's K and V, and what pages they fill as codes where the format does so."""
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
    q: jax.Array,
    cache: KVCache,
    layer: int,
    step: StepInputs,
    sinks: jax.Array | None,
    options: dict[str, Any],
) -> jax.Array:
    """Attends over the pages of a layer, and over its exact ones where it has some.

    Which of the two a key is read from depends on its position and the query's alone: a prefix
    gives the same output whether it was computed in this step or found.
    """

    P = cache.page_size

    def attend(
        index: int, q: jax.Array, sinks: jax.Array | None, keys: KeyPart | None
    ) -> tuple[jax.Array, jax.Array]:
        result = pallas_kernels.ragged_paged_attention(
            q,
            cache.layers[index],
            step.page_tables[cache.groups[index]],
            step.kv_lens,
            step.query_starts,
            sinks=sinks,
            keys=keys,
            return_lse=True,
            **options,
        )
        assert isinstance(result, tuple)
        return result

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
