"""Factors of products with codes, in types that a TPU's matrix units multiply.

    split, join    a float factor as the sum of several parts in the codes' own type
    read_as        codes in a type that the chip multiplies
    halve          one of the two codes of each byte

With split factors, codes need no conversion. Only tiles of few rows split them, so that the
additional rows cost little. Each part holds the rest of the parts before it, at a finer scale.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

_E4M3 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e4m3b11fnuz)


def num_parts(dtype: DTypeLike) -> int:
    """Returns the number of parts that a factor is split into.

    Together they have at least the bits of bfloat16. They also hold those small elements, compared
    with the largest one of a row, that a sum over a block may need.
    """
    return 2 if dtype in _E4M3 else 3


def step_bits(dtype: DTypeLike) -> int:
    """Returns the bits by which each part is finer than the one before it."""
    return 7 if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).nmant


def split(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Splits rows into parts, relative to each row's largest element.

    Args:
      x: `[..., rows, n]` float32.
      dtype: int8, which keeps 22 bits of the largest element; or float8, which keeps 8 (e4m3) or 9
        (e5m2) bits of each element. Elements far smaller than the largest one have an error of
        2^-19 (e4m3) or 2^-35 (e5m2) of it.

    Returns:
      The parts `[..., num_parts * rows, n]`, all first parts before all second ones, and a factor
      per row, `[..., rows, 1]`: x is `join` of the parts, times the factor.
    """
    # A power of two, so that the parts keep all bits of a bfloat16 number or of a code.
    factor = _power_of_two_above(_factor(jnp.abs(x), dtype))
    if jnp.issubdtype(dtype, jnp.integer):
        return _split_integers(x * (1 / factor), dtype), factor
    sign = lax.bitcast_convert_type(x, jnp.int32) >> 24 & 0x80
    codes = _split_sizes(jnp.abs(x) * (1 / factor), dtype)
    codes = [jnp.where(code > 0, code | sign, 0) for code in codes]  # some types have no -0
    return _join_codes(codes, dtype), factor


def split_positive(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Does the same as `split` for numbers that are not negative, in fewer instructions.

    The factor is as small as possible, so that small elements keep more bits.
    """
    factor = _factor(x, dtype)
    x = x * (1 / factor)
    if jnp.issubdtype(dtype, jnp.integer):
        return _split_integers(x, dtype), factor
    return _join_codes(_split_sizes(x, dtype), dtype), factor


def join(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Joins the values of a linear function at the parts, `[..., num_parts * rows, n]`.

    Returns its value at their sum, `[..., rows, n]` float32.
    """
    first, *others = jnp.split(x.astype(jnp.float32), num_parts(dtype), axis=-2)
    unit = 2.0 ** step_bits(dtype)
    if jnp.issubdtype(dtype, jnp.integer):  # in units of the last part
        for part in others:
            first = first * unit + part
        return first
    return sum((part * unit**-n for n, part in enumerate(others, start=1)), first)


def unit(codes: DTypeLike, dtype: DTypeLike) -> float:
    """Returns the factor from codes that are read as `dtype` to the codes' values."""
    codes, dtype = jnp.dtype(codes), jnp.dtype(dtype)
    if codes != dtype and codes in _E4M3 and dtype in _E4M3:
        return float(jnp.finfo(codes).smallest_normal) / float(jnp.finfo(dtype).smallest_normal)
    return 1.0


def read_as(codes: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns codes as numbers of `dtype`, which `unit` multiplies to the codes' values."""
    if unit(codes.dtype, dtype) != 1.0:
        return lax.bitcast_convert_type(codes, dtype)
    return codes.astype(dtype)


def halve(rows: jax.Array, half: int) -> jax.Array:
    """Returns the low (0) or high (1) half of each byte of `[..., n, lanes]` uint8, as int8."""
    words = pltpu.bitcast(rows, jnp.int32)  # four bytes at once
    return pltpu.bitcast(words >> 4 * half & 0x0F0F0F0F, jnp.int8)


def _split_integers(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    bits = step_bits(dtype)
    rest, parts = jnp.round(x).astype(jnp.int32), []
    for unit in range(bits * (num_parts(dtype) - 1), 0, -bits):
        parts.append((rest + (1 << unit - 1)) >> unit)
        rest = rest - (parts[-1] << unit)
    return jnp.concatenate([*parts, rest], axis=-2).astype(dtype)


def _split_sizes(x: jax.Array, dtype: DTypeLike) -> list[jax.Array]:
    """Returns the parts of rows without sign: the bits of float8 numbers, in int32.

    The bits are computed from those of float32, since conversions take many instructions on most
    chips. All parts but the last are rounded down, so that no rest is negative; the last part is
    rounded to nearest.
    """
    info, count = jnp.finfo(dtype), num_parts(dtype)
    dropped, codes = 23 - info.nmant, []
    for n in range(count):
        least = float(info.smallest_normal) * 2.0 ** (-n * step_bits(dtype))
        least_bits, one = int(np.float32(least).view(np.int32)), 1 << 23  # of the exponent
        bits = lax.bitcast_convert_type(x, jnp.int32)
        if n + 1 == count:
            half = 1 << dropped - 1
            small = lax.bitcast_convert_type(x + least, jnp.int32)  # without an implicit 1
            small, normal = small + (half - least_bits), bits + (half - least_bits + one)
            codes.append(jnp.where(x >= least, normal, small) >> dropped)
        else:
            kept = jnp.where(x >= least, bits & -(1 << dropped), 0)
            codes.append(jnp.maximum(kept - (least_bits - one), 0) >> dropped)
            x = x - lax.bitcast_convert_type(kept, jnp.float32)
    return codes


def _factor(sizes: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the divisor that makes a row's largest element the largest that parts can hold."""
    if jnp.issubdtype(dtype, jnp.integer):
        largest = float(127 << step_bits(dtype) * (num_parts(dtype) - 1))
    else:
        largest = float(jnp.finfo(dtype).max)
    return jnp.maximum(sizes.max(axis=-1, keepdims=True), 1e-30) / largest


def _power_of_two_above(x: jax.Array) -> jax.Array:
    """Returns the least power of two that is not less than a positive number."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type((bits + ((1 << 23) - 1)) & -(1 << 23), jnp.float32)


def _join_codes(codes: list[jax.Array], dtype: DTypeLike) -> jax.Array:
    code = jnp.concatenate(codes, axis=-2).astype(jnp.int8)
    return lax.bitcast_convert_type(code, dtype)
