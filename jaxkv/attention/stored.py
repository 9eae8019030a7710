"""Pages that store K and V in another form than the model computes them in: wrappers of a layer."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxkv.attention.layer import LayerAttention, Queries
from jaxkv.attention.step import StepInputs
from jaxkv.cache import KVCache, rotate


@dataclass(frozen=True)
class RotatedLayer:
    """K and V are stored in another basis (`jaxkv.cache.rotation`).

    Attributes:
      layer: what is wrapped.
    """

    layer: LayerAttention

    def write(self, cache: KVCache, k: jax.Array, v: jax.Array, step: StepInputs) -> KVCache:
        """See `LayerAttention`."""
        return self.layer.write(cache, rotate(k), rotate(v), step)

    def read(self, cache: KVCache, queries: Queries) -> jax.Array:
        """See `LayerAttention`."""
        return rotate(self.layer.read(cache, queries.map(rotate)))


@dataclass(frozen=True)
class PaddedLayer:
    """Pages have a larger D than the model (`jaxkv.cache.platform`), padded with zeros.

    Attributes:
      layer: what is wrapped.
      head_dim: D of the pages.
    """

    layer: LayerAttention
    head_dim: int

    def write(self, cache: KVCache, k: jax.Array, v: jax.Array, step: StepInputs) -> KVCache:
        """See `LayerAttention`."""
        return self.layer.write(cache, self._pad(k), self._pad(v), step)

    def read(self, cache: KVCache, queries: Queries) -> jax.Array:
        """See `LayerAttention`."""
        out = self.layer.read(cache, queries.map(self._pad))
        return out[:, :, : queries.q.shape[2]]

    def _pad(self, x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, 0), (0, self.head_dim - x.shape[2])))
