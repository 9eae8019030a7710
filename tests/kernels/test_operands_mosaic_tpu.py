"""Factors of the TPU kernel's products, split into parts of one byte, against float64."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.mosaic_tpu.operands import (
    join,
    num_parts,
    read_as,
    split,
    split_positive,
    step_bits,
    unit,
)

DTYPES = [jnp.int8, jnp.float8_e4m3fn, jnp.float8_e4m3b11fnuz, jnp.float8_e5m2]
# Of the row's largest element, and of the element itself; twice the former where parts are relative
# to the power of two above it.
ERRORS = {
    "int8": (0.5 / (127 << 14), 2**-23),  # of the element what float32 loses on the way
    "float8_e4m3fn": (2**-19.5, 2**-8),
    "float8_e4m3b11fnuz": (2**-19.5, 2**-8),
    "float8_e5m2": (2**-35, 2**-9),
}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)


def whole(x: np.ndarray, dtype: type, split: Callable = split) -> np.ndarray:
    """Returns the sum of the parts of rows, in float64."""
    parts, factor = split(jnp.asarray(x), dtype)
    assert parts.dtype == dtype
    assert parts.shape == (num_parts(dtype) * len(x), x.shape[1])
    units = 2.0 ** (-step_bits(dtype) * np.arange(num_parts(dtype)))
    weights = units / units[-1] if dtype == jnp.int8 else units
    parts = np.asarray(parts.astype(jnp.float32), np.float64).reshape(num_parts(dtype), *x.shape)
    return np.tensordot(weights, parts, 1) * np.asarray(factor, np.float64)


@every_dtype
def test_the_sum_of_the_parts_is_exact_at_any_size_of_row_and_element(dtype):
    rng = np.random.default_rng(0)
    sizes = 2.0 ** rng.integers(-60, 60, (40, 1)) * 2.0 ** -rng.integers(0, 30, (40, 257))
    x = (rng.uniform(-2, 2, (40, 257)) * sizes).astype(np.float32)
    (of_row, of_element), sizes = ERRORS[dtype.__name__], np.abs(x)
    of_row, of_element = of_row * sizes.max(axis=1, keepdims=True), of_element * sizes
    error = np.abs(whole(x, dtype) - x)
    assert (error <= (2 * of_row + of_element) * (1 + 1e-5)).all()
    error = np.abs(whole(sizes, dtype, split_positive) - sizes)
    assert (error <= (of_row + of_element) * (1 + 1e-5)).all()


@every_dtype
def test_bfloat16_comes_back_to_the_bit(dtype):
    x = np.random.default_rng(4).standard_normal((40, 257)).astype(np.float32)
    x = np.where(np.abs(x) < 0.1, 0, x) * 2.0 ** np.arange(-60, 60, 3)[:, None]
    x = np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))
    chex.assert_trees_all_equal(whole(x, dtype), x)


@every_dtype
def test_rows_of_zeros_and_single_elements_come_back(dtype):
    x = np.zeros((3, 130), np.float32)
    x[1, 7], x[2, 129] = 3.0, -(2.0**-70)
    chex.assert_trees_all_equal(whole(x, dtype), x)


@every_dtype
def test_a_row_of_nan_leaves_the_others_as_they_are(dtype):
    x = np.random.default_rng(1).standard_normal((3, 128)).astype(np.float32)
    poisoned = x.copy()
    poisoned[1] = np.nan
    kept = [0, 2]
    chex.assert_trees_all_equal(whole(poisoned, dtype)[kept], whole(x, dtype)[kept])


@every_dtype
def test_a_product_of_parts_is_the_product_of_the_whole(dtype):
    rng = np.random.default_rng(2)
    x = rng.standard_normal((8, 128)).astype(np.float32)
    codes = jnp.asarray(rng.integers(-12, 13, (128, 64)), jnp.float32).astype(dtype)
    parts, factor = split(jnp.asarray(x), dtype)
    sums = jnp.int32 if dtype == jnp.int8 else jnp.float32
    product = join(jax.lax.dot(parts, codes, preferred_element_type=sums), dtype) * factor
    want = whole(x, dtype) @ np.asarray(codes.astype(jnp.float32), np.float64)
    chex.assert_trees_all_close(product, want, rtol=1e-5, atol=1e-4)


def test_codes_read_in_another_type_are_off_by_a_unit():
    bits = np.setdiff1d(np.arange(256, dtype=np.uint8), [0x7F, 0xFF, 0x80])  # NaN and -0
    codes = jnp.asarray(bits.reshape(-1, 1).repeat(128, 1)).view(jnp.float8_e4m3fn)
    other = jnp.float8_e4m3b11fnuz
    read = read_as(codes, other).astype(jnp.float32) * unit(codes.dtype, other)
    chex.assert_trees_all_equal(read, codes.astype(jnp.float32))
