"""The functional paged cache: its pytree, and the pure functions that make and change it.

In a jitted step with the cache donated, `write` and `copy_pages` update the pools in place: there
is one array a layer, with the page as its leading axis. Not here: attention (`jaxkv.attention`).
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxkv.cache.spec import CacheSpec
from pallas_kernels.pages import Pages


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Device state of a paged cache.

    Attributes:
      layers: the pages of each layer.
      groups: layer group of each layer, an index into a step's page tables; static.
      windows: window of each group; static.
      format: name of the KV format; static.
    """

    layers: tuple[Pages, ...]
    groups: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))
    windows: tuple[int | None, ...] = dataclasses.field(metadata=dict(static=True))
    format: str = dataclasses.field(metadata=dict(static=True))

    @property
    def page_size(self) -> int:
        """P, tokens a page."""
        return self.layers[0].page_size

    def replace_layer(self, layer: int, pages: Pages) -> "KVCache":
        """Returns the cache with the pages of one layer exchanged."""
        layers = (*self.layers[:layer], pages, *self.layers[layer + 1 :])
        return dataclasses.replace(self, layers=layers)

    def layers_of(self, group: int) -> tuple[int, ...]:
        """Indices of the layers of a group."""
        return tuple(i for i, g in enumerate(self.groups) if g == group)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExportedPages:
    """Pages of one layer group taken out of a cache, for another device or a file.

    Attributes:
      layers: `[n, ...]` for each layer of the group, pages first.
      format: name of the KV format; static.
      layout: physical layout; static.
    """

    layers: tuple[jax.Array, ...]
    format: str = dataclasses.field(metadata=dict(static=True))
    layout: str = dataclasses.field(metadata=dict(static=True))


def init_cache(spec: CacheSpec) -> KVCache:
    """Makes an empty cache, all pages zero.

    Raises:
      ValueError: the spec has no layer, another number of `num_pages` than of groups, or a group
        without a page beside the null page.
    """
    if not spec.layers:
        raise ValueError("a cache needs at least one layer")
    if len(spec.num_pages) != len(spec.groups):
        raise ValueError(
            f"num_pages has {len(spec.num_pages)} entries for {len(spec.groups)} layer groups"
        )
    if min(spec.num_pages) < 2:
        raise ValueError(f"num_pages = {spec.num_pages}: a group needs the null page and one more")
    group_of = {layer: g for g, group in enumerate(spec.groups) for layer in group.layers}

    def empty(index: int) -> Pages:
        layer, N = spec.layers[index], spec.num_pages[group_of[index]]
        heads, tokens = 2 * layer.kv_heads, spec.page_size
        middle = (tokens, heads) if spec.layout == "token_major" else (heads, tokens)
        shape = (N, *middle, layer.head_dim)
        return Pages(kv=jnp.zeros(shape, spec.format.dtype), layout=spec.layout)

    indices = range(len(spec.layers))
    return KVCache(
        layers=tuple(empty(i) for i in indices),
        groups=tuple(group_of[i] for i in indices),
        windows=tuple(group.window for group in spec.groups),
        format=spec.format.name,
    )


def write(cache: KVCache, layer: int, k: jax.Array, v: jax.Array, slots: jax.Array) -> KVCache:
    """Writes K and V `[T, K, D]` of T tokens into `slots` `[T]` (page * P + offset) of a layer."""
    pages = pallas_kernels.write_pages(cache.layers[layer], k, v, slots)
    return cache.replace_layer(layer, pages)


def copy_pages(cache: KVCache, group: int, source: jax.Array, target: jax.Array) -> KVCache:
    """Copies pages `source` `[n]` onto `target` `[n]` in every layer of a group, reads first."""
    for layer in cache.layers_of(group):
        pages = pallas_kernels.copy_pages(cache.layers[layer], source, target)
        cache = cache.replace_layer(layer, pages)
    return cache


def gather_dense(cache: KVCache, layer: int, page_table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reads whole table rows of a layer as dense K and V.

    For tests and compression, not for attention: it copies the cache.

    Args:
      page_table: `[B, M]` int32.

    Returns:
      `(k, v)`, each `[B, M * P, K, D]` in the cache's dtype. Slots past a sequence's length hold
      whatever the page holds.
    """
    pages = cache.layers[layer]
    slot = jnp.arange(page_table.shape[1] * pages.page_size)
    page = page_table[:, slot // pages.page_size]
    offset = jnp.broadcast_to(slot % pages.page_size, page.shape)
    return pages.keys(page, offset).swapaxes(1, 2), pages.values(page, offset).swapaxes(1, 2)


def export_pages(cache: KVCache, group: int, page_ids: jax.Array) -> ExportedPages:
    """Takes pages `page_ids` `[n]` of a group out of a cache; the cache stays as it is."""
    layers = [cache.layers[i] for i in cache.layers_of(group)]
    return ExportedPages(
        layers=tuple(pages.kv.at[page_ids].get(mode="clip") for pages in layers),
        format=cache.format,
        layout=layers[0].layout,
    )


def import_pages(
    cache: KVCache, group: int, page_ids: jax.Array, exported: ExportedPages
) -> KVCache:
    """Puts exported pages into a cache, at `page_ids` `[n]` of a group.

    Raises:
      ValueError: another format, layout, number of layers or page shape than the cache's.
    """
    indices = cache.layers_of(group)
    layout = cache.layers[indices[0]].layout
    if (exported.format, exported.layout) != (cache.format, layout):
        raise ValueError(
            f"pages of format {exported.format} ({exported.layout}) do not fit a cache of format "
            f"{cache.format} ({layout})"
        )
    shapes = [array.shape for array in exported.layers]
    expected = [(*page_ids.shape, *cache.layers[i].kv.shape[1:]) for i in indices]
    if shapes != expected:
        raise ValueError(f"exported pages have shapes {shapes}, the group takes {expected}")
    for layer, array in zip(indices, exported.layers, strict=True):
        pages = cache.layers[layer]
        kv = pages.kv.at[page_ids].set(array, mode="drop")
        cache = cache.replace_layer(layer, dataclasses.replace(pages, kv=kv))
    return cache
