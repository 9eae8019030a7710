"""Copies of pages and page ids from HBM, ahead of the tile and the block that are computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arith import Ref, Scalar
from pallas_kernels.attention.mosaic_tpu.plan import (
    REGISTER_ROWS,
    Column,
    Plan,
    TileScalars,
    skew,
)


class FetchScratch(NamedTuple):
    """Memory of `Fetch`.

    Attributes:
      ids: `[num_buffers * table_width]` int32, the page ids of some tiles.
      cursor: `[3]` int32: the number of blocks that earlier tiles consumed, and the tile and block
        to fetch next. It keeps its values from one tile to the next.
      keys: `[num_buffers, K, X, block_tokens + skew, lanes]`, the keys and values of some blocks;
        those of a head lie side by side.
      parameters: for pages of codes one buffer, `[num_buffers, pages_per_block, ...]`, with the
        parameters of each page as they are stored; else empty.
      ids_arrived, pages_arrived: semaphores, one per buffer.
    """

    ids: Ref
    cursor: Ref
    keys: Ref
    parameters: Sequence[Ref]
    ids_arrived: Ref
    pages_arrived: Ref

    @classmethod
    def of(cls, plan: Plan, pools: Sequence[jax.Array]) -> "FetchScratch":
        """Returns the types of the memory."""
        kv, *parameters = pools
        keys = *kv.shape[1:3], plan.block_tokens + skew(kv.dtype), plan.lanes
        return cls(
            ids=pltpu.SMEM((plan.num_buffers * plan.table_width,), jnp.int32),
            cursor=pltpu.SMEM((3,), jnp.int32),
            keys=pltpu.VMEM((plan.num_buffers, *keys), kv.dtype),
            parameters=[
                pltpu.VMEM((plan.num_buffers, plan.pages_per_block, *x.shape[1:]), x.dtype)
                for x in parameters
            ],
            ids_arrived=pltpu.SemaphoreType.DMA((plan.num_buffers,)),
            pages_arrived=pltpu.SemaphoreType.DMA((plan.num_buffers,)),
        )


@dataclass(frozen=True)
class Fetch:
    """Copies blocks of pages from HBM, `num_buffers - 1` blocks ahead of the one in use.

    Blocks are numbered over all tiles; block `number` goes to buffer `number % num_buffers`. In the
    methods, t is a tile, j a block of that tile and i a page of that block.

    Attributes:
      plan: sizes.
      tiles: scalars of all tiles.
      table: `[B * table_width]` int32, page ids in HBM.
      pools: arrays of the pages in HBM, keys and values first.
      scratch: buffers.
    """

    plan: Plan
    tiles: TileScalars[Column]
    table: Ref
    pools: Sequence[Ref]
    scratch: FetchScratch

    def begin(self) -> None:
        """Starts the first copies, before the first tile."""
        cursor = self.scratch.cursor
        cursor[0], cursor[1], cursor[2] = 0, 0, self.tiles.first[0]
        ahead = self.plan.num_buffers - 1
        for t in range(ahead):
            self.start_ids(t)
        for number in range(ahead):
            self.start_next(number)

    def start_ids(self, t: Scalar) -> None:
        """Starts the copy of the page ids of a tile's sequence."""
        pl.when(t < pl.num_programs(0))(lambda: self._ids(t).start())

    def start_next(self, number: Scalar) -> None:
        """Starts the copies of the block at the cursor, if there is one.

        Only pages that hold keys of the tile are copied.
        """
        t, j, n = self.scratch.cursor[1], self.scratch.cursor[2], self.plan.pages_per_block

        @pl.when(t < pl.num_programs(0))
        def _() -> None:
            pl.when(j == self.tiles.first[t])(lambda: self._ids(t).wait())
            low, high = self._pages(t, j)
            whole = (low == 0) & (high == n)
            pl.when(whole)(lambda: self._start(t, j, number, range(n)))

            @pl.when(jnp.logical_not(whole))
            def _() -> None:
                lax.fori_loop(low, high, lambda i, _: self._page(t, j, number, i), None)

            self.move_past(t, j)

    def start_share(self, t: Scalar, j: Scalar, number: Scalar, share: int) -> None:
        """Starts the copies of one of `num_groups` shares of a block that the tile sees whole."""
        n, groups = self.plan.pages_per_block, self.plan.num_groups
        self._start(t, j, number, range(share * n // groups, (share + 1) * n // groups))

    def _start(self, t: Scalar, j: Scalar, number: Scalar, pages: range) -> None:
        for i in pages:
            self._page(t, j, number, i)

    def move_past(self, t: Scalar, j: Scalar) -> None:
        """Moves the cursor to the block after block j of tile t."""
        is_last = j + 1 == self.tiles.last[t]
        after = jnp.where(is_last, t + 1, t)
        self.scratch.cursor[1] = after
        self.scratch.cursor[2] = jnp.where(is_last, self.tiles.first[after], j + 1)

    def wait(self, t: Scalar, j: Scalar, number: Scalar) -> Scalar:
        """Waits for a block, and zeros the keys in it that no row of the tile sees.

        Returns:
          The index of its buffer.
        """
        low, high = self._pages(t, j)
        pl.when(low < high)(lambda: self._wait(number, high - low))
        slot = self._slot(number)
        block = self.plan.block_tokens
        start = jnp.clip(self.tiles.low[t] - j * block, 0, block)
        self._blank(slot, start, jnp.clip(self.tiles.high[t] - j * block, start, block))
        return slot

    def wait_whole(self, number: Scalar) -> Scalar:
        """Waits for a block that every row sees whole; returns the index of its buffer."""
        self._wait(number, self.plan.pages_per_block)
        return self._slot(number)

    def _wait(self, number: Scalar, num_pages: Scalar) -> None:
        """Waits for `num_pages` pages of a block: a semaphore counts their bytes."""
        slot = self._slot(number)
        places = [self._keys(slot, 0, num_pages)]
        places += [buffer.at[slot, pl.ds(0, num_pages)] for buffer in self.scratch.parameters]
        for place in places:
            pltpu.make_async_copy(place, place, self.scratch.pages_arrived.at[slot]).wait()

    def _blank(self, slot: Scalar, start: Scalar, end: Scalar) -> None:
        """Zeros a block outside of its tokens [start, end): those are not seen and may be NaN, and
        0 * NaN is NaN."""
        keys, P = self.scratch.keys, jnp.int32(self.plan.page_size)

        def outside(step: Scalar, place: Callable[[Scalar], Ref], axis: int) -> None:
            def blank(i: Scalar, _: None) -> None:
                part = place(i)
                values = part[...]
                token = lax.broadcasted_iota(jnp.int32, values.shape, axis)
                token = i * step + lax.rem(token, step)  # a row has numbers of several heads
                seen = (token >= start) & (token < end)
                part[...] = jnp.where(seen, values, jnp.zeros_like(values))

            lax.fori_loop(0, lax.div(start + step - 1, step), blank, None)
            lax.fori_loop(lax.div(end, step), self.plan.block_tokens // step, blank, None)

        rows = jnp.int32(REGISTER_ROWS)
        outside(rows, lambda i: keys.at[slot, :, :, pl.ds(i * rows, REGISTER_ROWS)], 2)
        for buffer in self.scratch.parameters:
            outside(P, lambda i, buffer=buffer: buffer.at[slot, i], 1)

    def _keys(self, slot: Scalar, page: Scalar, count: Scalar) -> Ref:
        """The keys and values of `count` pages of a buffer, from a page on."""
        P = self.plan.page_size
        return self.scratch.keys.at[slot, :, :, pl.ds(page * P, count * P)]

    def _slot(self, number: Scalar) -> Scalar:
        return number & (self.plan.num_buffers - 1)

    def _pages(self, t: Scalar, j: Scalar) -> tuple[jax.Array, jax.Array]:
        """The pages [low, high) of block j that hold keys of tile t."""
        P, n = self.plan.page_size, self.plan.pages_per_block
        low = lax.div(self.tiles.low[t], jnp.int32(P)) - j * n
        high = lax.div(self.tiles.high[t] + P - 1, jnp.int32(P)) - j * n
        return jnp.maximum(low, 0), jnp.minimum(high, n)

    def _page(self, t: Scalar, j: Scalar, number: Scalar, i: Scalar) -> None:
        """Starts the copies of page i of a block."""
        slot = self._slot(number)
        index = self._slot(t) * self.plan.table_width + j * self.plan.pages_per_block + i
        page = self.scratch.ids[index]
        places = [self._keys(slot, i, 1)]
        places += [buffer.at[slot, i] for buffer in self.scratch.parameters]
        for pool, place in zip(self.pools, places, strict=True):
            arrived = self.scratch.pages_arrived.at[slot]
            pltpu.make_async_copy(pool.at[page], place, arrived).start()

    def _ids(self, t: Scalar) -> Any:
        width, slot = self.plan.table_width, self._slot(t)
        start = pl.multiple_of(self.tiles.seq[t] * width, width)
        row = self.table.at[pl.ds(start, width)]
        target = self.scratch.ids.at[pl.ds(slot * width, width)]
        return pltpu.make_async_copy(row, target, self.scratch.ids_arrived.at[slot])
