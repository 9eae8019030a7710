"""The functional paged cache: its pytree, and the pure functions that make and change it.

In a jitted step with the cache donated, `write`, `seal` and `copy_pages` update the pools in place:
a layer has arrays of its own, with the page as their leading axis. Not here: attention
(`jaxkv.attention`).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxkv.cache.choice import format_id
from jaxkv.cache.formats import KVFormat
from jaxkv.cache.spec import MAX_SINK_TOKENS, CacheSpec, LayerSpec
from pallas_kernels import AnyPages, ChannelPages, Pages


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Observed:
    """The queries of one layer in a step.

    Attributes:
      q: `[T, H, D]` float32, RoPE applied, not in the basis of the format, times the softmax's
        scale.
      soft_cap: on the logits; static.
    """

    q: jax.Array
    soft_cap: float | None = dataclasses.field(metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Device state of a paged cache.

    Attributes:
      layers: the pages of each layer, and behind them the exact pages of those layers whose format
        keeps some tokens exact (`CacheSpec.pages`).
      groups: layer group of each entry of `layers`, an index into a step's page tables; where its
        heads are apart, that of the first one, and those of the others follow; static.
      heads_apart: of each entry (`LayerPages`); static.
      windows, sink_tokens: of each group (`LayerSpec`); static.
      formats: of each layer; static.
      exact: of each layer, which entry of `layers` has its exact pages; None for none; static.
      observed: None. In a step that is run for its queries' sake alone, a place for those of each
        layer: such a step finds the K and V of its tokens in the pages, and writes nothing.
    """

    layers: tuple[AnyPages, ...]
    groups: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))
    windows: tuple[int | None, ...] = dataclasses.field(metadata=dict(static=True))
    sink_tokens: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))
    formats: tuple[KVFormat, ...] = dataclasses.field(metadata=dict(static=True))
    exact: tuple[int | None, ...] = dataclasses.field(metadata=dict(static=True))
    heads_apart: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))
    observed: tuple[Observed | None, ...] | None = None

    @property
    def page_size(self) -> int:
        """P, tokens a page."""
        return self.layers[0].page_size

    def replace_layer(self, layer: int, pages: AnyPages) -> "KVCache":
        """Returns the cache with one entry of `layers` exchanged."""
        layers = (*self.layers[:layer], pages, *self.layers[layer + 1 :])
        return dataclasses.replace(self, layers=layers)

    def sink_position(self, layer: int, position: jax.Array) -> jax.Array | None:
        """Where queries at `position` stand among the tokens that a layer keeps: their position
        when they see its sink tokens. None for a layer without any."""
        group = self.groups[layer]
        window, sinks = self.windows[group], self.sink_tokens[group]
        return None if window is None or not sinks else jnp.minimum(position, sinks + window - 1)

    def layers_of(self, group: int) -> tuple[int, ...]:
        """Which entries of `layers` have pages of a group."""
        return tuple(i for i in range(len(self.layers)) if group in self.groups_of(i))

    def groups_of(self, index: int) -> range:
        """The groups of an entry of `layers`: one, or one a KV head."""
        return range(self.groups[index], self.groups[index] + max(1, self.heads_apart[index]))

    def observe(self) -> "KVCache":
        """The cache for a step whose queries are wanted, and no K or V of it is written."""
        return dataclasses.replace(self, observed=(None,) * len(self.exact))

    def with_observed(self, layer: int, queries: Observed) -> "KVCache":
        """The cache with the queries of one layer."""
        assert self.observed is not None
        observed = (*self.observed[:layer], queries, *self.observed[layer + 1 :])
        return dataclasses.replace(self, observed=observed)


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
        `num_pages` than of groups, or a group without a page beside the null page; heads of a layer
        that are apart with different numbers; sink tokens
        without a window, or more than there may be; or a format does not take a layer.
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
    for layer, kv_format in zip(spec.layers, spec.formats, strict=True):
        _check_sinks(layer, kv_format)
    sizes: dict[int, set[int]] = {}
    group_of: dict[int, int] = {}
    for g, group in enumerate(spec.groups):
        for i in group.members:
            group_of.setdefault(i, g)
            sizes.setdefault(i, set()).add(spec.num_pages[g])
    if any(len(numbers) > 1 for numbers in sizes.values()):
        raise ValueError(f"num_pages = {spec.num_pages}: heads of one layer need the same number")
    L = len(spec.layers)
    exact = {one.layer: L + i for i, one in enumerate(spec.pages[L:])}

    def empty(index: int) -> AnyPages:
        one, N = spec.pages[index], spec.num_pages[group_of[index]]
        dims = one.kv_heads, one.head_dim
        return one.format.init_pages(
            max(1, one.heads_apart) * N, spec.page_size, *dims, spec.layout
        )

    indices = range(len(spec.pages))
    return KVCache(
        layers=tuple(empty(i) for i in indices),
        groups=tuple(group_of[i] for i in indices),
        windows=tuple(group.window for group in spec.groups),
        sink_tokens=tuple(group.sink_tokens for group in spec.groups),
        formats=spec.formats,
        exact=tuple(exact.get(layer) for layer in range(L)),
        heads_apart=tuple(one.heads_apart for one in spec.pages),
    )


def _check_sinks(layer: LayerSpec, kv_format: KVFormat) -> None:
    if not layer.sink_tokens:
        return
    if layer.window is None or not 0 < layer.sink_tokens <= MAX_SINK_TOKENS:
        raise ValueError(
            f"sink_tokens = {layer.sink_tokens}, window = {layer.window}: sinks are at most "
            f"{MAX_SINK_TOKENS} and stand before a window"
        )
    if kv_format.exact is not None:
        raise ValueError(f"format {kv_format.name} does not go with sink tokens before a window")


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


def move_tokens(cache: KVCache, index: int, source: jax.Array, target: jax.Array) -> KVCache:
    """Moves the K and V of tokens between slots of an entry of `cache.layers`, reads before writes.

    Values are moved as they are stored, codes as codes.

    Args:
      cache: the cache.
      index: of pages that are written a token at a time.
      source: `[K, n]` int32, of each KV head the slots to read.
      target: `[K, n]` int32, the slots to write; one outside the pool writes nothing.
    """
    pages = cache.layers[index]
    assert not isinstance(pages, ChannelPages)
    K, P = source.shape[0], pages.page_size
    first = jnp.zeros(K, jnp.int32) if cache.heads_apart[index] else 2 * jnp.arange(K)
    heads = (first[:, None] + jnp.arange(2)[None])[:, :, None]  # of K and of V

    def places(array: jax.Array, slots: jax.Array) -> tuple[Any, ...]:
        page, offset = slots // P, slots % P
        if pages.layout == "paired" and array is pages.kv:  # K and V are one row
            return page, first[:, None] // 2, slice(None), offset
        page, offset = page[:, None], offset[:, None]
        major = pages.layout == "token_major"
        return (page, offset, heads) if major else (page, heads, offset)

    moved = {
        name: array.at[places(array, target)].set(
            array.at[places(array, source)].get(mode="clip"),
            mode="drop",
            wrap_negative_indices=False,
        )
        for name, array in pages.paged.items()
    }
    return cache.replace_layer(index, dataclasses.replace(pages, **moved))


def gather_dense(cache: KVCache, layer: int, page_table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reads whole table rows of a layer as dense K and V.

    For tests and compression, not for attention: it copies the cache.

    Args:
      cache: the cache.
      layer: index into `cache.layers`.
      page_table: `[B, M]` int32, of its group.

    Returns:
      `(k, v)`, each `[B, M * P, K, D]` with the K of a page, in the dtype of pages of floats, and
      float32 where pages are codes, in the basis in which they are stored. Slots past a sequence's
      length hold whatever the page holds.
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
