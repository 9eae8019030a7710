"""Query rows on their way from HBM, a tile ahead, and what they get on its way back, a tile behind.

Rows lie there in chunks of whole registers. A tile takes as many as its queries need, so that a
short sequence takes no more room than its queries; what is left of the tile is some earlier one's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.mosaic_tpu.fetch import TileScalars
from pallas_kernels.attention.mosaic_tpu.plan import Plan, Ref, Scalar


@dataclass(frozen=True)
class Rows:
    """The rows of tile t.

    Attributes:
      q: `[chunks, groups, chunk_rows, lanes]` in HBM.
      results: out, like q, and lse `[chunks, chunk_rows, groups]`, in HBM.
      q_buffer, buffers: two tiles of each.
      arrived, left: semaphores of the tiles that come and go.
    """

    plan: Plan
    tile: TileScalars
    t: Scalar
    q: Ref
    results: Sequence[Ref]
    q_buffer: Ref
    buffers: Sequence[Ref]
    arrived: Ref
    left: Ref

    @staticmethod
    def scratch(plan: Plan, q: jax.Array, *results: jax.ShapeDtypeStruct) -> list[Any]:
        """Of the last four attributes."""
        q_buffer, *buffers = (
            pltpu.VMEM((2, plan.num_chunks, *x.shape[1:]), x.dtype) for x in (q, *results)
        )
        return [q_buffer, buffers, pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA((2,))]

    def wait(self) -> None:
        """Waits for the tile's rows; starts those of the next one."""
        pl.when(self.t == 0)(lambda: self._fetch(0).start())
        pl.when(self.t + 1 < pl.num_programs(0))(lambda: self._fetch(self.t + 1).start())
        self._fetch(self.t).wait()

    def read(self, g: int) -> jax.Array:
        """The rows of a group, `[R, lanes]`."""
        rows = self.q_buffer[self.t & 1, :, g]
        return rows.reshape(self.plan.rows, rows.shape[2])

    def make_room(self) -> None:
        """Waits for the results of the tile whose buffers this one's take."""
        pl.when(self.t >= 2)(lambda: self._wait_stored(self.t - 2))

    def write(self, g: int, out: jax.Array, lse: jax.Array) -> None:
        """Sets a group's results, `[R, out_lanes]` and `[R, 1]`."""
        slot, rows = self.t & 1, (self.plan.num_chunks, self.plan.chunk_rows)
        outs, lses = self.buffers
        outs[slot, :, g] = out.astype(outs.dtype).reshape(*rows, out.shape[1])
        lses[slot, :, :, g : g + 1] = lse.reshape(*rows, 1)

    def store(self) -> None:
        """Starts the results of all groups; the last tile waits for what is on its way."""
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
        buffer = self.q_buffer.at[slot, here]
        return pltpu.make_async_copy(self.q.at[there], buffer, self.arrived.at[slot])

    def _store(self, t: Scalar) -> list[Any]:
        slot, (there, here) = t & 1, self._chunks(t)
        return [
            pltpu.make_async_copy(buffer.at[slot, here], result.at[there], self.left.at[slot])
            for buffer, result in zip(self.buffers, self.results, strict=True)
        ]

    def _chunks(self, t: Scalar) -> tuple[Any, Any]:
        """Where the chunks of a tile are, in HBM and in a buffer."""
        chunk, count = self.plan.chunk, self.plan.num_chunks
        if count > 1:
            count = lax.div(self.tile.queries(t) + (chunk - 1), jnp.int32(chunk))
        return pl.ds(self.tile.first_chunk(t), count), pl.ds(0, count)
