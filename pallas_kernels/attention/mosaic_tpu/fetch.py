"""Pages and page ids on their way from HBM, ahead of the tile and the block that are worked on."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.mosaic_tpu.plan import FIELDS, REGISTER_ROWS, Plan, Ref, Scalar, skew


@dataclass(frozen=True)
class TileScalars:
    """What `call` says of tile t; blocks [first, last) hold all its keys, [low, high)."""

    ref: Ref
    count: int

    def _read(self, name: str, t: Scalar) -> jax.Array:
        return self.ref[FIELDS.index(name) * (self.count + 1) + t]

    def __getattr__(self, name: str) -> Callable[[Scalar], jax.Array]:
        return functools.partial(self._read, name)


@dataclass(frozen=True)
class Fetch:
    """Blocks of pages on their way from HBM, `num_buffers - 1` ahead of the one in work.

    Blocks are numbered over all tiles, and number k goes to buffer `k % num_buffers`. The cursor
    outlives a grid step: number of blocks consumed before this tile, then tile and block to fetch
    next.

    Buffers hold a block's keys, those of a head side by side, `[num_buffers, K, X, block_tokens
    and some, L]`; and, of codes, the parameters of its pages as they are.
    """

    plan: Plan
    tile: TileScalars
    table: Ref
    pools: Sequence[Ref]
    ids: Ref
    cursor: Ref
    buffers: Sequence[Ref]
    ids_arrived: Ref
    pages_arrived: Ref

    @staticmethod
    def scratch(plan: Plan, pools: Sequence[jax.Array]) -> list[Any]:
        """Of the last five attributes."""
        kv, *parameters = pools
        blocks = [(*kv.shape[1:3], plan.block_tokens + skew(kv.dtype), plan.lanes)]
        blocks += [(plan.pages_per_block, *x.shape[1:]) for x in parameters]
        return [
            pltpu.SMEM((plan.num_buffers * plan.table_width,), jnp.int32),
            pltpu.SMEM((3,), jnp.int32),
            [
                pltpu.VMEM((plan.num_buffers, *block), pool.dtype)
                for block, pool in zip(blocks, pools, strict=True)
            ],
            pltpu.SemaphoreType.DMA((plan.num_buffers,)),
            pltpu.SemaphoreType.DMA((plan.num_buffers,)),
        ]

    def begin(self) -> None:
        """Before the first tile."""
        self.cursor[0], self.cursor[1], self.cursor[2] = 0, 0, self.tile.first(0)
        ahead = self.plan.num_buffers - 1
        for t in range(ahead):
            self.start_ids(t)
        for k in range(ahead):
            self.start_next(k)

    def start_ids(self, t: Scalar) -> None:
        """Starts the page ids of a tile's sequence."""
        pl.when(t < pl.num_programs(0))(lambda: self._ids(t).start())

    def start_next(self, k: Scalar) -> None:
        """Starts the block at the cursor, number k, if there is one; whatever of it is there."""
        t, j, n = self.cursor[1], self.cursor[2], self.plan.pages_per_block

        @pl.when(t < pl.num_programs(0))
        def _() -> None:
            pl.when(j == self.tile.first(t))(lambda: self._ids(t).wait())
            low, high = self._pages(t, j)
            whole = (low == 0) & (high == n)
            pl.when(whole)(lambda: self._start(t, j, k, range(n)))

            @pl.when(jnp.logical_not(whole))
            def _() -> None:
                lax.fori_loop(low, high, lambda i, _: self._page(t, j, k, i), None)

            self.move_behind(t, j)

    def start_share(self, t: Scalar, j: Scalar, k: Scalar, share: int) -> None:
        """Starts a group's share of block j of tile t, number k, all of whose pages are there."""
        n, groups = self.plan.pages_per_block, self.plan.num_groups
        self._start(t, j, k, range(share * n // groups, (share + 1) * n // groups))

    def _start(self, t: Scalar, j: Scalar, k: Scalar, pages: range) -> None:
        for i in pages:
            self._page(t, j, k, i)

    def move_behind(self, t: Scalar, j: Scalar) -> None:
        """Moves the cursor to the block after block j of tile t."""
        is_last = j + 1 == self.tile.last(t)
        after = jnp.where(is_last, t + 1, t)
        self.cursor[1] = after
        self.cursor[2] = jnp.where(is_last, self.tile.first(after), j + 1)

    def wait(self, t: Scalar, j: Scalar, k: Scalar) -> Scalar:
        """Waits for block j of tile t, number k, and blanks what no row sees of it.

        Returns:
          The number of its buffer.
        """
        low, high = self._pages(t, j)
        pl.when(low < high)(lambda: self._wait(k, high - low))
        slot = self._slot(k)
        S = self.plan.block_tokens
        start = jnp.clip(self.tile.low(t) - j * S, 0, S)
        self._blank(slot, start, jnp.clip(self.tile.high(t) - j * S, start, S))
        return slot

    def wait_whole(self, k: Scalar) -> Scalar:
        """Waits for block number k, of which every row sees all; returns its buffer's number."""
        self._wait(k, self.plan.pages_per_block)
        return self._slot(k)

    def _wait(self, k: Scalar, num_pages: Scalar) -> None:
        """Waits for so many pages of block number k: it is their bytes that count."""
        slot = self._slot(k)
        keys, *parameters = self.buffers
        places = [self._keys(keys, slot, 0, num_pages)]
        places += [numbers.at[slot, pl.ds(0, num_pages)] for numbers in parameters]
        for place in places:
            pltpu.make_async_copy(place, place, self.pages_arrived.at[slot]).wait()

    def _blank(self, slot: Scalar, start: Scalar, end: Scalar) -> None:
        """Zeros what is outside of the tokens [start, end) of a block: it is not seen and may be
        NaN, and 0 * NaN is NaN."""
        (keys, *parameters), P = self.buffers, jnp.int32(self.plan.page_size)

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
        for numbers in parameters:
            outside(P, lambda i, numbers=numbers: numbers.at[slot, i], 1)

    def _keys(self, buffer: Ref, slot: Scalar, page: Scalar, count: Scalar) -> Ref:
        """The keys of so many pages of a block."""
        P = self.plan.page_size
        return buffer.at[slot, :, :, pl.ds(page * P, count * P)]

    def _slot(self, number: Scalar) -> Scalar:
        return number & (self.plan.num_buffers - 1)

    def _pages(self, t: Scalar, j: Scalar) -> tuple[jax.Array, jax.Array]:
        """The pages [low, high) of block j that hold keys of tile t."""
        P, n = self.plan.page_size, self.plan.pages_per_block
        low = lax.div(self.tile.low(t), jnp.int32(P)) - j * n
        high = lax.div(self.tile.high(t) + P - 1, jnp.int32(P)) - j * n
        return jnp.maximum(low, 0), jnp.minimum(high, n)

    def _page(self, t: Scalar, j: Scalar, k: Scalar, i: Scalar) -> None:
        """Starts page i of block j of tile t, number k."""
        slot = self._slot(k)
        index = self._slot(t) * self.plan.table_width + j * self.plan.pages_per_block + i
        page, (keys, *parameters) = self.ids[index], self.buffers
        places = [self._keys(keys, slot, i, 1), *(numbers.at[slot, i] for numbers in parameters)]
        for pool, place in zip(self.pools, places, strict=True):
            pltpu.make_async_copy(pool.at[page], place, self.pages_arrived.at[slot]).start()

    def _ids(self, t: Scalar) -> Any:
        width, slot = self.plan.table_width, self._slot(t)
        start = pl.multiple_of(self.tile.seq(t) * width, width)
        row, target = self.table.at[pl.ds(start, width)], self.ids.at[pl.ds(slot * width, width)]
        return pltpu.make_async_copy(row, target, self.ids_arrived.at[slot])
