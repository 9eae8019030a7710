"""The parameters of the codes of a block of keys: one number per key, for K and V of each head.

Small pages have them in rows of LANES, each with P numbers of several heads
(`pages.numbers_shape`). `by_head` exchanges them until each row has the numbers of one head:

    page 0   | h0 | h1 | h2 | h3 |          head 0   | page 0 | page 1 | page 2 | page 3 |
    page 1   | h0 | h1 | h2 | h3 |    to    head 1   | page 0 | page 1 | page 2 | page 3 |
    ..                                      ..
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.pages import LANES


def by_head(pages: Any, page_size: int) -> list[jax.Array]:
    """Reads the numbers of a block's pages, in the order of heads.

    Args:
      pages: a ref of `[pages, 2K, P]`, or of the same numbers in rows of LANES.
      page_size: P.

    Returns:
      n arrays; array i has the heads i, i + n, i + 2 n, ..., of 2K heads, those of K and V
      alternating. Each array is a column of `[2K / n, LANES]`, one for each LANES keys.
    """
    count, _, width = pages.shape
    if width != LANES:
        joined = jnp.concatenate([pages[i] for i in range(count)], axis=1)
        return [jnp.concatenate(jnp.split(joined, joined.shape[1] // LANES, 1), 0)]
    n = LANES // page_size
    arrays = [pages[pl.ds(c, count // n, stride=n)].reshape(-1, LANES) for c in range(n)]
    return _exchange(arrays, page_size)


def store(arrays: Sequence[jax.Array], numbers: Any) -> None:
    """Writes what `by_head` returns into a ref of `[block_tokens / LANES, 2K, LANES]`."""
    n, (count, heads, _) = len(arrays), numbers.shape
    for which, array in enumerate(arrays):
        for c, part in enumerate(jnp.split(array, count)):
            numbers[c, pl.ds(which, heads // n, stride=n)] = part


def of_head(numbers: Any, head: int) -> jax.Array:
    """Returns the numbers of one head, `[1, block_tokens]`, from what `store` wrote."""
    return jnp.concatenate([numbers[c, head : head + 1] for c in range(numbers.shape[0])], axis=1)


def _exchange(rows: Sequence[jax.Array], width: int) -> list[jax.Array]:
    """Exchanges group i of array j, of `width` lanes, with group j of array i.

    Each step exchanges the groups whose indices differ in one bit.
    """
    rows, step = list(rows), 1
    while step < len(rows):
        shift = step * width
        stays = lax.broadcasted_iota(jnp.int32, rows[0].shape, 1) & shift == 0
        for i in range(len(rows)):
            if not i & step:
                a, b = rows[i], rows[i + step]
                rows[i] = jnp.where(stays, a, pltpu.roll(b, shift, 1))
                rows[i + step] = jnp.where(stays, pltpu.roll(a, LANES - shift, 1), b)
        step *= 2
    return rows


def from_float16(bits: jax.Array) -> jax.Array:
    """Returns finite float16 numbers, given as bits in uint32, as float32: TPUs have no float16."""
    size = bits & 0x7FFF
    normal = lax.bitcast_convert_type((size << 13) + (112 << 23), jnp.float32)
    small = size.astype(jnp.int32).astype(jnp.float32) * 2.0**-24  # no implicit leading 1
    value = jnp.where(size < 0x400, small, normal)
    return jnp.where(bits > 0x7FFF, -value, value)
