"""The warpgroup that copies pages to shared memory, and converts codes.

A block of keys is copied in runs of tokens, K and V separately. Each run is one asynchronous copy,
which does not pass through registers. Floats lie in the ring in the layout that products need, and
are used there. Codes are converted, as many at a time as a thread loads at once, into one block of
K and one of V. The warpgroup converts a block while others are being copied, and while the previous
one is being used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arith import Ref, Scalar
from pallas_kernels.attention.mosaic_gpu.plan import (
    BY_COLUMN,
    PRODUCT,
    Item,
    Plan,
    Work,
    div,
    rem,
)

SCALES = 32  # least room of a copy of scales, which begins at a multiple of 128 bytes


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Copies queries and blocks of keys into rings in shared memory.

    Blocks are numbered over all items; block `number` goes to stage `number % stages`. The queries
    of item n go to place `n % len(q_ring)` of their own ring.

    Attributes:
      plan: sizes.
      work: the items.
      q: `[tiles, heads, rows, D]`.
      table: `[B, M]` int32.
      pools: K and V `[2K * pages, P, D]`, and scales `[2K * pages, P]` if the pages have some.
      rings: one per pool, `[2, stages, ...]`, K first.
      filled: barriers of the stages.
      q_ring: `[places, rows, D]`.
      q_filled, q_emptied: barriers of the places.
    """

    plan: Plan
    work: Work
    q: Ref
    table: Ref
    pools: Sequence[Ref]
    rings: Sequence[Ref]
    filled: Ref
    q_ring: Ref
    q_filled: Ref
    q_emptied: Ref

    def queries(self, item: Item, n: Scalar) -> None:
        """Starts the copy of the queries of item n."""
        room = self.q_ring.shape[0]
        place = rem(n, room)
        pl.when(n >= room)(lambda: plgpu.barrier_wait(self.q_emptied.at[place]))
        source = self.q.at[item.fields.tile, item.head]
        plgpu.copy_gmem_to_smem(source, self.q_ring.at[place], self.q_filled.at[place])

    def block(self, item: Item, j: Scalar, number: Scalar, emptied: Ref | None = None) -> None:
        """Starts the copies of block j of an item, after its stage is `emptied`."""
        stage = rem(number, self.plan.stages)
        places = [self._place(item, j, i) for i in range(self.plan.runs)]
        if emptied is not None:
            pl.when(number >= self.plan.stages)(lambda: plgpu.barrier_wait(emptied.at[stage]))
        for i, (head, offset) in enumerate(places):
            for which in (0, 1):
                for pool, ring in zip(self.pools, self.rings, strict=True):
                    source = pool.at[head + which, pl.ds(offset, self.plan.run)]
                    if len(pool.shape) == 3:
                        target = ring.at[which, stage, pl.ds(i * self.plan.run, self.plan.run)]
                    else:
                        target = ring.at[which, stage, i, pl.ds(0, self.plan.run)]
                    plgpu.copy_gmem_to_smem(source, target, self.filled.at[stage])

    def _place(self, item: Item, j: Scalar, i: int) -> tuple[jax.Array, jax.Array]:
        """Returns where run i of block j is: index of K's head in the pool, and the first token.

        A run without a key of the item is replaced by the nearest run that has one. So every block
        has the same number of copies, and no other entry of the table is read.
        """
        plan = self.plan
        per_page = plan.page_size // plan.run
        lowest, highest = div(item.fields.start, plan.run), div(item.fields.end - 1, plan.run)
        nearest = jnp.clip(j * plan.runs + i, lowest, highest)
        page = self.table[item.fields.seq, div(nearest, per_page)]
        kv_head = div(item.head, plan.tile_heads // plan.num_kv_heads)
        return (page * plan.num_kv_heads + kv_head) * 2, rem(nearest, per_page) * plan.run

    def floats(self, emptied: Ref) -> None:
        """Copies all blocks of floats, which the other warpgroup uses where they lie."""

        def of_item(n: Scalar, number: Scalar) -> Scalar:
            item = self.work[n]
            self.queries(item, n)

            def of_block(j: Scalar, number: Scalar) -> Scalar:
                self.block(item, j, number, emptied)
                return number + 1

            return lax.fori_loop(item.first, item.last, of_block, number)

        blocks = lax.fori_loop(jnp.int32(0), self.work.mine, of_item, jnp.int32(0))
        drain(emptied, blocks, self.plan.stages)
        drain(self.q_emptied, self.work.mine, self.q_ring.shape[0])

    def codes(self, operands: "Operands") -> None:
        """Copies all blocks of codes, `stages - 1` ahead of those that it converts."""
        ahead, mine = self.plan.stages - 1, self.work.mine

        def start(number: Scalar, cursor: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
            """Starts the block at the cursor, which is an item and a block of that item."""
            n, j = cursor
            item = self.work[n]

            @pl.when(n < mine)
            def _() -> None:
                pl.when(j == item.first)(lambda: self.queries(item, n))
                self.block(item, j, number)

            is_last = j + 1 == item.last
            after = jnp.where(is_last, n + 1, n)
            return after, jnp.where(is_last, self.work[after].first, j + 1)

        def of_item(n: Scalar, carry: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
            item = self.work[n]

            def of_block(_: Scalar, carry: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
                number, *cursor = carry
                after = start(number + ahead, (cursor[0], cursor[1]))
                stage = rem(number, self.plan.stages)
                plgpu.barrier_wait(self.filled.at[stage])
                operands.convert(number, *(ring.at[:, stage] for ring in self.rings))
                return number + 1, *after

            return lax.fori_loop(item.first, item.last, of_block, carry)

        cursor = jnp.int32(0), self.work[0].first
        for number in range(ahead):
            cursor = start(jnp.int32(number), cursor)
        blocks, *_ = lax.fori_loop(jnp.int32(0), mine, of_item, (jnp.int32(0), *cursor))
        for used in (operands.scratch.k_used, operands.scratch.v_used):
            drain(used, blocks, 1)
        drain(self.q_emptied, mine, self.q_ring.shape[0])


class OperandsScratch(NamedTuple):
    """Memory of `Operands`.

    Attributes:
      k: `[block_tokens, D]`, the K of a block, converted.
      k_made, k_used: barriers: `k` is complete, and is not needed any more.
      scales: `[2, block_tokens]` float32, those of K first; None if the pages have none.
      v, v_made, v_used: like those of `k`.
    """

    k: Ref
    k_made: Ref
    k_used: Ref
    scales: Ref | None
    v: Ref
    v_made: Ref
    v_used: Ref


@dataclass(frozen=True)
class Operands:
    """Converts blocks of codes: one block of K and one of V, with the scales of both, at a time.

    The scales are made and used together with K.

    Attributes:
      plan: sizes.
      scratch: where the converted blocks are.
    """

    plan: Plan
    scratch: OperandsScratch

    def convert(self, number: Scalar, codes: Ref, scales: Ref | None = None) -> None:
        """Converts block `number`.

        Args:
          number: number of the block, counted over all items.
          codes: `[2, block_tokens, D]`, K first.
          scales: `[2, runs, ...]` float32; None if the pages have none.
        """
        made = self.scratch
        pl.when(number > 0)(lambda: plgpu.barrier_wait(made.k_used.at[0]))
        if made.scales is not None and scales is not None:
            run = self.plan.run
            for which in (0, 1):
                for i in range(self.plan.runs):
                    source = scales.at[which, i, pl.ds(0, run)]
                    made.scales[which, pl.ds(i * run, run)] = plgpu.load(source, layout=BY_COLUMN)
        self._convert(codes.at[0], made.k)
        plgpu.barrier_arrive(made.k_made.at[0])
        pl.when(number > 0)(lambda: plgpu.barrier_wait(made.v_used.at[0]))
        self._convert(codes.at[1], made.v)
        plgpu.barrier_arrive(made.v_made.at[0])

    def _convert(self, codes: Ref, numbers: Ref) -> None:
        dtype = self.plan.dtype
        layout = plgpu.Layout.SMEM_GMEM_COPY((PRODUCT, self.plan.head_dim), dtype, 128)
        for first in range(0, self.plan.block_tokens, PRODUCT):
            rows = pl.ds(first, PRODUCT)
            values = plgpu.load(codes.at[rows], layout=layout)
            if self.plan.code != jnp.int8:
                values = values.astype(jnp.float32)
            numbers[rows] = values.astype(dtype)
        plgpu.commit_smem()


def drain(barriers: Ref, count: Scalar, room: int) -> None:
    """Waits for the last of `count` arrivals: none may be pending when the kernel ends."""

    @pl.loop(jnp.maximum(count - room, 0), count)
    def _(n: Scalar) -> None:
        plgpu.barrier_wait(barriers.at[rem(n, room)])
