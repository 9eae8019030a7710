"""Rotary position embedding: frequencies with their scaling, and the rotation itself.

Channel i is paired with channel i + D/2 (the half-split form). Source: Su et al., arXiv 2104.09864.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.models.config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling

Rotation = tuple[jax.Array, jax.Array]  # cosine and sine `[T, D/2]` float32 of the angles


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Computes the angle that one position adds to each pair of channels.

    Returns:
      `[D/2]` float32 radians, and a factor on the rotated vectors, which is 1.0 except with YaRN.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    base = rope.theta**-exponents
    factor = 1.0
    match rope.scaling:
        case None:
            scaled = base
        case LinearScaling():
            scaled = base / rope.scaling.factor
        case Llama3Scaling():
            scaled = _llama3(base, rope.scaling)
        case YarnScaling():
            scaled = _yarn(base, rope.theta, head_dim, rope.scaling)
            factor = rope.scaling.attention_factor
    return scaled.astype(np.float32), factor


def _llama3(base: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Divides frequencies with few turns, keeps those with many, with a linear ramp between."""
    turns = scaling.original_max_positions * base / (2 * math.pi)  # within the trained context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return base * (kept + (1 - kept) / scaling.factor)


def _yarn(base: np.ndarray, theta: float, head_dim: int, scaling: YarnScaling) -> np.ndarray:
    """YaRN's "NTK-by-parts" interpolation (arXiv 2309.00071, section 3.2)."""

    def channel_of(turns: float) -> float:
        # The channel that turns this often within the trained context.
        period = scaling.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(period) / (2 * math.log(theta))

    low, high = channel_of(scaling.beta_fast), channel_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return base * ((1 - ramp) + ramp / scaling.factor)


def rotation(rope: RopeConfig, head_dim: int, position: jax.Array) -> Rotation:
    """Returns cosine and sine `[T, D/2]` float32 of the angles at `position` `[T]`."""
    step, factor = frequencies(rope, head_dim)
    angle = position.astype(jnp.float32)[:, None] * step[None]
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def turn(rope: RopeConfig, x: jax.Array, by: jax.Array) -> jax.Array:
    """Rotates `[T, heads, D]` further by `[T]` positions, without the factor of the scaling.

    So no length changes, and x may have been rotated before.
    """
    cos, sin = rotation(rope, x.shape[-1], by)
    _, factor = frequencies(rope, x.shape[-1])
    return rotate(x, (cos / factor, sin / factor))


def rotate(x: jax.Array, cos_sin: Rotation) -> jax.Array:
    """Rotates `[T, heads, D]` by `[T, D/2]` angles, in float32; returns x's dtype."""
    cos, sin = (part[:, None] for part in cos_sin)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
