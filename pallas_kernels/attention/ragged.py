"""The sequence and the position of each row of a ragged batch of queries."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

# Position of a row that belongs to no sequence. It is so low that the row sees no key by the same
# comparison as other rows, and subtracting a window does not overflow.
PADDING = -(2**30)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SharedPrefixes:
    """Groups of consecutive sequences that begin with the same pages.

    This is a hint: a backend may read those pages once for all sequences of a group. It changes no
    result, apart from rounding.

    Attributes:
      starts: `[R + 1]` int32, first sequence of each of R groups, ascending. Sequences from
        `starts[R]` on are in no group.
      lengths: `[R]` int32, tokens that all sequences of a group have in the pages of its first
        one; 0 for none.
    """

    starts: jax.Array
    lengths: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Ragged:
    """A batch of sequences whose queries are concatenated.

    Attributes:
      kv_lens: `[B]` int32, tokens in the cache, this step's included.
      query_starts: `[B + 1]` int32, first query row of each sequence, ascending from 0; rows from
        `query_starts[B]` on are padding.
      shared: which sequences share their first pages; None for none.
    """

    kv_lens: jax.Array
    query_starts: jax.Array
    shared: SharedPrefixes | None = None

    def rows(self, T: int) -> tuple[jax.Array, jax.Array]:
        """Returns the sequence `[T]` and position `[T]` of each row, int32.

        A padding row has some valid sequence, and position `PADDING`.
        """
        row = jnp.arange(T, dtype=jnp.int32)
        return self.place(row, owner(self.query_starts, row))

    def place(self, row: jax.Array, seq: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the sequences and positions of rows `[...]` that belong to sequences `[...]`.

        Sequences outside of the batch are replaced by valid ones; a row that is not one of its
        sequence's queries has position `PADDING`.
        """
        B = self.kv_lens.shape[0]
        valid = jnp.clip(seq, 0, B - 1)
        end = self.query_starts[valid + 1]
        position = self.kv_lens[valid] - end + row
        return valid, jnp.where((seq == valid) & (row < end), position, PADDING)


def owner(starts: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the segment that holds each index.

    Args:
      starts: `[B + 1]` int32, ascending; segment b is `[starts[b], starts[b + 1])`.
      index: `[n]` int32, not negative.

    Returns:
      `[n]` int32; B for an index from `starts[B]` on.
    """
    # The last segment that starts at or before the index, which skips empty segments before it.
    return (starts[None] <= index[:, None]).sum(axis=-1, dtype=jnp.int32) - 1
