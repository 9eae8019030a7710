"""The decoder: one Flax NNX module for the Llama, Mistral, Qwen and Gemma families.

It takes a step's tokens and the cache, and returns hidden states and the new cache; the output
head is a call of its own, since a step needs logits of few rows. Differences between families are
fields of ModelConfig. Not here: reading weights (`jaxkv.models.loading`), sampling, batching.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxkv.attention import AttentionBackend, StepInputs, update_and_attend
from jaxkv.cache import KVCache
from jaxkv.models import rope
from jaxkv.models.config import ModelConfig
from jaxkv.models.layers import AttentionProjections, Mlp, RmsNorm, project


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm (and before one, with post_norms)."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        def norm() -> RmsNorm:
            return RmsNorm(config.width, config.rms_eps)

        self.attention_norm = norm()
        self.attention = AttentionProjections(config, dtype=dtype, rngs=rngs)
        self.attention_post_norm = norm() if config.post_norms else None
        self.mlp_norm = norm()
        self.mlp = Mlp(config, dtype=dtype, rngs=rngs)
        self.mlp_post_norm = norm() if config.post_norms else None


class Decoder(nnx.Module):
    """A decoder-only transformer with random weights; `jaxkv.models.loading` fills in real ones."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        V, E = config.vocab_size, config.width
        self.config = config
        self.embedding = nnx.Param(E**-0.5 * jax.random.normal(rngs.params(), (V, E), dtype))
        self.layers = nnx.List(
            [DecoderLayer(config, dtype=dtype, rngs=rngs) for _ in config.layers]
        )
        self.final_norm = RmsNorm(E, config.rms_eps)
        self.head = (
            None
            if config.tied_embeddings
            else nnx.Param(E**-0.5 * jax.random.normal(rngs.params(), (V, E), dtype))
        )

    def __call__(
        self, cache: KVCache, step: StepInputs, backend: AttentionBackend
    ) -> tuple[jax.Array, KVCache]:
        """Runs a step through all layers.

        Returns:
          Normed hidden states `[T, E]` in the parameters' dtype, and the cache with the step's K
          and V written.
        """
        config = self.config
        _, position = step.places()
        rotations = {
            layer.rope: rope.rotation(layer.rope, config.attention.head_dim, position)
            for layer in config.layers
        }
        x = self.embedding[...].at[step.tokens].get(mode="clip")
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
        for index, (layer, layer_config) in enumerate(zip(self.layers, config.layers, strict=True)):
            q, k, v = layer.attention.heads(layer.attention_norm(x))
            rotated, sink_q = rotations[layer_config.rope], None
            if (at := cache.sink_position(index, position)) is not None:
                turned = rope.rotation(layer_config.rope, config.attention.head_dim, at)
                sink_q = rope.rotate(q, turned)
            attended, cache = update_and_attend(
                cache,
                index,
                (rope.rotate(q, rotated), rope.rotate(k, rotated), v),
                step,
                scale=config.attention.scale,
                soft_cap=config.attention.soft_cap,
                sink_q=sink_q,
                backend=backend,
            )
            x = x + maybe(layer.attention_post_norm, layer.attention.merge(attended))
            x = x + maybe(layer.mlp_post_norm, layer.mlp(layer.mlp_norm(x)))
        return self.final_norm(x), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns the logits `[R, V]` float32 of hidden states `[R, E]`."""
        table = self.embedding if self.head is None else self.head
        logits = project(hidden, table[...]).astype(jnp.float32)
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def maybe(norm: RmsNorm | None, x: jax.Array) -> jax.Array:
    """A norm's output, or its input where there is no norm."""
    return x if norm is None else norm(x)
