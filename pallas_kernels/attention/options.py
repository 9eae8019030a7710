"""The static options of an attention call."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class KeyPart:
    """One of three parts of the keys that a query sees, for keys that are kept in two forms.

    The parts of a query at position p are disjoint and make up all its keys. `merge_partials` joins
    their results.

        first     [0, first)
        middle    [first, cut)     cut = max(first, (p - recent + 1) // page_size * page_size)
        recent    [cut, p]

    Attributes:
      part: which of the three.
      page_size: P; `cut` lies between two pages.
      recent: the least number of keys of the last part, the query's own included. With 1 the part
        begins with the query's own page.
      first: number of keys of the first part, a multiple of P.
    """

    part: Literal["first", "middle", "recent"]
    page_size: int
    recent: int = 1
    first: int = 0

    def bounds(self, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the part's keys [low, high) for queries at `position`; high may exceed it."""
        zero = jnp.zeros_like(position)
        if self.part == "first":
            return zero, zero + self.first
        cut = (position - self.recent + 1) // self.page_size * self.page_size
        cut = jnp.maximum(cut, self.first)
        return (zero + self.first, cut) if self.part == "middle" else (cut, position + 1)


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The options of a call, which are static; see `api.ragged_paged_attention`.

    Attributes:
      scale: factor of q.k.
      window: number of keys that a query sees, its own included; None for all.
      soft_cap: bound on the logits; None for no bound.
      query_tile: rows that a backend computes together; None to choose by T and B.
      keys: the part of the keys that is seen; None for all.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    query_tile: int | None = None
    keys: KeyPart | None = None

    def bounds(self, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the keys [low, high) that queries at `position [...]` see.

        If high <= low, they see none. Both bounds grow with the position, or stay.
        """
        low, high = jnp.zeros_like(position), position + 1
        if self.window is not None:
            low = jnp.maximum(low, position - self.window + 1)
        if self.keys is not None:
            first, end = self.keys.bounds(position)
            low, high = jnp.maximum(low, first), jnp.minimum(high, end)
        return low, high
