"""The warpgroup that fetches pages, and makes numbers of codes.

A block of keys is copied in runs of tokens, K and V apart: one asynchronous copy each, which goes
around the registers. Floats lie in the ring as products take them, and are used there. Codes are
converted, as many at a time as a thread loads at once, into one block of K and one of V; the
warpgroup converts a block while others are on their way, and while the last one is being used.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic_gpu.plan import (
    BY_COLUMN,
    PRODUCT,
    Item,
    Plan,
    Ref,
    Scalar,
    Work,
    div,
    rem,
)

SCALES = 32  # numbers that a copy of scales has room for: it must begin at a multiple of 128 bytes


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Copies of queries, and of blocks of keys, into rings in shared memory.

    Blocks are numbered over all items; number k goes to `k % stages`, and an item's queries to the
    ring of their own by its number.

    Attributes:
      q: `[tiles, heads, N, D]`.
      table: `[B, M]`.
      pools: K and V `[2K * pages, P, D]`, and scales `[2K * pages, P]` perhaps.
      rings: one a pool, `[2, stages, ...]`, K first.
      filled: barriers of the stages.
      q_ring, q_filled, q_emptied: of the queries.
    """

    plan: Plan
    work: Work
    q: Ref
    table: Ref
    pools: tuple[Ref, ...]
    rings: tuple[Ref, ...]
    filled: Ref
    q_ring: Ref
    q_filled: Ref
    q_emptied: Ref

    def queries(self, item: Item, n: Scalar) -> None:
        """Starts the queries of item n."""
        room = self.q_ring.shape[0]
        place = rem(n, room)
        pl.when(n >= room)(lambda: plgpu.barrier_wait(self.q_emptied.at[place]))
        source = self.q.at[item.tile, item.head]
        plgpu.copy_gmem_to_smem(source, self.q_ring.at[place], self.q_filled.at[place])

    def block(self, item: Item, j: Scalar, k: Scalar, emptied: Ref | None = None) -> None:
        """Starts block j of an item, number k, once its stage is `emptied`."""
        stage = rem(k, self.plan.stages)
        places = [self._place(item, j, i) for i in range(self.plan.runs)]
        if emptied is not None:
            pl.when(k >= self.plan.stages)(lambda: plgpu.barrier_wait(emptied.at[stage]))
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
        """Where run i of block j is: index of K's head in the pool, first token.

        A run without a key of the item is replaced by the nearest one that has some: every block
        has the same number of copies, and no other entry of the table is read.
        """
        plan = self.plan
        a_page = plan.page_size // plan.run
        lowest, highest = div(item.start, plan.run), div(item.end - 1, plan.run)
        nearest = jnp.clip(j * plan.runs + i, lowest, highest)
        page = self.table[item.seq, div(nearest, a_page)]
        kv_head = div(item.head, plan.heads // plan.kv_heads)
        return (page * plan.kv_heads + kv_head) * 2, rem(nearest, a_page) * plan.run

    def floats(self, emptied: Ref) -> None:
        """Fetches all blocks, for the other warpgroup to use them where they lie."""

        def of_item(n: Scalar, k: Scalar) -> Scalar:
            item = self.work[n]
            self.queries(item, n)

            def of_block(j: Scalar, k: Scalar) -> Scalar:
                self.block(item, j, k, emptied)
                return k + 1

            return lax.fori_loop(item.first, item.last, of_block, k)

        blocks = lax.fori_loop(jnp.int32(0), self.work.mine, of_item, jnp.int32(0))
        drain(emptied, blocks, self.plan.stages)
        drain(self.q_emptied, self.work.mine, self.q_ring.shape[0])

    def codes(self, operands: "Operands") -> None:
        """Fetches all blocks, `stages - 1` ahead of those that it converts."""
        ahead, mine = self.plan.stages - 1, self.work.mine

        def start(k: Scalar, cursor: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
            """Starts block number k, the one at the cursor: an item and a block of it."""
            n, j = cursor
            item = self.work[n]

            @pl.when(n < mine)
            def _() -> None:
                pl.when(j == item.first)(lambda: self.queries(item, n))
                self.block(item, j, k)

            is_last = j + 1 == item.last
            after = jnp.where(is_last, n + 1, n)
            return after, jnp.where(is_last, self.work[after].first, j + 1)

        def of_item(n: Scalar, carry: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
            item = self.work[n]

            def of_block(_: Scalar, carry: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
                k, *cursor = carry
                after = start(k + ahead, (cursor[0], cursor[1]))
                stage = rem(k, self.plan.stages)
                plgpu.barrier_wait(self.filled.at[stage])
                operands.convert(k, *(ring.at[:, stage] for ring in self.rings))
                return k + 1, *after

            return lax.fori_loop(item.first, item.last, of_block, carry)

        cursor = jnp.int32(0), self.work[0].first
        for k in range(ahead):
            cursor = start(jnp.int32(k), cursor)
        blocks, *_ = lax.fori_loop(jnp.int32(0), mine, of_item, (jnp.int32(0), *cursor))
        for used in (operands.k_used, operands.v_used):
            drain(used, blocks, 1)
        drain(self.q_emptied, mine, self.q_ring.shape[0])


@dataclass(frozen=True, kw_only=True)
class Operands:
    """A block of K and one of V, made of codes, and their scales; each used and made by turns.

    Attributes:
      k, v: `[block, D]`.
      scales: `[2, block]` float32, those of K first, where codes have some; they go with K.
      k_made, v_made, k_used, v_used: barriers, one each.
    """

    plan: Plan
    k: Ref
    v: Ref
    scales: Ref | None
    k_made: Ref
    v_made: Ref
    k_used: Ref
    v_used: Ref

    def convert(self, number: Scalar, codes: Ref, scales: Ref | None = None) -> None:
        """Makes block `number` of codes `[2, block, D]` and scales `[2, runs, ...]`."""
        pl.when(number > 0)(lambda: plgpu.barrier_wait(self.k_used.at[0]))
        if self.scales is not None and scales is not None:
            run = self.plan.run
            for which in (0, 1):
                for i in range(self.plan.runs):
                    source = scales.at[which, i, pl.ds(0, run)]
                    self.scales[which, pl.ds(i * run, run)] = plgpu.load(source, layout=BY_COLUMN)
        self._convert(codes.at[0], self.k)
        plgpu.barrier_arrive(self.k_made.at[0])
        pl.when(number > 0)(lambda: plgpu.barrier_wait(self.v_used.at[0]))
        self._convert(codes.at[1], self.v)
        plgpu.barrier_arrive(self.v_made.at[0])

    def _convert(self, codes: Ref, numbers: Ref) -> None:
        dtype = self.plan.dtype
        layout = plgpu.Layout.SMEM_GMEM_COPY((PRODUCT, self.plan.head_dim), dtype, 128)
        for first in range(0, self.plan.block, PRODUCT):
            rows = pl.ds(first, PRODUCT)
            values = plgpu.load(codes.at[rows], layout=layout)
            if self.plan.code != jnp.int8:
                values = values.astype(jnp.float32)
            numbers[rows] = values.astype(dtype)
        plgpu.commit_smem()


def drain(barriers: Ref, count: Scalar, room: int) -> None:
    """Waits for the last arrivals of `count` in all: none may be left when barriers go."""

    @pl.loop(jnp.maximum(count - room, 0), count)
    def _(k: Scalar) -> None:
        plgpu.barrier_wait(barriers.at[rem(k, room)])
