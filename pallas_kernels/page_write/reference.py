"""Page writes one token and one page at a time: what the other backends are held against."""

import dataclasses

import jax

from pallas_kernels.pages import Pages


def write_pages(pages: Pages, k: jax.Array, v: jax.Array, slots: jax.Array) -> Pages:
    """See `pallas_kernels.page_write.api`."""
    T, K, _ = k.shape
    kv = pages.kv
    token_major = pages.layout == "token_major"
    for t in range(T):
        page, offset = slots[t] // pages.page_size, slots[t] % pages.page_size
        for head in range(K):
            for index, value in ((2 * head, k[t, head]), (2 * head + 1, v[t, head])):
                at = (page, offset, index) if token_major else (page, index, offset)
                value = value.astype(kv.dtype)
                kv = kv.at[at].set(value, mode="drop", wrap_negative_indices=False)
    return dataclasses.replace(pages, kv=kv)


def copy_pages(pages: Pages, source: jax.Array, target: jax.Array) -> Pages:
    """See `pallas_kernels.page_write.api`."""
    kv = pages.kv
    for old, new in zip(source, target, strict=True):
        kv = kv.at[new].set(pages.kv[old], mode="drop", wrap_negative_indices=False)
    return dataclasses.replace(pages, kv=kv)
