"""The static choices of one attention call, checked once and handed to the backend whole."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class KeyPart:
    """A part of the keys that a query sees, for keys that are kept in two forms.

    The query at position p has three parts, which make up all its keys; merge their results:

        first     [0, first)
        middle    [first, cut)     cut = max(first, (p - recent + 1) // page_size * page_size)
        recent    [cut, p]

    Attributes:
      part: which of the three.
      page_size: P; `cut` falls between pages.
      recent: keys, the query's own included, that the last part has at least; 1 begins it with the
        query's own page.
      first: keys of the first part, whole pages.
    """

    part: Literal["first", "middle", "recent"]
    page_size: int
    recent: int = 1
    first: int = 0

    def bounds(self, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The part's keys `[low, high)` for queries at `position [...]`; high may be past p."""
        zero = jnp.zeros_like(position)
        if self.part == "first":
            return zero, zero + self.first
        cut = (position - self.recent + 1) // self.page_size * self.page_size
        cut = jnp.maximum(cut, self.first)
        return (zero + self.first, cut) if self.part == "middle" else (cut, position + 1)


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What a call computes and how, apart from its arrays; see `api.ragged_paged_attention`.

    Attributes:
      scale: factor on q.k.
      window: keys a query sees, itself included; None sees all.
      soft_cap: bound on the logits; None leaves them.
      query_tile: rows that a backend works on together; None picks by T and B.
      keys: the part of the keys that is seen; None sees all.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    query_tile: int | None = None
    keys: KeyPart | None = None

    def bounds(self, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys `[low, high)` that a query at `position [...]` sees, none where high <= low; neither
        falls as positions rise."""
        low, high = jnp.zeros_like(position), position + 1
        if self.window is not None:
            low = jnp.maximum(low, position - self.window + 1)
        if self.keys is not None:
            first, end = self.keys.bounds(position)
            low, high = jnp.maximum(low, first), jnp.minimum(high, end)
        return low, high
