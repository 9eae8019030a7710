"""Tiles of query rows: how a ragged batch is cut for a backend that works on several rows at once.

A tile never crosses a sequence, so its rows have one page table row and positions in sequence. A
batch's tiles come in the order of its rows, those in use first.
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
      seq: `[count]` int32, the sequence; 0..B-1.
      first_row: `[count]` int32, first row.
      end_row: `[count]` int32, behind the last row.
      position: `[count]` int32, of the first row.
      low, high: `[count]` int32, keys [low, high) hold all that any row of the tile sees;
        empty for a tile that is not in use.
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
        """Cuts T rows into tiles of `tile` rows at most.

        Args:
          ragged: which rows are whose.
          T: rows, padding included.
          tile: rows of a tile.
          options: what a row sees.
          taken: `[B]` bool, the sequences whose rows are cut; None cuts all.
          most: tiles, where the caller knows of a bound.
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
        """Tiles `[start, start + size)`; those past `count` are empty."""

        def cut(x: jax.Array) -> jax.Array:
            return x.at[start + jnp.arange(size, dtype=jnp.int32)].get(mode="fill", fill_value=0)

        parts = (self.seq, self.first_row, self.end_row, self.position, self.low, self.high)
        return Tiles(size, self.num_live, self.starts, *map(cut, parts))

    def place_of(self, ragged: Ragged, T: int, tile: int) -> tuple[jax.Array, jax.Array]:
        """The tile `[T]` and the row within it `[T]` of each of T rows; some valid ones for a row
        that no tile has."""
        seq, _ = ragged.rows(T)
        place = jnp.arange(T, dtype=jnp.int32) - ragged.query_starts[seq]
        return jnp.clip(self.starts[seq] + place // tile, 0, self.count - 1), place % tile


Attend = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def attend_by_length(
    ragged: Ragged, T: int, one: Attend, many: Attend
) -> tuple[jax.Array, jax.Array]:
    """Attention of T rows where sequences of one query are another call's than longer ones.

    Args:
      ragged: which rows are whose.
      T: rows, padding included.
      one: attends for the sequences `[B]` bool that it is given, all of one query: `out [T, H, D]`
        and `lse [T, H]`, anything in other rows.
      many: the same for longer ones.
    """
    single = ragged.query_starts[1:] - ragged.query_starts[:-1] == 1
    chosen = single[ragged.rows(T)[0]]
    of_one, of_many = one(single), many(~single)
    return (
        jnp.where(chosen[:, None, None], of_one[0], of_many[0]),
        jnp.where(chosen[:, None], of_one[1], of_many[1]),
    )
