"""A float operand as two int8, so that its products with codes are taken in integers."""

import jax
import jax.numpy as jnp

_LARGEST = 127 * 128


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits rows into a high and a low half of 15 bits of each row's largest element.

    Args:
      x: `[..., R, n]` float32.

    Returns:
      int8 `[..., 2R, n]`, the high halves and behind them the low ones, and a factor a row,
      `[..., R, 1]`: x is `(128 * high + low) * factor`.
    """
    size = jnp.abs(x).max(axis=-1, keepdims=True)
    factor = jnp.maximum(size, 1e-30) / _LARGEST
    code = jnp.round(x / factor).astype(jnp.int32)
    high = (code + 64) >> 7
    return jnp.concatenate([high, code - (high << 7)], axis=-2).astype(jnp.int8), factor


def join(x: jax.Array) -> jax.Array:
    """What a linear function of `split`'s halves, `[..., 2R, n]`, is of the whole, by factor."""
    R = x.shape[-2] // 2
    x = x.astype(jnp.float32)
    return x[..., :R, :] * 128.0 + x[..., R:, :]
