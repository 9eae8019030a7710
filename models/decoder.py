"""The decoder: one Flax NNX module for the Llama, Mistral, Qwen and Gemma families.

It takes tokens, their positions and an attention function, and returns hidden states. The attention
function decides where K and V are kept: in the paged cache (`decode_model`) or not at all
(`dense`). The output head is a separate call, since a step needs the logits of few rows. The
differences between families are fields of ModelConfig.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxkv.attention import QueryAt
from jaxkv.models import rope
from jaxkv.models.config import LayerConfig, ModelConfig
from jaxkv.models.layers import AttentionProjections, Mlp, RmsNorm, platform_product


class Heads(NamedTuple):
    """What a layer passes to the attention function.

    Attributes:
      q: `[T, H, D]`, rotated.
      k: `[T, K, D]`, rotated.
      v: `[T, K, D]`.
      query_at: returns q rotated to other positions `[T]`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    query_at: QueryAt


# Takes a state, the index of a layer and its heads; returns `[T, H, D]` and the new state.
type Attend[S] = Callable[[S, int, Heads], tuple[jax.Array, S]]


class DecoderLayer(nnx.Module):
    """Attention and MLP. Each has a norm before it and, with post_norms, one after it."""

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        def norm() -> RmsNorm:
            return RmsNorm(config.width, config.rms_eps)

        self.rope = layer.rope
        self.attention_norm = norm()
        self.attention = AttentionProjections(config, dtype=dtype, rngs=rngs)
        self.attention_post_norm = norm() if config.post_norms else None
        self.mlp_norm = norm()
        self.mlp = Mlp(config, dtype=dtype, rngs=rngs)
        self.mlp_post_norm = norm() if config.post_norms else None

    def __call__[S](
        self,
        x: jax.Array,
        rotation: rope.Rotation,
        attend: Callable[[Heads], tuple[jax.Array, S]],
    ) -> tuple[jax.Array, S]:
        """Runs the layer.

        Args:
          x: `[T, E]`.
          rotation: rotation of each row, by its position.
          attend: the attention function.

        Returns:
          `[T, E]`, and the state that `attend` returns.
        """
        q, k, v = self.attention.heads(self.attention_norm(x))

        def query_at(position: jax.Array) -> jax.Array:
            return rope.rotate(q, rope.rotation(self.rope, q.shape[-1], position))

        heads = Heads(rope.rotate(q, rotation), rope.rotate(k, rotation), v, query_at)
        attended, state = attend(heads)
        x = x + maybe(self.attention_post_norm, self.attention.merge(attended))
        x = x + maybe(self.mlp_post_norm, self.mlp(self.mlp_norm(x)))
        return x, state


class Decoder(nnx.Module):
    """A decoder-only transformer with random weights; `jaxkv.models.loading` fills in real ones."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        V, E = config.vocab_size, config.width
        self.config = config
        self.embedding = nnx.Param(E**-0.5 * jax.random.normal(rngs.params(), (V, E), dtype))
        self.layers = nnx.List(
            [DecoderLayer(config, layer, dtype=dtype, rngs=rngs) for layer in config.layers]
        )
        self.final_norm = RmsNorm(E, config.rms_eps)
        self.head = (
            None
            if config.tied_embeddings
            else nnx.Param(E**-0.5 * jax.random.normal(rngs.params(), (V, E), dtype))
        )
        self.product = platform_product()

    def __call__[S](
        self, tokens: jax.Array, position: jax.Array, attend: Attend[S], state: S
    ) -> tuple[jax.Array, S]:
        """Runs tokens through all layers.

        Args:
          tokens: `[T]` int32.
          position: `[T]` int32.
          attend: the attention function, called once per layer.
          state: what `attend` gets in the first layer; each further layer gets what it returned.

        Returns:
          Normed hidden states `[T, E]` in the parameters' dtype, and the last state.
        """
        config = self.config
        rotations = {
            layer.rope: rope.rotation(layer.rope, config.attention.head_dim, position)
            for layer in config.layers
        }
        x = self.embedding[...].at[tokens].get(mode="clip")
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
        for index, layer in enumerate(self.layers):
            x, state = layer(x, rotations[layer.rope], partial(attend, state, index))
        return self.final_norm(x), state

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns the logits `[R, V]` float32 of hidden states `[R, E]`."""
        table = self.embedding if self.head is None else self.head
        logits = self.product(hidden, table[...]).astype(jnp.float32)
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def maybe(norm: RmsNorm | None, x: jax.Array) -> jax.Array:
    """Returns the norm of x, or x if there is no norm."""
    return x if norm is None else norm(x)
