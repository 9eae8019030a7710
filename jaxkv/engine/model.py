"""What the engine asks of a model: two pure functions and a few numbers."""

from typing import Any, Protocol

import jax

from jaxkv.attention import AttentionBackend, StepInputs
from jaxkv.cache import KVCache, LayerSpec


class DecodeModel(Protocol):
    """A decoder that reads and writes the paged cache."""

    @property
    def params(self) -> Any:
        """Parameters, a pytree of device arrays."""
        ...

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
        """Longest sequence, in tokens."""
        ...

    def forward(
        self, params: Any, cache: KVCache, step: StepInputs, backend: AttentionBackend
    ) -> tuple[jax.Array, KVCache]:
        """Runs a step; pure.

        Returns:
          Hidden states `[T, E]`, and the cache with the step's K and V written.
        """
        ...

    def turn(self, layer: int, x: jax.Array, by: jax.Array) -> jax.Array:
        """Rotates `[T, heads, D]`, rotated already or not, on by `[T]` positions, as RoPE of a
        layer does but for any factor on lengths; pure. Methods that drop tokens ask for it."""
        ...

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Returns the logits `[R, V]` float32 of hidden states `[R, E]`; pure."""
        ...
