"""Tiles of query rows, for backends that compute several rows at once.

All rows of a tile are of one sequence, so they share a row of the page table and have consecutive
positions. The tiles of a batch are in the order of its rows; those in use come first.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.arith import ceil_div
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.ragged import Ragged, owner


@dataclass(frozen=True)
class Tiles:
    """Tiles of query rows, or a group of them.

    Attributes:
      count: static number of tiles.
      num_live: int32 scalar, tiles in use; they come first.
      starts: `[B + 1]` int32, first tile of each sequence.
      seq: `[count]` int32, the sequence, 0 to B - 1.
      first_row: `[count]` int32, first row.
      end_row: `[count]` int32, the row after the last one.
      position: `[count]` int32, position of the first row.
      low, high: `[count]` int32; the keys [low, high) include all that any row of the tile sees.
        They are empty for a tile that is not in use.
    """

    count: int
    num_live: jax.Array
    starts: jax.Array
    seq: jax.Array
    first_row: jax.Array
    end_row: jax.Array
    position: jax.Array
    low: jax.Array
    high: jax.Array

    @classmethod
    def plan(
        cls,
        ragged: Ragged,
        T: int,
        tile: int,
        options: AttentionOptions,
        taken: jax.Array | None = None,
        most: int | None = None,
    ) -> "Tiles":
        """Cuts T rows into tiles of at most `tile` rows.

        Args:
          ragged: which rows belong to which sequence.
          T: rows, padding included.
          tile: rows of a tile.
          options: which keys a row sees.
          taken: `[B]` bool, the sequences whose rows are cut; None for all.
          most: an upper bound on the number of tiles, if the caller knows one.
        """
        B = ragged.kv_lens.shape[0]
        count = T if tile == 1 else min(T, T // tile + B)
        count = count if most is None else min(count, most)
        query_lens = ragged.query_starts[1:] - ragged.query_starts[:-1]
        if taken is not None:
            query_lens = jnp.where(taken, query_lens, 0)
        ends = jnp.cumsum(ceil_div(query_lens, tile), dtype=jnp.int32)
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
        index = jnp.arange(count, dtype=jnp.int32)
        seq = owner(starts, index)
        live = seq < B
        seq = jnp.minimum(seq, B - 1)
        first_row = ragged.query_starts[seq] + (index - starts[seq]) * tile
        end_row = jnp.minimum(first_row + tile, ragged.query_starts[seq + 1])
        offset = ragged.kv_lens[seq] - ragged.query_starts[seq + 1]  # position minus row
        high = jnp.where(live, jnp.maximum(options.bounds(offset + end_row - 1)[1], 0), 0)
        position = offset + first_row
        low = jnp.minimum(options.bounds(position)[0], high)
        return cls(count, starts[-1], starts, seq, first_row, end_row, position, low, high)

    def group(self, start: jax.Array | int, size: int) -> "Tiles":
        """Returns the tiles [start, start + size); those from `count` on are empty."""

        def cut(x: jax.Array) -> jax.Array:
            return x.at[start + jnp.arange(size, dtype=jnp.int32)].get(mode="fill", fill_value=0)

        parts = (self.seq, self.first_row, self.end_row, self.position, self.low, self.high)
        return Tiles(size, self.num_live, self.starts, *map(cut, parts))

    def place_of(self, ragged: Ragged, T: int, tile: int) -> tuple[jax.Array, jax.Array]:
        """Returns the tile `[T]` of each row, and the index of the row within the tile `[T]`.

        For a row that is in no tile both are valid, but arbitrary.
        """
        seq, _ = ragged.rows(T)
        place = jnp.arange(T, dtype=jnp.int32) - ragged.query_starts[seq]
        return jnp.clip(self.starts[seq] + place // tile, 0, self.count - 1), place % tile


Attend = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def attend_by_length(
    ragged: Ragged, T: int, one: Attend, many: Attend
) -> tuple[jax.Array, jax.Array]:
    """Computes sequences of one query in one call, and longer ones in another.

    Args:
      ragged: which rows belong to which sequence.
      T: rows, padding included.
      one: computes the rows of the sequences `[B]` bool that it is given, each of one query. It
        returns `out [T, H, D]` and `lse [T, H]`, with anything in other rows.
      many: does the same for longer sequences.

    Returns:
      `(out [T, H, D], lse [T, H])`.
    """
    single = ragged.query_starts[1:] - ragged.query_starts[:-1] == 1
    chosen = single[ragged.rows(T)[0]]
    of_one, of_many = one(single), many(~single)
    return (
        jnp.where(chosen[:, None, None], of_one[0], of_many[0]),
        jnp.where(chosen[:, None], of_one[1], of_many[1]),
    )
