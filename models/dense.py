"""The decoder without a cache, whole sequences at once: training takes gradients of it."""

import jax
import jax.numpy as jnp

from jaxkv.models.decoder import Decoder, Heads


def dense_logits(decoder: Decoder, tokens: jax.Array) -> jax.Array:
    """Logits `[B, S, V]` float32 after each token of `[B, S]` int32."""
    config = decoder.config
    B, S = tokens.shape

    def attend(_: None, layer: int, heads: Heads) -> tuple[jax.Array, None]:
        q, k, v = (x.reshape(B, S, *x.shape[1:]) for x in (heads.q, heads.k, heads.v))
        window, attention = config.layers[layer].window, config.attention
        out = causal_attention(q, k, v, window, attention.scale, attention.soft_cap)
        return out.reshape(B * S, *out.shape[2:]), None

    position = jnp.tile(jnp.arange(S, dtype=jnp.int32), B)
    hidden, _ = decoder(tokens.reshape(-1), position, attend, None)
    return decoder.logits(hidden).reshape(B, S, -1)


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: int | None,
    scale: float,
    soft_cap: float | None,
) -> jax.Array:
    """Causal attention of `[B, S, H, D]` over `[B, S, K, D]`."""
    (B, S, H, D), K = q.shape, k.shape[2]
    grouped = q.reshape(B, S, K, H // K, D)
    logits = jnp.einsum("bskgd,btkd->bkgst", grouped, k).astype(jnp.float32) * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    position = jnp.arange(S, dtype=jnp.int32)
    distance = position[:, None] - position[None]
    seen = (distance >= 0) & (distance < (S if window is None else window))
    weights = jax.nn.softmax(jnp.where(seen[None, None, None], logits, -jnp.inf), axis=-1)
    out = jnp.einsum("bkgst,btkd->bskgd", weights.astype(v.dtype), v)
    return out.reshape(B, S, H, D)
