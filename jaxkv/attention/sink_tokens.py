"""A layer with a window whose queries also see the first tokens of the sequence (StreamingLLM)."""

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp

from jaxkv.attention.layer import PlainLayer, Queries, paged_attention
from jaxkv.cache import KVCache
from pallas_kernels import KeyPart, merge_partials

ALL_KEYS = 1 << 29  # more than any sequence has, and far from overflow


@dataclass(frozen=True)
class SinkTokensLayer(PlainLayer):
    """Queries see the window from their own position, and the first tokens from the position at
    which they would stand if the tokens between both did not exist.

    Attributes:
      window: number of keys that a query sees, its own included.
      sink_tokens: number of first tokens.
    """

    window: int
    sink_tokens: int

    def sink_position(self, position: jax.Array) -> jax.Array:
        """The positions from which queries at `position` `[T]` see the first tokens."""
        return jnp.minimum(position, self.sink_tokens + self.window - 1)

    def read(self, cache: KVCache, queries: Queries) -> jax.Array:
        """See `LayerAttention`.

        Raises:
          ValueError: the queries cannot be rotated to other positions.
        """
        if queries.at is None:
            raise ValueError("a layer with sink tokens needs `query_at` of update_and_attend")

        def partial(
            q: jax.Array, part: Literal["first", "recent"], window: int | None
        ) -> tuple[jax.Array, jax.Array]:
            P, first = cache.page_size, self.sink_tokens
            keys = KeyPart(part=part, page_size=P, recent=ALL_KEYS, first=first)
            options = replace(queries.options, window=window, keys=keys)
            wide = replace(queries, q=q.astype(jnp.float32), options=options)
            return paged_attention(cache.layers[self.index], group, wide)

        (group,) = cache.groups_of(self.index)
        _, position = queries.step.places()
        merged, _ = merge_partials(
            *partial(queries.at(self.sink_position(position)), "first", None),
            *partial(queries.q, "recent", self.window),
        )
        return merged.astype(queries.q.dtype)
