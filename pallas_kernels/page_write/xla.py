"""Page writes as XLA scatters, which update a donated pool in place."""

import dataclasses

import jax

from pallas_kernels.pages import Pages, token_shape
from pallas_kernels.quantised_pages import AnyPages, ChannelPages, TokenPages


@jax.jit
def write_pages(pages: TokenPages, k: jax.Array, v: jax.Array, slots: jax.Array) -> TokenPages:
    """See `pallas_kernels.page_write.api`."""
    page, offset = slots // pages.page_size, slots % pages.page_size
    at = (page, offset) if pages.layout == "token_major" else (page, slice(None), offset)
    arrays = pages.paged
    for name, rows in pages.encode(k, v).items():
        array = arrays[name]
        rows = rows.reshape(slots.size, *token_shape(array, pages.layout))
        # Outside the pool nothing is written: page -1 is not the last one.
        arrays[name] = array.at[at].set(rows, mode="drop", wrap_negative_indices=False)
    return dataclasses.replace(pages, **arrays)


@jax.jit
def copy_pages[P: AnyPages](pages: P, source: jax.Array, target: jax.Array) -> P:
    """See `pallas_kernels.page_write.api`."""
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
    """See `pallas_kernels.page_write.api`.

    Page by page, as many as there are: most decode steps fill none. The bits of a page do not
    depend on how many others are written.
    """

    def seal(i: jax.Array, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        kv = exact.kv.at[source[i]].get(mode="clip")
        kv = kv if exact.layout == "token_major" else kv.swapaxes(0, 1)
        kv = kv.reshape(exact.page_size, 2 * exact.num_kv_heads, exact.head_dim)
        return {
            name: arrays[name].at[target[i]].set(page, mode="drop", wrap_negative_indices=False)
            for name, page in pages.encode_page(kv[:, 0::2], kv[:, 1::2]).items()
        }

    return dataclasses.replace(pages, **jax.lax.fori_loop(0, count, seal, pages.paged))
