"""Factors of products with codes, in types that a TPU's matrix units take.

    split, join    a float factor as a sum of several in the codes' own type, a row each
    halve          one of the two codes of each byte

Rows are few where they are split, so that parts cost little, and codes need no conversion. Each
part holds what the ones before it left, at a finer scale.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

NUM_PARTS = 3


def step_bits(dtype: DTypeLike) -> int:
    """Bits by which each part is finer than the one before it, all that it holds itself."""
    return 7 if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).nmant + 1


def split(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Splits rows into parts, relative to each row's largest element.

    Args:
      x: `[..., R, n]` float32.
      dtype: int8, which keeps 22 bits of the largest element; or float8, which keeps 12 (e4m3) or 9
        (e5m2) of each element, and of what is far smaller than the largest one an error of 2^-23
        (e4m3) or 2^-36 of it.

    Returns:
      `[..., NUM_PARTS * R, n]`, all first parts before all second ones, and a factor a row,
      `[..., R, 1]`: x is `join` of the parts times the factor.
    """
    is_int, bits = jnp.issubdtype(dtype, jnp.integer), step_bits(dtype)
    coarsest = bits * (NUM_PARTS - 1)
    largest = float(127 << coarsest) if is_int else float(jnp.finfo(dtype).max)
    factor = jnp.maximum(jnp.abs(x).max(axis=-1, keepdims=True), 1e-30) / largest
    x = x * (1 / factor)
    if is_int:
        rest, parts = jnp.round(x).astype(jnp.int32), []
        for unit in range(coarsest, 0, -bits):
            parts.append((rest + (1 << unit - 1)) >> unit)
            rest = rest - (parts[-1] << unit)
        return jnp.concatenate([*parts, rest], axis=-2).astype(dtype), factor
    parts = []
    for _ in range(NUM_PARTS):
        code, value = _round(x, dtype)
        parts.append(code)
        x = (x - value) * 2.0**bits
    code = jnp.concatenate(parts, axis=-2).astype(jnp.int8)
    return lax.bitcast_convert_type(code, dtype), factor


def join(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """What a linear function of parts in `dtype`, `[..., NUM_PARTS * R, n]`, is of their sum."""
    first, *others = jnp.split(x.astype(jnp.float32), NUM_PARTS, axis=-2)
    unit = 2.0 ** step_bits(dtype)
    if jnp.issubdtype(dtype, jnp.integer):  # in units of the last part
        for part in others:
            first = first * unit + part
        return first
    return sum((part * unit**-n for n, part in enumerate(others, start=1)), first)


def _round(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Bits of float8, and their values; 0 where there is no implicit leading 1. Not a conversion,
    which takes many instructions on most chips."""
    info = jnp.finfo(dtype)
    dropped = 23 - info.nmant
    bits = lax.bitcast_convert_type(x, jnp.int32)
    kept = (bits + (1 << dropped - 1)) >> dropped << dropped
    least = np.float32(info.smallest_normal).view(np.int32) - (1 << 23)  # exponent 0 of float8
    size = (kept & 0x7FFFFFFF) - int(least)
    is_normal = size >= 1 << 23
    code = jnp.where(is_normal, size >> dropped | (bits >> 24 & 0x80), 0)
    return code, jnp.where(is_normal, lax.bitcast_convert_type(kept, jnp.float32), 0.0)


def halve(rows: jax.Array, half: int) -> jax.Array:
    """The low (0) or high (1) half of each byte of `[..., n, L]` uint8, as int8."""
    words = pltpu.bitcast(rows, jnp.int32)  # four bytes at once
    return pltpu.bitcast(words >> 4 * half & 0x0F0F0F0F, jnp.int8)
