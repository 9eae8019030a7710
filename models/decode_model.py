"""A decoder as the engine takes it: pure functions over parameters, a cache and a step."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.attention import AttentionBackend, StepInputs, attend, update_and_attend
from jaxkv.cache import KVCache, LayerSpec
from jaxkv.model import DecodeModel, LayerQueries
from jaxkv.models import rope
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder, Heads

ParamPath = tuple[str | int, ...]
Params = tuple[jax.Array, ...]


@dataclass(frozen=True, eq=False)
class FlaxDecodeModel(DecodeModel):
    """A Flax NNX decoder, split into structure and parameters.

    Attributes:
      config: config of the decoder.
      graphdef: the structure of the module.
      paths: path of each parameter in the module.
      params: the parameters, as a flat tuple. jit would walk an `nnx.State` in Python at every
        step, which takes 0.7 ms for 182 parameters; a tuple takes 0.02 ms.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef
    paths: tuple[ParamPath, ...]
    params: tuple[jax.Array, ...]

    @classmethod
    def from_named(
        cls, config: ModelConfig, graphdef: nnx.GraphDef, named: Mapping[ParamPath, jax.Array]
    ) -> "FlaxDecodeModel":
        """Returns a decoder of `config` with the parameters of `named`, which has them by path."""
        return cls(config, graphdef, tuple(named), tuple(named.values()))

    @property
    def named_params(self) -> dict[ParamPath, jax.Array]:
        """The parameters by path."""
        return dict(zip(self.paths, self.params, strict=True))

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
        """V, the number of tokens in the vocabulary."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        """Length of the longest sequence, in tokens."""
        return self.config.max_positions

    def forward(
        self, params: Params, cache: KVCache, step: StepInputs, backend: AttentionBackend
    ) -> tuple[jax.Array, KVCache]:
        """See `DecodeModel`."""
        attention = self.config.attention

        def write_and_read(cache: KVCache, layer: int, heads: Heads) -> tuple[jax.Array, KVCache]:
            return update_and_attend(
                cache,
                layer,
                (heads.q, heads.k, heads.v),
                step,
                scale=attention.scale,
                soft_cap=attention.soft_cap,
                query_at=heads.query_at,
                backend=backend,
            )

        _, position = step.places()
        return self.decoder(params)(step.tokens, position, write_and_read, cache)

    def queries(
        self, params: Params, cache: KVCache, step: StepInputs, backend: AttentionBackend
    ) -> tuple[LayerQueries, ...]:
        """See `DecodeModel`."""
        scale, soft_cap = self.config.attention.scale, self.config.attention.soft_cap

        def record(
            found: tuple[LayerQueries, ...], layer: int, heads: Heads
        ) -> tuple[jax.Array, tuple[LayerQueries, ...]]:
            out = attend(
                cache,
                layer,
                heads.q,
                step,
                scale=scale,
                soft_cap=soft_cap,
                query_at=heads.query_at,
                backend=backend,
            )
            q = heads.q.astype(jnp.float32) * scale
            return out, (*found, LayerQueries(q=q, soft_cap=soft_cap))

        _, position = step.places()
        _, found = self.decoder(params)(step.tokens, position, record, ())
        return found

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Returns the logits `[R, V]` float32 of hidden states `[R, E]`."""
        return self.decoder(params).logits(hidden)

    def turn(self, layer: int, x: jax.Array, by: jax.Array) -> jax.Array:
        """Rotates `[T, heads, D]` further by `[T]` positions, with the layer's RoPE."""
        return rope.turn(self.config.layers[layer].rope, x, by)

    def decoder(self, params: Params) -> Decoder:
        """Returns the module with these parameters; under jit it is made only while tracing."""
        state = nnx.from_flat_state(
            [(path, nnx.Param(value)) for path, value in zip(self.paths, params, strict=True)]
        )
        return nnx.merge(self.graphdef, state)
