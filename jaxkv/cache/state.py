"""The functional paged cache: its pytree, and the pure functions that make and change it.

In a jitted step with the cache donated, `write`, `seal` and `copy_pages` update the pools in place:
each layer has arrays of its own, with the page as their leading axis. Attention over the cache is
in `jaxkv.attention`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxkv.cache.spec import CacheSpec, LayerPages
from pallas_kernels import AnyPages, ChannelPages, Pages


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Device state of a paged cache: a pytree whose leaves are the page arrays.

    Attributes:
      layers: the arrays of each entry of `spec.pages`: those of layer i are entry i, and exact
        pages of formats that keep some tokens exact come after them.
      spec: the description of the cache; static.
    """

    layers: tuple[AnyPages, ...]
    spec: CacheSpec = dataclasses.field(metadata=dict(static=True))

    @property
    def page_size(self) -> int:
        """P, tokens per page."""
        return self.spec.page_size

    def replace_layer(self, index: int, pages: AnyPages) -> "KVCache":
        """Returns the cache with one entry of `layers` exchanged."""
        layers = (*self.layers[:index], pages, *self.layers[index + 1 :])
        return dataclasses.replace(self, layers=layers)

    def groups_of(self, index: int) -> range:
        """The groups of an entry of `layers`: one, or one per KV head."""
        return self.spec.pages[index].groups


def init_cache(spec: CacheSpec) -> KVCache:
    """Makes an empty cache, all pages zero.

    Example:

        layers = (LayerSpec(kv_heads=2, head_dim=64),)
        formats = choose_formats("bf16", layers)
        cache = init_cache(
            CacheSpec(layers=layers, page_size=16, num_pages=(129,), formats=formats)
        )

    Raises:
      ValueError: there can be no such cache (`CacheSpec.check`), or a format does not take a layer.
    """
    spec.check()

    def empty(pages: LayerPages) -> AnyPages:
        num_pages = sum(spec.num_pages[group] for group in pages.groups)
        sizes = num_pages, spec.page_size, pages.kv_heads, pages.head_dim
        return pages.format.init_pages(*sizes, spec.layout)

    return KVCache(layers=tuple(map(empty, spec.pages)), spec=spec)


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
      count: int32 scalar; the first `count` of the n pairs are written.
    """
    pages, index = cache.layers[layer], cache.spec.exact_pages(layer)
    assert isinstance(pages, ChannelPages) and index is not None
    exact = cache.layers[index]
    assert isinstance(exact, Pages)
    sealed = pallas_kernels.seal_pages(pages, exact, source, target, count)
    return cache.replace_layer(layer, sealed)


def copy_pages(cache: KVCache, group: int, source: jax.Array, target: jax.Array) -> KVCache:
    """Copies pages `source` `[n]` to `target` `[n]` in every layer of a group, reads first."""
    for index in cache.spec.groups[group].members:
        pages = pallas_kernels.copy_pages(cache.layers[index], source, target)
        cache = cache.replace_layer(index, pages)
    return cache


def move_tokens(cache: KVCache, index: int, source: jax.Array, target: jax.Array) -> KVCache:
    """Moves the K and V of tokens between slots of an entry of `cache.layers`, reads before writes.

    Values are moved as they are stored, codes as codes.

    Args:
      cache: the cache.
      index: number of the entry; its format writes token by token.
      source: `[K, n]` int32, for each KV head the slots to read.
      target: `[K, n]` int32, the slots to write; a slot outside the pool writes nothing.
    """
    pages = cache.layers[index]
    assert not isinstance(pages, ChannelPages)
    K, P = source.shape[0], pages.page_size
    # The KV head of each row of `source` in its page, which has one head or all of them.
    head = jnp.arange(K) % pages.num_kv_heads
    k_and_v = (2 * head[:, None] + jnp.arange(2)[None])[:, :, None]

    def places(array: jax.Array, slots: jax.Array) -> tuple[Any, ...]:
        page, offset = slots // P, slots % P
        if pages.layout == "paired" and array is pages.kv:  # K and V are one row
            return page, head[:, None], slice(None), offset
        return page[:, None], k_and_v, offset[:, None]

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
      `(k, v)`, each `[B, M * P, K, D]` with the K of a page, in the basis in which they are stored:
      in the dtype of the pages where these are floats, and float32 where they are codes. Slots past
      a sequence's length hold whatever the page holds.
    """
    pages = cache.layers[layer]
    slot = jnp.arange(page_table.shape[1] * pages.page_size)
    page = page_table[:, slot // pages.page_size]
    offset = jnp.broadcast_to(slot % pages.page_size, page.shape)
    k, v = (pages.read(i, page, offset).swapaxes(1, 2) for i in (0, 1))
    return k, v
