"""Which sequence and which position each row of a ragged batch of queries has.

For the backends written in plain `jax.numpy`; a kernel does the same on scalars.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

# A row that belongs to no sequence. Far below zero, and far from overflow when a window is
# subtracted, so that it sees no key by the same comparison that every other row makes.
PADDING = -(2**30)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SharedPrefixes:
    """Which sequences that follow one another begin with the same pages.

    A hint that changes no result: a backend may read those pages once for all of them.

    Attributes:
      starts: `[R + 1]` int32, first sequence of each of R groups, ascending; sequences from
        `starts[R]` on are in none.
      lengths: `[R]` int32, tokens that all sequences of a group have in the pages of its first one;
        0 for none.
    """

    starts: jax.Array
    lengths: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Ragged:
    """A batch of sequences, their queries concatenated.

    Attributes:
      kv_lens: `[B]` int32, tokens in the cache, this step's included.
      query_starts: `[B + 1]` int32, first query row of each sequence, ascending from 0; rows from
        `query_starts[B]` on are padding.
      shared: what sequences have in common; None for nothing.
    """

    kv_lens: jax.Array
    query_starts: jax.Array
    shared: SharedPrefixes | None = None

    def rows(self, T: int) -> tuple[jax.Array, jax.Array]:
        """Sequence `[T]` and position `[T]` of each of `T` rows, int32.

        A padding row has some valid sequence and position `PADDING`.
        """
        row = jnp.arange(T, dtype=jnp.int32)
        return self.place(row, owner(self.query_starts, row))

    def place(self, row: jax.Array, seq: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Sequence (made valid) and position of rows `[...]` that `seq [...]` may own.

        A row at or past the end of its sequence's queries has position `PADDING`.
        """
        B = self.kv_lens.shape[0]
        valid = jnp.clip(seq, 0, B - 1)
        end = self.query_starts[valid + 1]
        position = self.kv_lens[valid] - end + row
        return valid, jnp.where((seq == valid) & (row < end), position, PADDING)


def owner(starts: jax.Array, index: jax.Array) -> jax.Array:
    """Which segment holds each index.

    Args:
      starts: `[B + 1]` int32, ascending; segment b is `[starts[b], starts[b + 1])`.
      index: `[n]` int32, not negative.

    Returns:
      `[n]` int32; B for an index at or past `starts[B]`.
    """
    # The last segment that starts at or before the index: empty ones before it are passed over.
    return (starts[None] <= index[:, None]).sum(axis=-1, dtype=jnp.int32) - 1
