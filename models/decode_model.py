"""A decoder as the engine takes it: pure functions over parameters, a cache and a step.

Structurally a `jaxkv.engine.DecodeModel`; nothing here imports the engine.
"""

from dataclasses import dataclass

import jax
from flax import nnx

from jaxkv.attention import AttentionBackend, StepInputs
from jaxkv.cache import KVCache, LayerSpec
from models.config import ModelConfig


@dataclass(frozen=True, eq=False)
class FlaxDecodeModel:
    """A Flax NNX decoder, split into structure and parameters.

    Attributes:
      config: what it computes.
      graphdef: structure of the module.
      params: its parameters, a pytree.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef
    params: nnx.State

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer keeps in the cache."""
        attention = self.config.attention
        return tuple(
            LayerSpec(
                kv_heads=attention.num_kv_heads, head_dim=attention.head_dim, window=layer.window
            )
            for layer in self.config.layers
        )

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        """Longest sequence, in tokens."""
        return self.config.max_positions

    def forward(
        self, params: nnx.State, cache: KVCache, step: StepInputs, backend: AttentionBackend
    ) -> tuple[jax.Array, KVCache]:
        """Hidden states `[T, E]` of a step, and the cache with its K and V."""
        return nnx.merge(self.graphdef, params)(cache, step, backend)

    def logits(self, params: nnx.State, hidden: jax.Array) -> jax.Array:
        """Logits `[R, V]` float32 of hidden states `[R, E]`."""
        return nnx.merge(self.graphdef, params).logits(hidden)
