"""The parts of a decoder layer, as Flax NNX modules.

Weights are `[out, in]`, as in checkpoints. Projections that read the same input are one matrix, so
that a decode step needs few products. Norm weights are always float32.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxkv.models.config import Activation, ModelConfig

# Takes `x [T, in]` and `weight [out, in]`; returns x times the transpose of the weight.
Product = Callable[[jax.Array, jax.Array], jax.Array]

# With so many rows XLA's CPU products are much faster with the weight on the left. One row is a
# matrix-vector product, and with more rows the time to pack the weight does not matter.
CPU_WEIGHT_FIRST_ROWS = range(2, 33)


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """See `Product`."""
    return jnp.einsum("ti,oi->to", x, weight)


def cpu_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """See `Product`; the same product in the order that is fast on a CPU."""
    if x.shape[0] not in CPU_WEIGHT_FIRST_ROWS:
        return product(x, weight)
    # The barriers keep XLA from turning the product around again.
    columns = jax.lax.optimization_barrier(x.T)
    return jax.lax.optimization_barrier(weight @ columns).T


def platform_product() -> Product:
    """The fastest product on this platform; modules choose it when they are made."""
    return cpu_product if jax.default_backend() == "cpu" else product


class Linear(nnx.Module):
    """An affine map over the last axis."""

    def __init__(self, shape: tuple[int, int], *, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        out_features, in_features = shape
        scale = in_features**-0.5
        self.weight = nnx.Param(scale * jax.random.normal(rngs.params(), shape, dtype))
        self.bias = nnx.Param(jnp.zeros(out_features, dtype)) if bias else None
        self.product = platform_product()

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.product(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...][None]


class RmsNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, epsilon: float):
        self.weight = nnx.Param(jnp.ones(size, jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        weight = jnp.expand_dims(self.weight[...], range(x.ndim - 1))
        return (wide * scale * weight).astype(x.dtype)


class Mlp(nnx.Module):
    """Gated MLP: `down(activation(gate(x)) * up(x))`; gate and up are one matrix `[2F, E]`."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        E, F = config.width, config.mlp_width
        self.gate_up = Linear((2 * F, E), bias=False, dtype=dtype, rngs=rngs)
        self.down = Linear((E, F), bias=False, dtype=dtype, rngs=rngs)
        self.activation: Activation = config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        if self.activation == "silu":
            return self.down(jax.nn.silu(gate) * up)
        return self.down(jax.nn.gelu(gate, approximate=True) * up)


class AttentionProjections(nnx.Module):
    """The projections of attention: q, k and v (one matrix `[(H + 2K) D, E]`), norms, output."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        attention = config.attention
        H, K, D = attention.num_heads, attention.num_kv_heads, attention.head_dim
        self.head_counts = (H, K, K)
        shape = ((H + 2 * K) * D, config.width)
        self.qkv = Linear(shape, bias=attention.qkv_bias, dtype=dtype, rngs=rngs)
        self.out = Linear((config.width, H * D), bias=False, dtype=dtype, rngs=rngs)
        self.q_norm = RmsNorm(D, config.rms_eps) if attention.qk_norm else None
        self.k_norm = RmsNorm(D, config.rms_eps) if attention.qk_norm else None

    def heads(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Projects `[T, E]` to q `[T, H, D]`, k and v `[T, K, D]`, with norms, without RoPE."""
        H, K, _ = self.head_counts
        heads = self.qkv(x).reshape(x.shape[0], sum(self.head_counts), -1)
        q, k, v = jnp.split(heads, (H, H + K), axis=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def merge(self, attended: jax.Array) -> jax.Array:
        """Projects `[T, H, D]` back to `[T, E]`."""
        return self.out(attended.reshape(attended.shape[0], -1))
