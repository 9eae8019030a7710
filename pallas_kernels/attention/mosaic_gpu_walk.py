"""The kernel of `mosaic_gpu` that walks keys: of each item of work the partial result.

An item is a tile of query rows, a head, and a stretch of keys that ends at fixed positions. Blocks
of CTAs stay on their processor and take every `ctas`-th item. In each, one warpgroup fetches and
the others compute:

    producer   page ids -> one copy a run of tokens, K and V apart -> ring of `stages` blocks
    consumer   S^T = K q^T     [block, N]   keys are the rows, so that a tile of N = 8 query rows
               P^T = exp2(S^T - max)        wastes nothing of the 64 rows a product has
               O^T = O^T decay + V^T P^T    [D, N]

The maximum goes over rows, through shuffles and a little shared memory; P^T goes through shared
memory to become an operand. What no row sees of V is zeroed there first, since 0 * NaN is NaN.

Not here: what the items are, and joining their results (`mosaic_gpu`, `mosaic_gpu_merge`).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.options import AttentionOptions

LOG2_E = math.log2(math.e)
ROWS, COLUMNS, MATRIX = (
    plgpu.Layout.WGMMA.reduce(1),
    plgpu.Layout.WGMMA.reduce(0),
    plgpu.Layout.WGMMA,
)
SWIZZLE = 128  # bytes of a row of a tile in shared memory
PRODUCT_ROWS = 64
THREADS = 256  # of a block: a warpgroup that fetches and one that computes
Ref = Any
Scalar = jax.Array | int


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Static sizes of a call of the kernel.

    Attributes:
      heads: KV heads, each as often as its query heads take tiles of their own.
      heads_a_page: KV heads.
      head_dim, page_size: D and P.
      rows: N, query rows of a tile, a multiple of 8.
      block: keys of a block.
      stages: blocks in shared memory at once.
      ctas: blocks of the grid.
      dtype: of K, V and the products.
      one_bound: all rows of a tile see the same keys.
      options: of the call.
    """

    heads: int
    heads_a_page: int
    head_dim: int
    page_size: int
    rows: int
    block: int
    stages: int
    ctas: int
    dtype: jnp.dtype
    one_bound: bool
    options: AttentionOptions

    @property
    def run(self) -> int:
        """Tokens of a copy: they lie in one page and in one block."""
        return math.gcd(self.page_size, self.block)


def walk(
    plan: Walk,
    q: jax.Array,
    bounds: jax.Array,
    work: jax.Array,
    num_work: jax.Array,
    table: jax.Array,
    kv: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel.

    Args:
      plan: sizes.
      q: `[tiles, heads, N, D]`.
      bounds: `[tiles, 2, N]` int32, keys [low, high) that each row sees.
      work: `[items, 4]` int32: row of the page table, tile, and the item's keys [start, end).
      num_work: `[1]` int32, items in use; they come first.
      table: `[B, M]` int32.
      kv: `[N, 2K, P, D]`.

    Returns:
      Of each item and head the weighted sum of V `[items, heads, D, N]` and `[2, heads, items, N]`,
      the maximum of the logits in units of log 2 and the sum of exponentials, all float32; of items
      that are not in use anything.
    """
    N, D = plan.rows, plan.head_dim
    items = work.shape[0]

    def matrix(rows: int, columns: int, *lead: int) -> Any:
        width = SWIZZLE // plan.dtype.itemsize
        transforms = (
            plgpu.TilingTransform((8, width)),  # pyright: ignore[reportAbstractUsage]
            plgpu.SwizzleTransform(SWIZZLE),  # pyright: ignore[reportAbstractUsage]
        )
        return plgpu.SMEM((*lead, rows, columns), plan.dtype, transforms=transforms)

    copies = 2 * (plan.block // plan.run)
    call = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=(
            jax.ShapeDtypeStruct((items, plan.heads, D, N), jnp.float32),
            jax.ShapeDtypeStruct((2, plan.heads, items, N), jnp.float32),
        ),
        grid=(plan.ctas,),
        grid_names=("cta",),
        num_threads=THREADS // 128,
        thread_name="role",
        scratch_types=dict(
            k_ring=matrix(plan.block, D, plan.stages),
            v_ring=matrix(plan.block, D, plan.stages),
            q_tiles=matrix(N, D, 2),
            weights=matrix(N, plan.block),
            filled=plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages),
            emptied=plgpu.Barrier(num_barriers=plan.stages),
            q_filled=plgpu.Barrier(num_barriers=2),
            q_emptied=plgpu.Barrier(num_barriers=2),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=False),
        kernel_name="ragged_paged_attention",
    )
    # One leading axis: a copy has at most five, tiled.
    return call(q, bounds, work, num_work, table, kv.reshape(-1, plan.page_size, D))


def _kernel(
    plan: Walk,
    q: Ref,
    bounds: Ref,
    work: Ref,
    num_work: Ref,
    table: Ref,
    kv: Ref,
    weighted: Ref,
    stats: Ref,
    *,
    k_ring: Ref,
    v_ring: Ref,
    q_tiles: Ref,
    weights: Ref,
    filled: Ref,
    emptied: Ref,
    q_filled: Ref,
    q_emptied: Ref,
) -> None:
    cta, role = lax.axis_index("cta"), lax.axis_index("role")
    count = num_work[0] * plan.heads

    def over_items(body: Callable[[Any, Scalar, Scalar], Scalar]) -> Scalar:
        """Folds `body(item, number of the item, blocks before it)`; returns all blocks."""
        mine = lax.div(count - cta + plan.ctas - 1, plan.ctas)

        def step(n: Scalar, blocks: Scalar) -> Scalar:
            return body(_Item.read(plan, work, cta + n * plan.ctas), n, blocks)

        return lax.fori_loop(0, jnp.maximum(mine, 0), step, jnp.int32(0))

    @pl.when(role == 1)
    def produce() -> None:
        def fetch_item(item: "_Item", n: Scalar, blocks: Scalar) -> Scalar:
            twin = lax.rem(n, 2)
            pl.when(n >= 2)(lambda: plgpu.barrier_wait(q_emptied.at[twin]))
            plgpu.copy_gmem_to_smem(q.at[item.tile, item.head], q_tiles.at[twin], q_filled.at[twin])

            def fetch_block(j: Scalar, blocks: Scalar) -> Scalar:
                slot = lax.rem(blocks, plan.stages)
                places = [item.copied(plan, j, i, table) for i in range(plan.block // plan.run)]
                pl.when(blocks >= plan.stages)(lambda: plgpu.barrier_wait(emptied.at[slot]))
                for i, (head, offset) in enumerate(places):
                    rows = pl.ds(i * plan.run, plan.run)
                    for ring, which in ((k_ring, 0), (v_ring, 1)):
                        plgpu.copy_gmem_to_smem(
                            kv.at[head + which, pl.ds(offset, plan.run)],
                            ring.at[slot, rows],
                            filled.at[slot],
                        )
                return blocks + 1

            return lax.fori_loop(item.first, item.last, fetch_block, blocks)

        blocks = over_items(fetch_item)
        items = lax.div(count - cta + plan.ctas - 1, plan.ctas)

        # Every arrival is waited for before the barriers go.
        @pl.loop(jnp.maximum(blocks - plan.stages, 0), blocks)
        def _(k: Scalar) -> None:
            plgpu.barrier_wait(emptied.at[lax.rem(k, plan.stages)])

        @pl.loop(jnp.maximum(items - 2, 0), jnp.maximum(items, 0))
        def _(n: Scalar) -> None:
            plgpu.barrier_wait(q_emptied.at[lax.rem(n, 2)])

    @pl.when(role == 0)
    def consume() -> None:
        def attend_item(item: "_Item", n: Scalar, blocks: Scalar) -> Scalar:
            twin = lax.rem(n, 2)
            softmax = _Softmax(plan, item, q_tiles.at[twin], bounds, weights)
            plgpu.barrier_wait(q_filled.at[twin])

            def attend_block(j: Scalar, carry: tuple[Scalar, Any]) -> tuple[Scalar, Any]:
                blocks, state = carry
                slot = lax.rem(blocks, plan.stages)
                plgpu.barrier_wait(filled.at[slot])
                state = softmax.add(j, k_ring.at[slot], v_ring.at[slot], state)
                plgpu.barrier_arrive(emptied.at[slot])
                return blocks + 1, state

            blocks, state = lax.fori_loop(
                item.first, item.last, attend_block, (blocks, softmax.empty())
            )
            plgpu.barrier_arrive(q_emptied.at[twin])
            maximum, total, summed = state
            store = functools.partial(plgpu.store, optimized=False)
            store(weighted.at[item.number, item.head], summed)
            store(stats.at[0, item.head, item.number], maximum)
            store(stats.at[1, item.head, item.number], total.sum(axis=0))
            return blocks

        over_items(attend_item)


@dataclass(frozen=True, kw_only=True)
class _Item:
    """An item of work for one head; its keys are [start, end), in blocks [first, last)."""

    number: Scalar
    head: Scalar
    seq: Scalar
    tile: Scalar
    start: Scalar
    end: Scalar
    first: Scalar
    last: Scalar

    @classmethod
    def read(cls, plan: Walk, work: Ref, index: Scalar) -> "_Item":
        number = lax.div(index, plan.heads)
        seq, tile, start, end = (work[number, field] for field in range(4))
        return cls(
            number=number,
            head=lax.rem(index, plan.heads),
            seq=seq,
            tile=tile,
            start=start,
            end=end,
            first=lax.div(start, plan.block),
            last=lax.div(end + plan.block - 1, plan.block),
        )

    def copied(self, plan: Walk, j: Scalar, i: int, table: Ref) -> tuple[Scalar, Scalar]:
        """Where run i of block j is copied from: index of K's head in the pool, first token.

        A run without a key of the item is replaced by the nearest one that has some: every block
        has the same number of copies, and no other entry of the table is read.
        """
        a_block, a_page = plan.block // plan.run, plan.page_size // plan.run
        nearest = jnp.clip(
            j * a_block + i,
            lax.div(self.start, plan.run),
            lax.div(self.end - 1, plan.run),
        )
        page = table[self.seq, lax.div(nearest, a_page)]
        kv_head = lax.div(self.head, plan.heads // plan.heads_a_page)
        return (page * plan.heads_a_page + kv_head) * 2, lax.rem(nearest, a_page) * plan.run


@dataclass(frozen=True)
class _Softmax:
    """The online softmax of an item, logits in units of log 2.

    The state is the maximum `[N]`, sums of exponentials by row of a block `[block, N]` and the
    weighted sum of V `[D, N]`.
    """

    plan: Walk
    item: _Item
    q: Ref
    bounds: Ref
    weights: Ref

    def empty(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        N = self.plan.rows
        return (
            plgpu.layout_cast(jnp.full((N,), -jnp.inf, jnp.float32), COLUMNS),
            plgpu.layout_cast(jnp.zeros((self.plan.block, N), jnp.float32), MATRIX),
            plgpu.layout_cast(jnp.zeros((self.plan.head_dim, N), jnp.float32), MATRIX),
        )

    def add(
        self, j: Scalar, k: Ref, v: Ref, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Adds block j, whose K and V `[block, D]` are in shared memory."""
        maximum, total, weighted = state
        logits = self._logits(_product(k, self.q.transpose((1, 0))))
        logits = jnp.where(self._visible(j), logits, -jnp.inf)

        m_new = jnp.maximum(maximum, logits.max(axis=0))
        finite = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        decay = jnp.exp2(maximum - finite)
        weights = jnp.exp2(logits - lax.broadcast_in_dim(finite, logits.shape, [1]))
        total = total * lax.broadcast_in_dim(decay, total.shape, [1]) + weights
        transposed = plgpu.layout_cast(
            weights.astype(self.plan.dtype), plgpu.Layout.WGMMA_TRANSPOSED
        )
        self.weights.transpose((1, 0))[...] = transposed
        self._blank(j, v)
        plgpu.commit_smem()
        partial = _product(v.transpose((1, 0)), self.weights.transpose((1, 0)))
        weighted = weighted * lax.broadcast_in_dim(decay, weighted.shape, [1]) + partial
        return m_new, total, weighted

    def _logits(self, product: jax.Array) -> jax.Array:
        options = self.plan.options
        if options.soft_cap is None:
            return product * (options.scale * LOG2_E)
        # tanh(x) = 1 - 2 / (exp(2 x) + 1): the instruction for tanh has 11 bits.
        power = jnp.exp2(product * (2 * LOG2_E * options.scale / options.soft_cap))
        return (1.0 - 2.0 / (power + 1.0)) * (options.soft_cap * LOG2_E)

    def _visible(self, j: Scalar) -> jax.Array:
        """Which keys of block j each row sees, `[block, N]`."""
        shape = (self.plan.block, self.plan.rows)
        key = j * self.plan.block + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX)
        item = self.item
        visible = (key >= item.start) & (key < item.end)
        if not self.plan.one_bound:
            low, high = (
                plgpu.load(self.bounds.at[item.tile, i], layout=COLUMNS, optimized=False)
                for i in (0, 1)
            )
            visible &= key >= lax.broadcast_in_dim(low, shape, [1])
            visible &= key < lax.broadcast_in_dim(high, shape, [1])
        return visible

    def _blank(self, j: Scalar, v: Ref) -> None:
        """Zeroes what the item has not of V."""
        start, end = (x - j * self.plan.block for x in (self.item.start, self.item.end))

        @pl.when((start > 0) | (end < self.plan.block))
        def _() -> None:
            for first in range(0, self.plan.block, PRODUCT_ROWS):
                rows = v.at[pl.ds(first, PRODUCT_ROWS)]
                values = plgpu.load(rows, layout=MATRIX)
                token = first + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=MATRIX)
                rows[...] = jnp.where(
                    (token >= start) & (token < end), values, jnp.zeros_like(values)
                )


def _product(a: Ref, b: Ref) -> jax.Array:
    """`a @ b` of two matrices in shared memory, in float32."""

    def multiply(out: Ref) -> jax.Array:
        plgpu.wgmma(out, a, b)
        return out[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))
