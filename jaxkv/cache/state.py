"""The functional paged cache: its pytree, and the pure functions that make and change it.

In a jitted step with the cache donated, `write`, `seal` and `copy_pages` update the pools in place:
a layer has arrays of its own, with the page as their leading axis. Not here: attention
(`jaxkv.attention`).
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxkv.cache.choice import format_id
from jaxkv.cache.formats import KVFormat
from jaxkv.cache.spec import CacheSpec
from pallas_kernels import AnyPages, ChannelPages, Pages


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Device state of a paged cache.

    Attributes:
      layers: the pages of each layer, and behind them the exact pages of those layers whose format
        keeps some tokens exact (`CacheSpec.pages`).
      groups: layer group of each entry of `layers`, an index into a step's page tables; static.
      windows: window of each group; static.
      formats: of each layer; static.
      exact: of each layer, which entry of `layers` has its exact pages; None for none; static.
    """

    layers: tuple[AnyPages, ...]
    groups: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))
    windows: tuple[int | None, ...] = dataclasses.field(metadata=dict(static=True))
    formats: tuple[KVFormat, ...] = dataclasses.field(metadata=dict(static=True))
    exact: tuple[int | None, ...] = dataclasses.field(metadata=dict(static=True))

    @property
    def page_size(self) -> int:
        """P, tokens a page."""
        return self.layers[0].page_size

    def replace_layer(self, layer: int, pages: AnyPages) -> "KVCache":
        """Returns the cache with one entry of `layers` exchanged."""
        layers = (*self.layers[:layer], pages, *self.layers[layer + 1 :])
        return dataclasses.replace(self, layers=layers)

    def layers_of(self, group: int) -> tuple[int, ...]:
        """Which entries of `layers` belong to a group."""
        return tuple(i for i, g in enumerate(self.groups) if g == group)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExportedPages:
    """Pages of one layer group taken out of a cache, for another device or a file.

    What a layer's pages hold depends on the formats of the layers before it, so that the formats of
    the whole cache are part of what the pages are.

    Attributes:
      layers: for each layer of the group its arrays by name, `[n, ...]`, pages first.
      group: number of the group; static.
      formats: of all layers of the cache, by name (`choice.format_id`); static.
      layout: physical layout; static.
    """

    layers: tuple[dict[str, jax.Array], ...]
    group: int = dataclasses.field(metadata=dict(static=True))
    formats: str = dataclasses.field(metadata=dict(static=True))
    layout: str = dataclasses.field(metadata=dict(static=True))


def init_cache(spec: CacheSpec) -> KVCache:
    """Makes an empty cache, all pages zero.

    Raises:
      ValueError: the spec has no layer, another number of formats than of layers, another number of
        `num_pages` than of groups, or a group without a page beside the null page; or a format does
        not take a layer.
    """
    if not spec.layers:
        raise ValueError("a cache needs at least one layer")
    if len(spec.formats) != len(spec.layers):
        raise ValueError(f"{len(spec.formats)} formats for {len(spec.layers)} layers")
    if len(spec.num_pages) != len(spec.groups):
        raise ValueError(
            f"num_pages has {len(spec.num_pages)} entries for {len(spec.groups)} layer groups"
        )
    if min(spec.num_pages) < 2:
        raise ValueError(f"num_pages = {spec.num_pages}: a group needs the null page and one more")
    group_of = {i: g for g, group in enumerate(spec.groups) for i in group.members}
    L = len(spec.layers)
    exact = {one.layer: L + i for i, one in enumerate(spec.pages[L:])}

    def empty(index: int) -> AnyPages:
        one, N = spec.pages[index], spec.num_pages[group_of[index]]
        dims = one.kv_heads, one.head_dim
        return one.format.init_pages(N, spec.page_size, *dims, spec.layout)

    indices = range(len(spec.pages))
    return KVCache(
        layers=tuple(empty(i) for i in indices),
        groups=tuple(group_of[i] for i in indices),
        windows=tuple(group.window for group in spec.groups),
        formats=spec.formats,
        exact=tuple(exact.get(layer) for layer in range(L)),
    )


def write(cache: KVCache, index: int, k: jax.Array, v: jax.Array, slots: jax.Array) -> KVCache:
    """Writes K and V `[T, K, D]` of T tokens into `slots` `[T]` (page * P + offset) of an entry of
    `cache.layers`."""
    pages = cache.layers[index]
    assert not isinstance(pages, ChannelPages)  # `seal` writes those
    return cache.replace_layer(index, pallas_kernels.write_pages(pages, k, v, slots))


def seal(
    cache: KVCache, layer: int, source: jax.Array, target: jax.Array, count: jax.Array
) -> KVCache:
    """Writes full pages of a layer as codes, from the exact pages that have their tokens.

    Args:
      cache: the cache.
      layer: index of the layer.
      source: `[n]` int32 page ids of the exact pages' group.
      target: `[n]` int32 page ids of the layer's group.
      count: int32 scalar; of the n pairs the first so many are written.
    """
    pages, index = cache.layers[layer], cache.exact[layer]
    assert isinstance(pages, ChannelPages) and index is not None
    exact = cache.layers[index]
    assert isinstance(exact, Pages)
    sealed = pallas_kernels.seal_pages(pages, exact, source, target, count)
    return cache.replace_layer(layer, sealed)


def copy_pages(cache: KVCache, group: int, source: jax.Array, target: jax.Array) -> KVCache:
    """Copies pages `source` `[n]` onto `target` `[n]` in every layer of a group, reads first."""
    for index in cache.layers_of(group):
        pages = pallas_kernels.copy_pages(cache.layers[index], source, target)
        cache = cache.replace_layer(index, pages)
    return cache


def gather_dense(cache: KVCache, layer: int, page_table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reads whole table rows of a layer as dense K and V.

    For tests and compression, not for attention: it copies the cache.

    Args:
      cache: the cache.
      layer: index into `cache.layers`.
      page_table: `[B, M]` int32, of its group.

    Returns:
      `(k, v)`, each `[B, M * P, K, D]`, in the dtype of pages of floats, and float32 where pages
      are codes, in the basis in which they are stored. Slots past a sequence's length hold whatever
      the page holds.
    """
    pages = cache.layers[layer]
    slot = jnp.arange(page_table.shape[1] * pages.page_size)
    page = page_table[:, slot // pages.page_size]
    offset = jnp.broadcast_to(slot % pages.page_size, page.shape)
    k, v = (pages.read(i, page, offset).swapaxes(1, 2) for i in (0, 1))
    return k, v


def export_pages(cache: KVCache, group: int, page_ids: jax.Array) -> ExportedPages:
    """Takes pages `page_ids` `[n]` of a group out of a cache; the cache stays as it is."""
    indices = cache.layers_of(group)
    return ExportedPages(
        layers=tuple(
            {name: x.at[page_ids].get(mode="clip") for name, x in cache.layers[i].paged.items()}
            for i in indices
        ),
        group=group,
        formats=format_id(cache.formats),
        layout=cache.layers[indices[0]].layout,
    )


def import_pages(
    cache: KVCache, group: int, page_ids: jax.Array, exported: ExportedPages
) -> KVCache:
    """Puts exported pages into a cache, at `page_ids` `[n]` of a group.

    Raises:
      ValueError: another group, formats, layout, number of layers or page shape than the cache's.
    """
    indices = cache.layers_of(group)
    theirs = exported.formats, exported.layout, exported.group, len(exported.layers)
    ours = format_id(cache.formats), cache.layers[indices[0]].layout, group, len(indices)
    if theirs != ours:
        words = "format {} ({}), group {}, {} layers"
        raise ValueError(
            f"pages of {words.format(*theirs)}, do not fit a cache of {words.format(*ours)}"
        )
    for index, arrays in zip(indices, exported.layers, strict=True):
        pages = cache.layers[index]
        own = pages.paged
        shapes = {name: array.shape for name, array in arrays.items()}
        expected = {name: (*page_ids.shape, *array.shape[1:]) for name, array in own.items()}
        if shapes != expected:
            raise ValueError(f"exported pages have shapes {shapes}, the group takes {expected}")
        put = {name: own[name].at[page_ids].set(arrays[name], mode="drop") for name in own}
        cache = cache.replace_layer(index, dataclasses.replace(pages, **put))
    return cache
