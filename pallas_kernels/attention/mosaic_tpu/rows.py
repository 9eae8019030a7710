"""Copies of query rows from HBM, one tile ahead, and of results to HBM, one tile later.

In HBM, rows lie in chunks of whole registers. A tile copies only the chunks that its queries fill,
so a short sequence needs no more room than its queries; the other rows of its buffer are those of
an earlier tile.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arith import Ref, Scalar
from pallas_kernels.attention.mosaic_tpu.plan import Column, Plan, TileScalars


class RowsScratch(NamedTuple):
    """Memory of `Rows`.

    Attributes:
      q, out, lse: buffers for two tiles of each, shaped like the arrays in HBM.
      arrived, left: semaphores of the copies from HBM and to HBM, one per buffer.
    """

    q: Ref
    out: Ref
    lse: Ref
    arrived: Ref
    left: Ref

    @classmethod
    def of(
        cls, plan: Plan, q: jax.Array, out: jax.ShapeDtypeStruct, lse: jax.ShapeDtypeStruct
    ) -> "RowsScratch":
        """Returns the types of the memory."""

        def two_tiles(x: jax.Array | jax.ShapeDtypeStruct) -> Any:
            return pltpu.VMEM((2, plan.num_chunks, *x.shape[1:]), x.dtype)

        return cls(
            q=two_tiles(q),
            out=two_tiles(out),
            lse=two_tiles(lse),
            arrived=pltpu.SemaphoreType.DMA((2,)),
            left=pltpu.SemaphoreType.DMA((2,)),
        )


@dataclass(frozen=True)
class Rows:
    """The query rows and results of tile t.

    Attributes:
      plan: sizes.
      tiles: scalars of all tiles.
      t: the tile.
      q: `[chunks, groups, chunk_rows, lanes]` in HBM.
      out: `[chunks, groups, chunk_rows, out_lanes]` in HBM.
      lse: `[chunks, chunk_rows, groups]` float32 in HBM.
      scratch: buffers.
    """

    plan: Plan
    tiles: TileScalars[Column]
    t: Scalar
    q: Ref
    out: Ref
    lse: Ref
    scratch: RowsScratch

    def wait(self) -> None:
        """Waits for the tile's rows, and starts the copy of the next tile's rows."""
        pl.when(self.t == 0)(lambda: self._fetch(0).start())
        pl.when(self.t + 1 < pl.num_programs(0))(lambda: self._fetch(self.t + 1).start())
        self._fetch(self.t).wait()

    def read(self, g: int) -> jax.Array:
        """Returns the rows of a group, `[rows, lanes]`."""
        rows = self.scratch.q[self.t & 1, :, g]
        return rows.reshape(self.plan.rows, rows.shape[2])

    def make_room(self) -> None:
        """Waits until the results of tile t - 2, which had the same buffers, are in HBM."""
        pl.when(self.t >= 2)(lambda: self._wait_stored(self.t - 2))

    def write(self, g: int, out: jax.Array, lse: jax.Array) -> None:
        """Writes a group's results, `[rows, out_lanes]` and `[rows, 1]`, into the buffers."""
        slot, rows = self.t & 1, (self.plan.num_chunks, self.plan.chunk_rows)
        outs, lses = self.scratch.out, self.scratch.lse
        outs[slot, :, g] = out.astype(outs.dtype).reshape(*rows, out.shape[1])
        lses[slot, :, :, g : g + 1] = lse.reshape(*rows, 1)

    def store(self) -> None:
        """Starts the copies of all groups' results; the last tile waits for all of them."""
        for copy in self._store(self.t):
            copy.start()

        @pl.when(self.t + 1 == pl.num_programs(0))
        def _() -> None:
            pl.when(self.t > 0)(lambda: self._wait_stored(self.t - 1))
            self._wait_stored(self.t)

    def _wait_stored(self, t: Scalar) -> None:
        for copy in self._store(t):
            copy.wait()

    def _fetch(self, t: Scalar) -> Any:
        slot, (there, here) = t & 1, self._chunks(t)
        buffer = self.scratch.q.at[slot, here]
        return pltpu.make_async_copy(self.q.at[there], buffer, self.scratch.arrived.at[slot])

    def _store(self, t: Scalar) -> list[Any]:
        slot, (there, here) = t & 1, self._chunks(t)
        pairs = (self.scratch.out, self.out), (self.scratch.lse, self.lse)
        return [
            pltpu.make_async_copy(
                buffer.at[slot, here], result.at[there], self.scratch.left.at[slot]
            )
            for buffer, result in pairs
        ]

    def _chunks(self, t: Scalar) -> tuple[Any, Any]:
        """Returns where the chunks of a tile are, in HBM and in a buffer."""
        chunk, count = self.plan.chunk, self.plan.num_chunks
        if count > 1:
            count = lax.div(self.tiles.queries[t] + (chunk - 1), jnp.int32(chunk))
        return pl.ds(self.tiles.first_chunk[t], count), pl.ds(0, count)
