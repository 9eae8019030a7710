"""Types of pages: what is written, read, copied and attended over, against numpy."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxkv.arith import ceil_div
from jaxkv.testing.attention import Attention, attend
from jaxkv.testing.batches import naive_attention, place, random_batch
from jaxkv.testing.layouts import by_tokens, stored
from pallas_kernels import (
    AnyPages,
    ChannelPages,
    Pages,
    copy_pages,
    ragged_paged_attention,
    seal_pages,
    write_pages,
)

Write = Callable[[Any, np.ndarray, Sequence[int]], Any]


def check_pages(
    empty: Callable[[int], AnyPages],
    *,
    tolerance: float,
    attention_tolerance: float = 2e-5,
    write: Write | None = None,
    attention: Attention = ragged_paged_attention,
) -> None:
    """Checks a type of pages.

    What is written must be read back within a tolerance, and nothing else in the pool may change by
    a bit. A copied page must read as its source. Attention over the pages must be naive attention
    over what they read as, through a permuted page table, while unused slots hold what `empty` put
    there.

    Args:
      empty: makes a pool of so many pages. Its codes may be anything, and its parameters should be
        NaN, so that a read of an unused slot is caught.
      tolerance: largest error of a value that is read, relative to the largest absolute value of
        its page and head.
      attention_tolerance: largest error of attention.
      write: writes K and V `[n, P, K, 2, D]` float32 into whole pages, given their n ids. The
        default is `write_whole_pages`.
      attention: see `check_attention`.

    Raises:
      AssertionError: a value is wrong.

    Example:
      A pool of `Pages` with P = 8, K = 2 and D = 16:

        def empty(num_pages):
            return Pages(kv=jnp.full((num_pages, 4, 8, 16), jnp.nan), layout="head_major")

        check_pages(empty, tolerance=0)
    """
    write = write or write_whole_pages
    ids, others, pages = [7, 2, 5], [0, 1, 3, 4, 6, 8], empty(9)
    P, K, D = pages.page_size, pages.num_kv_heads, pages.head_dim
    kv = np.random.default_rng(0).standard_normal((3, P, K, 2, D)).astype(np.float32)
    before = {name: np.asarray(array)[others] for name, array in pages.paged.items()}
    pages = write(pages, kv, ids)
    after = {name: np.asarray(array)[others] for name, array in pages.paged.items()}
    chex.assert_trees_all_equal(_bits(after), _bits(before))

    read = decoded(pages)
    error = np.abs(read[ids] - kv) / np.abs(kv).max(axis=(1, 4), keepdims=True)
    assert error.max() <= tolerance, f"a value is read with an error of {error.max()}"
    source, target = (jnp.array(x, jnp.int32) for x in ([7, 2, 0], [2, 1, 0]))
    copied = decoded(copy_pages(pages, source, target))
    chex.assert_trees_all_equal(copied[[2, 1, 7, 5]], read[[7, 2, 7, 5]])

    check_attention_over(
        empty, attention, longest=4 * P + 5, window=13, tolerance=attention_tolerance, write=write
    )


def check_attention_over(
    empty: Callable[[int], AnyPages],
    attention: Attention,
    *,
    longest: int,
    window: int | None,
    q_dtype: DTypeLike = jnp.float32,
    tolerance: float = 2e-5,
    magnitude: float = 1.0,
    write: Write | None = None,
) -> None:
    """Compares attention over pages with naive attention over what they read as.

    Args:
      empty: see `check_pages`.
      attention: see `check_attention`.
      longest: tokens of the last of three sequences.
      window: window of the call.
      q_dtype: dtype of the queries.
      tolerance: largest absolute error of `lse`, and of `out` for a magnitude of 1.
      magnitude: factor on V.
      write: see `check_pages`.

    Raises:
      AssertionError: the two differ.
    """
    write = write or write_whole_pages
    sizes = empty(1)
    P, K, D = sizes.page_size, sizes.num_kv_heads, sizes.head_dim
    dtypes = jnp.dtype(q_dtype), jnp.dtype(jnp.float32)
    batch = random_batch([21, 8, longest], [3, 1, 20], T=28, heads=(2 * K, K), D=D, dtypes=dtypes)
    channels = np.where(np.arange(D) == 3, 1e-9, 1.0).astype(np.float32)  # codes of +0 and -0
    batch = dataclasses.replace(
        batch,
        keys=[channels * k for k in batch.keys],
        values=[magnitude * channels * v for v in batch.values],
    )
    placed = place(batch, P=P, M=ceil_div(longest, P))
    rows = [
        row[: ceil_div(n, P)]
        for row, n in zip(np.asarray(placed.page_table), placed.kv_lens.tolist(), strict=True)
    ]
    used = np.unique(np.concatenate(rows)).tolist()
    kv = by_tokens(np.nan_to_num(np.asarray(placed.pages.kv))[used], placed.pages.layout)
    pages = write(empty(placed.pages.num_pages), kv.reshape(-1, P, K, 2, D), used)
    values = decoded(pages)
    flat = [
        values[row].reshape(-1, K, 2, D)[: len(k)] for row, k in zip(rows, batch.keys, strict=True)
    ]
    read = dataclasses.replace(
        batch, keys=[kv[:, :, 0] for kv in flat], values=[kv[:, :, 1] for kv in flat]
    )
    scale = 1 / math.sqrt(D)
    want, want_lse = naive_attention(read, scale=scale, window=window)
    placed = dataclasses.replace(placed, pages=pages)
    out, lse = attend(attention, batch, placed, scale=scale, window=window)
    out = out.astype(np.float32)
    chex.assert_trees_all_close(out, want, rtol=1e-7, atol=tolerance * magnitude)
    chex.assert_trees_all_close(lse, want_lse, rtol=1e-7, atol=tolerance)


def write_whole_pages(
    pages: AnyPages, kv: np.ndarray, ids: Sequence[int], backend: str | None = None
) -> AnyPages:
    """Writes `[n, P, K, 2, D]` float32 into whole pages, with `seal_pages` or `write_pages`."""
    n, P, K, _, D = kv.shape
    target = jnp.array(ids, jnp.int32)
    if isinstance(pages, ChannelPages):
        whole = stored(kv.reshape(n, P, 2 * K, D), pages.layout)
        exact = Pages(kv=jnp.asarray(whole), layout=pages.layout)
        source = jnp.arange(n, dtype=jnp.int32)
        return seal_pages(pages, exact, source, target, jnp.int32(n), backend=backend)
    slots = (target[:, None] * P + jnp.arange(P, dtype=jnp.int32)[None]).reshape(-1)
    k, v = (jnp.asarray(kv[:, :, :, i].reshape(-1, K, D)) for i in (0, 1))
    return write_pages(pages, k, v, slots, backend=backend)


def decoded(pages: AnyPages) -> np.ndarray:
    """What all pages are read as, `[N, P, K, 2, D]`."""
    N, P, D = pages.num_pages, pages.page_size, pages.head_dim
    page = jnp.repeat(jnp.arange(N), P)[None]
    offset = jnp.tile(jnp.arange(P), N)[None]
    both = [np.asarray(pages.read(i, page, offset))[0] for i in (0, 1)]  # [K, N * P, D]
    return np.stack(both, axis=2).swapaxes(0, 1).reshape(N, P, -1, 2, D)


def _bits(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.view(f"u{array.itemsize}") for name, array in arrays.items()}
