"""What the engine and compression ask of a model: a few numbers and four pure functions."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxkv.attention import AttentionBackend, StepInputs
from jaxkv.cache import KVCache, LayerSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerQueries:
    """The queries of one layer in a step.

    Attributes:
      q: `[T, H, D]` float32, with RoPE and the softmax's scale applied, in the model's basis.
      soft_cap: bound on the logits, or None; static.
    """

    q: jax.Array
    soft_cap: float | None = dataclasses.field(metadata=dict(static=True))


class DecodeModel(Protocol):
    """A decoder that reads and writes the paged cache.

    Attributes:
      params: parameters, a pytree of device arrays.
    """

    params: Any

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer keeps in the cache."""
        ...

    @property
    def vocab_size(self) -> int:
        """V."""
        ...

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence."""
        ...

    def forward(
        self, params: Any, cache: KVCache, step: StepInputs, backend: AttentionBackend
    ) -> tuple[jax.Array, KVCache]:
        """Runs a step; pure.

        Returns:
          Hidden states `[T, E]`, and the cache with the step's K and V written.
        """
        ...

    def queries(
        self, params: Any, cache: KVCache, step: StepInputs, backend: AttentionBackend
    ) -> tuple[LayerQueries, ...]:
        """Returns the queries of each layer in a step whose K and V are in the cache already; pure.

        Methods that score tokens by queries call it.
        """
        ...

    def turn(self, layer: int, x: jax.Array, by: jax.Array) -> jax.Array:
        """Rotates `[T, heads, D]`, rotated already or not, by `[T]` more positions, as RoPE of a
        layer does except for a factor on lengths; pure. Methods that drop tokens call it."""
        ...

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Returns the logits `[R, V]` float32 of hidden states `[R, E]`; pure."""
        ...
