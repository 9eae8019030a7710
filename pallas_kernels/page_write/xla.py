"""Page writes as XLA scatters, which update a donated pool in place."""

import dataclasses

import jax

from pallas_kernels.pages import Pages, token_index, token_shape, tokens_of
from pallas_kernels.quantised_pages import AnyPages, ChannelPages, TokenPages


@jax.jit
def write_pages(pages: TokenPages, k: jax.Array, v: jax.Array, slots: jax.Array) -> TokenPages:
    """Does what `pallas_kernels.write_pages` says."""
    page, offset = slots // pages.page_size, slots % pages.page_size
    arrays = pages.paged
    for name, rows in pages.encode(k, v).items():
        array = pages.by_token(arrays[name])
        rows = rows.reshape(slots.size, *token_shape(array))
        at = token_index(array, page, offset)
        # Nothing is written outside the pool: page -1 is not the last page.
        array = array.at[at].set(rows, mode="drop", wrap_negative_indices=False)
        arrays[name] = array.reshape(arrays[name].shape)
    return dataclasses.replace(pages, **arrays)


@jax.jit
def copy_pages[P: AnyPages](pages: P, source: jax.Array, target: jax.Array) -> P:
    """Does what `pallas_kernels.copy_pages` says."""
    arrays = {
        name: array.at[target].set(
            array.at[source].get(mode="clip"), mode="drop", wrap_negative_indices=False
        )
        for name, array in pages.paged.items()
    }
    return dataclasses.replace(pages, **arrays)


@jax.jit
def seal_pages(
    pages: ChannelPages, exact: Pages, source: jax.Array, target: jax.Array, count: jax.Array
) -> ChannelPages:
    """Does what `pallas_kernels.seal_pages` says.

    It encodes `count` pages, one after the other: most decode steps fill none. The bits of a page
    do not depend on how many others are written.
    """

    def seal(i: jax.Array, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        kv = tokens_of(exact, exact.kv.at[source[i]].get(mode="clip"))
        return {
            name: arrays[name].at[target[i]].set(page, mode="drop", wrap_negative_indices=False)
            for name, page in pages.encode_page(kv[:, 0::2], kv[:, 1::2]).items()
        }

    return dataclasses.replace(pages, **jax.lax.fori_loop(0, count, seal, pages.paged))
