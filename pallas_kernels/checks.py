"""Checks of arguments that the operations share; each message names the wrong dimension."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.pages import LAYOUTS, Pages, numbers_shape, pool_shape
from pallas_kernels.quantised_pages import (
    CHANNEL_GROUP,
    AffinePages,
    AnyPages,
    ChannelPages,
    SymmetricPages,
    TokenPages,
)

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
FLOAT_NAMES = "float32, bfloat16 or float16"
SYMMETRIC_CODES = (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)
PAGE_SIZES = range(8, 257)
HEAD_DIMS = range(8, 513)


def require(condition: bool, message: str) -> None:
    """Raises ValueError with `message` unless `condition`."""
    if not condition:
        raise ValueError(message)


def require_array(name: str, x: object) -> None:
    """Raises ValueError unless `x` is an array, of jax or of numpy."""
    is_array = isinstance(x, jax.Array | np.ndarray)
    require(is_array, f"{name} must be an array, got {type(x).__name__}")


def check_pages(pages: AnyPages) -> None:
    """Raises ValueError if the page arrays have a shape, dtype or size that no backend takes."""
    is_pages = isinstance(pages, AnyPages)
    require(is_pages, f"pages must be Pages of some type, got {type(pages).__name__}")
    require(pages.layout in LAYOUTS, f"layout must be one of {LAYOUTS}, got {pages.layout!r}")
    for name, array in pages.paged.items():
        require_array(f"pages.{name}", array)
        rank = 5 if pages.layout == "paired" and name == "kv" else 4
        rank = 3 if name in ("scales", "parameters") else rank
        require(
            array.ndim == rank,
            f"pages.{name} must have {rank} dimensions ({pages.layout}), got {array.shape}",
        )
    if not isinstance(pages, ChannelPages):
        size, name = _doubled(pages)
        require(size >= 2 and size % 2 == 0, f"{name} of pages.kv must be even, got {size}")
        require(pages.num_kv_heads >= 1, "K = 0 KV heads")
        if pages.layout == "paired":
            got, lanes = pages.kv.shape[4], pool_shape("paired", 1, 1, 1, pages.row_size)[4]
            require(got == lanes, f"the last axis of pages.kv must be {lanes}, got {got}")
    require(pages.num_pages >= 1, "N = 0 pages; a pool has the null page at least")
    require(
        pages.page_size in PAGE_SIZES,
        f"P = {pages.page_size} tokens a page; supported are {PAGE_SIZES[0]} to {PAGE_SIZES[-1]}",
    )
    require(
        pages.head_dim in HEAD_DIMS,
        f"D = {pages.head_dim}; supported are {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}",
    )
    match pages:
        case Pages():
            is_float = pages.kv.dtype in FLOATS
            require(is_float, f"pages.kv must be {FLOAT_NAMES}, got {pages.kv.dtype}")
        case SymmetricPages():
            one_of = "int8, float8_e4m3fn or float8_e5m2"
            is_code = pages.kv.dtype in SYMMETRIC_CODES
            require(is_code, f"pages.kv must be {one_of}, got {pages.kv.dtype}")
            per_head = (2 * pages.num_kv_heads,)
            shape = per_head if pages.is_static else _per_token(pages)
            _require_shape("scales", pages.scales, shape, jnp.float32)
        case AffinePages():
            bits = (4,) if pages.layout == "paired" else (2, 4)
            one_of = " or ".join(map(str, bits))
            require(pages.bits in bits, f"bits must be {one_of}, got {pages.bits}")
            _require_shape("kv", pages.kv, pages.kv.shape, jnp.uint8)
            _require_shape("parameters", pages.parameters, _per_token(pages), jnp.uint32)
        case ChannelPages():
            _check_channel_pages(pages)


def _doubled(pages: TokenPages) -> tuple[int, str]:
    """Returns the size of the axis, or of the row, that K and V share in `kv`, and its name."""
    shape = pages.kv.shape
    if pages.layout == "paired":
        return shape[2] * shape[4], "a row, 2D,"
    return shape[1], "the 2K axis"


def _per_token(pages: SymmetricPages | AffinePages) -> tuple[int, ...]:
    """Returns the shape of an array with one number per token and head."""
    return numbers_shape(pages.layout, pages.num_pages, pages.page_size, 2 * pages.num_kv_heads)


def _check_channel_pages(pages: ChannelPages) -> None:
    N, P, K, D = pages.num_pages, pages.page_size, pages.num_kv_heads, pages.head_dim
    for name, bits in (("k", pages.k_bits), ("v", pages.v_bits)):
        require(bits in (2, 4), f"{name}_bits must be 2 or 4, got {bits}")
        require(D * bits % 8 == 0, f"D = {D}: a token's codes of {bits} bits must fill bytes")
        _require_shape(name, getattr(pages, name), (N, K, P, D * bits // 8), jnp.uint8)
    groups = D // math.gcd(D, CHANNEL_GROUP)
    _require_shape("k_parameters", pages.k_parameters, (N, K, 2, D), jnp.float16)
    _require_shape("v_parameters", pages.v_parameters, (N, K, P, 2 * groups), jnp.float16)


def _require_shape(name: str, array: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> None:
    got, want = (array.shape, array.dtype), (shape, jnp.dtype(dtype))
    require(got == want, f"pages.{name} must be {want[1]} {want[0]}, got {got[1]} {got[0]}")
