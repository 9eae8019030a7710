"""Page writes, one token or page at a time: tests compare the other backends with them."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.pages import Pages, token_index, token_shape, tokens_of
from pallas_kernels.quantised_pages import AnyPages, ChannelPages, TokenPages


def write_pages(pages: TokenPages, k: jax.Array, v: jax.Array, slots: jax.Array) -> TokenPages:
    """Does what `pallas_kernels.write_pages` says."""
    arrays = {name: jnp.asarray(array) for name, array in pages.paged.items()}
    for name, rows in pages.encode(k, v).items():
        array = pages.by_token(arrays[name])
        rows = rows.reshape(slots.size, *token_shape(array))
        for t, slot in enumerate(slots):
            page, offset = slot // pages.page_size, slot % pages.page_size
            at = array.at[token_index(array, page, offset)]
            array = at.set(rows[t], mode="drop", wrap_negative_indices=False)
        arrays[name] = array.reshape(arrays[name].shape)
    return dataclasses.replace(pages, **arrays)


def copy_pages[P: AnyPages](pages: P, source: jax.Array, target: jax.Array) -> P:
    """Does what `pallas_kernels.copy_pages` says."""
    arrays = {}
    for name, stored in pages.paged.items():
        array = old = jnp.asarray(stored)
        for one, other in zip(source, target, strict=True):
            array = array.at[other].set(old[one], mode="drop", wrap_negative_indices=False)
        arrays[name] = array
    return dataclasses.replace(pages, **arrays)


def seal_pages(
    pages: ChannelPages, exact: Pages, source: jax.Array, target: jax.Array, count: jax.Array
) -> ChannelPages:
    """Does what `pallas_kernels.seal_pages` says."""
    arrays = pages.paged
    for i in range(int(count)):
        kv = tokens_of(exact, exact.kv[source[i]])
        for name, page in pages.encode_page(kv[:, 0::2], kv[:, 1::2]).items():
            array = arrays[name].at[target[i]]
            arrays[name] = array.set(page, mode="drop", wrap_negative_indices=False)
    return dataclasses.replace(pages, **arrays)
