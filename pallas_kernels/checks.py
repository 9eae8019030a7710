"""Checks of arguments that the operations share; each message names the dimension at fault."""

import jax.numpy as jnp

from pallas_kernels.pages import LAYOUTS, Pages

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
PAGE_SIZES = range(8, 257)
HEAD_DIMS = range(8, 513)


def require(condition: bool, message: str) -> None:
    """Raises ValueError with `message` unless `condition`."""
    if not condition:
        raise ValueError(message)


def check_pages(pages: Pages) -> None:
    """Raises ValueError where the page array has a shape, dtype or size that no backend takes."""
    kv = pages.kv
    require(pages.layout in LAYOUTS, f"layout must be one of {LAYOUTS}, got {pages.layout!r}")
    require(kv.ndim == 4, f"pages.kv must have four dimensions ({pages.layout}), got {kv.shape}")
    require(kv.dtype in FLOATS, f"pages.kv must be float32, bfloat16 or float16, got {kv.dtype}")
    require(pages.num_pages >= 1, "N = 0 pages; a pool has the null page at least")
    heads = kv.shape[2 if pages.layout == "token_major" else 1]
    require(heads >= 2 and heads % 2 == 0, f"the 2K axis of pages.kv must be even, got {heads}")
    require(
        pages.page_size in PAGE_SIZES,
        f"P = {pages.page_size} tokens a page; supported are {PAGE_SIZES[0]} to {PAGE_SIZES[-1]}",
    )
    require(
        pages.head_dim in HEAD_DIMS,
        f"D = {pages.head_dim}; supported are {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}",
    )
