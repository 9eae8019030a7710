"""The decoder without a cache, whole sequences at once: what training takes gradients of.

The same modules as `decoder`, with plain causal attention between them. Not here: serving, which
goes through the paged cache.
"""

import jax
import jax.numpy as jnp

from jaxkv.models import rope
from jaxkv.models.config import AttentionConfig
from jaxkv.models.decoder import Decoder, maybe


def dense_logits(decoder: Decoder, tokens: jax.Array) -> jax.Array:
    """Logits `[B, S, V]` float32 after each token of `[B, S]` int32."""
    config = decoder.config
    B, S = tokens.shape
    position = jnp.tile(jnp.arange(S, dtype=jnp.int32), B)
    rotations = {
        layer.rope: rope.rotation(layer.rope, config.attention.head_dim, position)
        for layer in config.layers
    }
    x = decoder.embedding[...][tokens.reshape(-1)]
    x = x * jnp.asarray(config.embedding_scale, x.dtype)
    for layer, own in zip(decoder.layers, config.layers, strict=True):
        q, k, v = layer.attention.heads(layer.attention_norm(x))
        q, k = (rope.rotate(y, rotations[own.rope]) for y in (q, k))
        q, k, v = (y.reshape(B, S, *y.shape[1:]) for y in (q, k, v))
        attended = _attend(q, k, v, own.window, config.attention)
        attended = attended.reshape(B * S, *attended.shape[2:])
        x = x + maybe(layer.attention_post_norm, layer.attention.merge(attended))
        x = x + maybe(layer.mlp_post_norm, layer.mlp(layer.mlp_norm(x)))
    return decoder.logits(decoder.final_norm(x)).reshape(B, S, -1)


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, attention: AttentionConfig
) -> jax.Array:
    """Causal attention of `[B, S, H, D]` over `[B, S, K, D]`."""
    (B, S, H, D), K = q.shape, k.shape[2]
    grouped = q.reshape(B, S, K, H // K, D)
    logits = jnp.einsum("bskgd,btkd->bkgst", grouped, k).astype(jnp.float32) * attention.scale
    if attention.soft_cap is not None:
        logits = attention.soft_cap * jnp.tanh(logits / attention.soft_cap)
    at = jnp.arange(S, dtype=jnp.int32)
    behind = at[:, None] - at[None]
    seen = (behind >= 0) & (behind < (S if window is None else window))
    weights = jax.nn.softmax(jnp.where(seen[None, None, None], logits, -jnp.inf), axis=-1)
    out = jnp.einsum("bkgst,btkd->bskgd", weights.astype(v.dtype), v)
    return out.reshape(B, S, H, D)
