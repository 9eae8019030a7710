"""Factors of products with codes, in types that a TPU's matrix units take.

    split, join    a float factor as a sum of several in the codes' own type, a row each
    halve          one of the two codes of each byte

Rows are few where they are split, so that parts cost little, and codes need no conversion. Together
parts keep more of a factor than bfloat16 does.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

_BITS = 9  # that parts of float8 keep together, as bfloat16 does


def num_parts(dtype: DTypeLike) -> int:
    """Rows that `split` makes of one."""
    if jnp.issubdtype(dtype, jnp.integer):
        return 2
    return -(-_BITS // (jnp.finfo(dtype).nmant + 1))


def split(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Splits rows into parts, relative to each row's largest element.

    Args:
      x: `[..., R, n]` float32.
      dtype: int8, which keeps 15 bits of the largest element, or float8, which keeps 9 of each
        element, those aside that are below 2^-15 (e4m3) or 2^-30 (e5m2) of the largest.

    Returns:
      `[..., parts * R, n]`, all first parts before all second ones, and a factor a row,
      `[..., R, 1]`: x is `join` of the parts times the factor.
    """
    is_int = jnp.issubdtype(dtype, jnp.integer)
    largest = 127.0 * 128 if is_int else float(jnp.finfo(dtype).max)
    factor = jnp.maximum(jnp.abs(x).max(axis=-1, keepdims=True), 1e-30) / largest
    x = x * (1 / factor)
    if is_int:
        code = jnp.round(x).astype(jnp.int32)
        high = (code + 64) >> 7
        return jnp.concatenate([high, code - (high << 7)], axis=-2).astype(dtype), factor
    parts = []
    for _ in range(num_parts(dtype)):
        code, value = _round(x, dtype)
        parts.append(code)
        x = x - value
    code = jnp.concatenate(parts, axis=-2).astype(jnp.int8)
    return lax.bitcast_convert_type(code, dtype), factor


def join(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """What a linear function of parts in `dtype`, `[..., parts * R, n]`, is of their sum."""
    first, *others = jnp.split(x.astype(jnp.float32), num_parts(dtype), axis=-2)
    return sum(others, first * 128.0 if jnp.issubdtype(dtype, jnp.integer) else first)


def _round(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Bits of float8, and their values; where there is no implicit leading 1 bits are 0. Not a
    conversion, which takes many instructions on most chips."""
    info = jnp.finfo(dtype)
    dropped = 23 - info.nmant
    bits = lax.bitcast_convert_type(x, jnp.int32)
    kept = (bits + (1 << dropped - 1)) >> dropped << dropped
    least = np.float32(info.smallest_normal).view(np.int32) - (1 << 23)  # exponent 0 of float8
    size = jnp.maximum((kept & 0x7FFFFFFF) - int(least), 0) >> dropped
    return size | (bits >> 24 & 0x80), lax.bitcast_convert_type(kept, jnp.float32)


def halve(rows: jax.Array, half: int) -> jax.Array:
    """The low (0) or high (1) half of each byte of `[..., n, L]` uint8, as int8."""
    words = pltpu.bitcast(rows, jnp.int32)  # four bytes at once
    return pltpu.bitcast(words >> 4 * half & 0x0F0F0F0F, jnp.int8)
