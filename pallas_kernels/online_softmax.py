"""Softmax in parts: attention over disjoint sets of keys, merged exactly.

A part has a normalised output and the natural logarithm of its sum of exponentials (lse). An empty
part has output 0 and lse -inf; merging it changes nothing. Source: Milakov and Gimelshein, arXiv
1805.02867; Rabe and Staats, arXiv 2112.05682.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.checks import require


def finite_or_zero(x: jax.Array) -> jax.Array:
    """Replaces -inf by 0, so that `exp(-inf - x)` is 0 and not NaN if a row has no key yet."""
    return jnp.where(jnp.isneginf(x), 0.0, x)


def merge_partials(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Merges attention over two disjoint sets of keys into attention over their union.

    Args:
      out_a: `[..., D]` normalised output over the first set.
      lse_a: `[...]` float32, natural logarithm of its sum of exponentials; -inf if it is empty.
      out_b: like `out_a`, over the second set.
      lse_b: like `lse_a`.

    Returns:
      `(out, lse)`: `[..., D]` in `out_a`'s dtype and `[...]` float32; 0 and -inf if both are empty.
      Only one of the two calls may have had the sinks.

    Raises:
      ValueError: the shapes do not match.
    """
    require(out_b.shape == out_a.shape, f"out_b is {out_b.shape}, out_a {out_a.shape}")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        rows = out_a.shape[:-1]
        require(lse.shape == rows, f"{name} must be out's shape without D, {rows}, got {lse.shape}")
    m = finite_or_zero(jnp.maximum(lse_a, lse_b))
    weight_a, weight_b = jnp.exp(lse_a - m), jnp.exp(lse_b - m)
    total = weight_a + weight_b
    safe = jnp.where(total == 0.0, 1.0, total)
    out = (
        out_a.astype(jnp.float32) * (weight_a / safe)[..., None]
        + out_b.astype(jnp.float32) * (weight_b / safe)[..., None]
    )
    return out.astype(out_a.dtype), m + jnp.log(total)
