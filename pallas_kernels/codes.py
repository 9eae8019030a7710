"""Codes of few bits: how a group of values is encoded, and how codes are decoded.

    symmetric    code = x / s,        s = max |x| / largest code       int8, fp8
    affine       code = (x - m) / s,  m = min x, s = (max x - min x) / largest code, in float16

Values are encoded with the parameters as they are stored, so that decoding inverts it. All decoded
values are finite: NaN is taken as 0, and values beyond LIMIT as LIMIT. `quantised_pages` says which
values are a group.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

LIMIT = 65504.0  # the largest float16, the type of affine parameters
LEAST_SCALE = 1e-30  # far above the numbers for which float32 loses digits
NARROWED = (0.9, 0.8, 0.7, 0.6)  # parts of a group's range that codes may cover


class Affine(NamedTuple):
    """Parameters of a group of affine codes, float16; the group's axis has size 1."""

    scale: jax.Array
    minimum: jax.Array


def largest_code(dtype: DTypeLike) -> float:
    """Returns the largest code of a symmetric type: int8 or float8."""
    if jnp.issubdtype(dtype, jnp.integer):
        return float(jnp.iinfo(dtype).max)
    return float(jnp.finfo(dtype).max)


def symmetric_scale(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the scales `[..., 1]` float32 of groups along the last axis of `x`; none is 0."""
    largest = jnp.max(jnp.abs(finite(x)), axis=-1, keepdims=True)
    return jnp.maximum(largest / largest_code(dtype), LEAST_SCALE)


def encode_symmetric(x: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the codes of `x` for given scales; larger values are clipped.

    No float8 code is -0: in another type with the same bits, which some chips multiply, it is NaN.
    """
    most = largest_code(dtype)
    # A cast to float8 turns numbers that are too large into NaN, not into the largest number.
    ratio = jnp.clip(finite(x) / scale, -most, most)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.round(ratio).astype(dtype)
    bits = jax.lax.bitcast_convert_type(ratio.astype(dtype), jnp.uint8)
    return jax.lax.bitcast_convert_type(jnp.where(bits == 0x80, 0, bits), dtype)


def encode_affine(
    x: jax.Array, bits: int, axis: int, *, narrow: bool = False
) -> tuple[jax.Array, Affine]:
    """Returns the codes (uint8, not packed) and parameters of groups along `axis` of `x`.

    Codes cover the range of the values. With `narrow` they cover the part of it, of those in
    NARROWED, with the least squared error: if there are only four codes, two would be spent on the
    extremes.
    """
    x = finite(x)
    low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
    best = _encode_range(x, bits, low, high)
    if not narrow:
        return best
    least = _squared_error(x, best, axis)
    for share in NARROWED:
        margin = (1.0 - share) / 2 * (high - low)
        tried = _encode_range(x, bits, low + margin, high - margin)
        error = _squared_error(x, tried, axis)
        keep = functools.partial(jnp.where, error < least)
        best, least = jax.tree.map(keep, tried, best), jnp.minimum(error, least)
    return best


def _encode_range(
    x: jax.Array, bits: int, low: jax.Array, high: jax.Array
) -> tuple[jax.Array, Affine]:
    """Encodes with codes that cover [low, high]."""
    most = (1 << bits) - 1
    # Each bound is divided first: the range from -LIMIT to LIMIT is more than a float16 holds.
    step = jnp.minimum(high / most - low / most, LIMIT)
    stored = Affine(step.astype(jnp.float16), low.astype(jnp.float16))
    scale, minimum = (part.astype(jnp.float32) for part in stored)
    code = jnp.round((x - minimum) / jnp.where(scale > 0.0, scale, 1.0))
    return jnp.clip(code, 0, most).astype(jnp.uint8), stored


def _squared_error(x: jax.Array, encoded: tuple[jax.Array, Affine], axis: int) -> jax.Array:
    return ((decode_affine(*encoded) - x) ** 2).sum(axis=axis, keepdims=True)


def decode_affine(codes: jax.Array, parameters: Affine) -> jax.Array:
    """Returns the float32 values of affine codes."""
    scale, minimum = (part.astype(jnp.float32) for part in parameters)
    return codes.astype(jnp.float32) * scale + minimum


def pack_affine(parameters: Affine) -> jax.Array:
    """Packs scale and minimum into one uint32, with the scale in the low half."""
    scale, minimum = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in parameters)
    return scale.astype(jnp.uint32) | minimum.astype(jnp.uint32) << 16


def unpack_affine(packed: jax.Array) -> Affine:
    """Returns the parameters that `pack_affine` packed."""
    halves = packed.astype(jnp.uint16), (packed >> 16).astype(jnp.uint16)
    return Affine(*(jax.lax.bitcast_convert_type(half, jnp.float16) for half in halves))


def pack_bits(codes: jax.Array, bits: int) -> jax.Array:
    """Packs codes `[..., D]` uint8 below 2^bits into bytes `[..., D * bits / 8]`.

    Byte j holds, lowest bits first, the codes of channels j, j + D * bits / 8, and so on. So
    unpacking needs shifts and a concatenation only.
    """
    parts = jnp.split(codes, 8 // bits, axis=-1)
    packed = parts[0]
    for i, part in enumerate(parts[1:], 1):
        packed |= part << (bits * i)
    return packed


def unpack_bits(packed: jax.Array, bits: int) -> jax.Array:
    """Returns the codes that `pack_bits` packed."""
    mask = jnp.uint8((1 << bits) - 1)
    return jnp.concatenate([(packed >> (bits * i)) & mask for i in range(8 // bits)], axis=-1)


def finite(x: jax.Array) -> jax.Array:
    """Returns `x` in float32, with NaN as 0, clipped to what all formats can hold."""
    return jnp.clip(jnp.nan_to_num(x.astype(jnp.float32), nan=0.0), -LIMIT, LIMIT)
