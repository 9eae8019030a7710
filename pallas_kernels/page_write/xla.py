"""Page writes as XLA scatters, which update a donated pool in place."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.pages import Pages


@jax.jit
def write_pages(pages: Pages, k: jax.Array, v: jax.Array, slots: jax.Array) -> Pages:
    """See `pallas_kernels.page_write.api`."""
    T, K, D = k.shape
    rows = jnp.stack([k, v], axis=2).reshape(T, 2 * K, D).astype(pages.kv.dtype)
    page, offset = slots // pages.page_size, slots % pages.page_size
    at = (page, offset) if pages.layout == "token_major" else (page, slice(None), offset)
    # Outside the pool nothing is written: page -1 is not the last one.
    kv = pages.kv.at[at].set(rows, mode="drop", wrap_negative_indices=False)
    return dataclasses.replace(pages, kv=kv)


@jax.jit
def copy_pages(pages: Pages, source: jax.Array, target: jax.Array) -> Pages:
    """See `pallas_kernels.page_write.api`."""
    moved = pages.kv.at[source].get(mode="clip")
    kv = pages.kv.at[target].set(moved, mode="drop", wrap_negative_indices=False)
    return dataclasses.replace(pages, kv=kv)
