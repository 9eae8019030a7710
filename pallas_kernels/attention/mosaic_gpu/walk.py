"""The kernel that walks the keys: it computes the partial result of each item of work.

An item is a tile of query rows and a range of keys that is cut at fixed positions. Each head of an
item is a unit of work of its own. A block of threads stays on its processor and takes every
`ctas`-th unit. In it, one warpgroup fetches (`fetch`) and one computes (`softmax`), with barriers
between them:

    fetch     page ids -> copies -> ring of `stages` blocks -> conversion of codes
    compute                         K q^T -> weights -> V^T P^T

`call` makes the items; `merge` joins their results.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arith import Ref, Scalar
from pallas_kernels.attention.mosaic_gpu.fetch import SCALES, Fetch, Operands, OperandsScratch
from pallas_kernels.attention.mosaic_gpu.plan import Plan, Work, rem, store
from pallas_kernels.attention.mosaic_gpu.softmax import Blocks, CodeBlocks, FloatBlocks, Softmax

SWIZZLE = 128  # bytes of a row of a tile of an operand
THREADS = 256  # threads of a block: two warpgroups


class Inputs(NamedTuple):
    """The arrays that the kernel reads.

    Attributes:
      q: `[tiles, heads, rows, D]`.
      bounds: `[tiles, 2, rows]` int32, keys [low, high) that each row sees.
      items: `[items, fields]` int32, see `plan.ItemFields`.
      num_items: `[1]` int32, items in use; they come first.
      table: `[B, M]` int32.
      pools: the arrays of the pages: K and V, and scales if the pages have some. Heads and pages
        are one axis, since a copy has at most five, two of which tiles take.
    """

    q: Ref
    bounds: Ref
    items: Ref
    num_items: Ref
    table: Ref
    pools: Sequence[Ref]


class Scratch(NamedTuple):
    """Shared memory of a block of threads.

    Attributes:
      emptied: barriers of the stages of floats: the block is not needed any more. None for codes,
        whose stages the fetching warpgroup empties itself.
      filled: barriers of the stages: all copies of the block have arrived.
      operands: where codes are converted to; None for floats.
      q_emptied, q_filled: barriers of the places of queries.
      q_ring: `[places, rows, D]`.
      rings: one per pool, `[2, stages, ...]`, K first.
      weights: `[rows, block_tokens]`, the weights as an operand of a product.
    """

    emptied: Ref | None
    filled: Ref
    operands: OperandsScratch | None
    q_emptied: Ref
    q_filled: Ref
    q_ring: Ref
    rings: Sequence[Ref]
    weights: Ref

    @classmethod
    def of(cls, plan: Plan, dtypes: Sequence[jnp.dtype]) -> "Scratch":
        """Returns the types of the memory, for pools of some dtypes."""
        block, D, has_codes = plan.block_tokens, plan.head_dim, plan.code is not None
        rings = [_matrix(dtypes[0], 2, plan.stages, block, D)]
        if plan.scaled:
            room = max(plan.run, SCALES)
            rings.append(plgpu.SMEM((2, plan.stages, plan.runs, room), jnp.float32))
        # Codes are fetched up to `stages - 1` blocks ahead, each of which may begin another item.
        q_places = plan.stages if has_codes else 2
        one = plgpu.Barrier(num_barriers=1)
        operands = OperandsScratch(
            k=_matrix(plan.dtype, block, D),
            k_made=one,
            k_used=one,
            scales=plgpu.SMEM((2, block), jnp.float32) if plan.scaled else None,
            v=_matrix(plan.dtype, block, D),
            v_made=one,
            v_used=one,
        )
        copies = 2 * len(dtypes) * plan.runs
        return cls(
            emptied=None if has_codes else plgpu.Barrier(num_barriers=plan.stages),
            filled=plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages),
            operands=operands if has_codes else None,
            q_emptied=plgpu.Barrier(num_barriers=q_places),
            q_filled=plgpu.Barrier(num_barriers=q_places),
            q_ring=_matrix(plan.dtype, q_places, plan.rows, D),
            rings=rings,
            weights=_matrix(plan.dtype, plan.rows, block),
        )


def walk(plan: Plan, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel.

    Args:
      plan: sizes.
      inputs: arrays; the pools are `[N, 2K, P, D]`, and scales `[N, 2K, P]`.

    Returns:
      For each item and head the weighted sum of V, `[items, heads, D, rows]`, and `[2, heads,
      items, rows]`: the maximum of the logits in units of log 2, and the sum of exponentials. All
      are float32. Items that are not in use have anything.
    """
    heads, num_items = plan.tile_heads, inputs.items.shape[0]
    call = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=(
            jax.ShapeDtypeStruct((num_items, heads, plan.head_dim, plan.rows), jnp.float32),
            jax.ShapeDtypeStruct((2, heads, num_items, plan.rows), jnp.float32),
        ),
        grid=(plan.ctas,),
        grid_names=("cta",),
        num_threads=THREADS // 128,
        thread_name="role",
        scratch_types=[Scratch.of(plan, [pool.dtype for pool in inputs.pools])],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="ragged_paged_attention",
    )
    flat = [pool.reshape(-1, *pool.shape[2:]) for pool in inputs.pools]
    return call(inputs._replace(pools=flat))


def _matrix(dtype: jnp.dtype, *shape: int) -> Any:
    """Shared memory in the tiles that products and copies need."""
    width = math.gcd(SWIZZLE // dtype.itemsize, shape[-1])  # 64 codes where D is 192
    transforms = (
        plgpu.TilingTransform((8, width)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(width * dtype.itemsize),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _kernel(plan: Plan, inputs: Inputs, weighted: Ref, stats: Ref, scratch: Scratch) -> None:
    """Computes the items of one block of threads.

    Args:
      plan: sizes.
      inputs: arrays in the device's memory.
      weighted, stats: the results, see `walk`.
      scratch: shared memory.
    """
    cta, role = lax.axis_index("cta"), lax.axis_index("role")
    count = inputs.num_items[0] * plan.tile_heads
    work = Work(plan=plan, items=inputs.items, cta=cta, count=count)
    operands = None if scratch.operands is None else Operands(plan, scratch.operands)

    @pl.when(role == 1)
    def _() -> None:
        fetch = Fetch(
            plan=plan,
            work=work,
            q=inputs.q,
            table=inputs.table,
            pools=inputs.pools,
            rings=scratch.rings,
            filled=scratch.filled,
            q_ring=scratch.q_ring,
            q_filled=scratch.q_filled,
            q_emptied=scratch.q_emptied,
        )
        if operands is None:
            fetch.floats(scratch.emptied)
        else:
            fetch.codes(operands)

    @pl.when(role == 0)
    def _() -> None:
        if operands is None:
            ring, filled = scratch.rings[0], scratch.filled
            blocks: Blocks = FloatBlocks(ring=ring, filled=filled, emptied=scratch.emptied)
        else:
            blocks = CodeBlocks(operands.scratch)

        def attend(n: Scalar, number: Scalar) -> Scalar:
            """Computes item n, before which there were `number` blocks."""
            item, place = work[n], rem(n, scratch.q_ring.shape[0])
            softmax = Softmax(
                plan=plan,
                fields=item.fields,
                blocks=blocks,
                q=scratch.q_ring.at[place],
                bounds=inputs.bounds,
                weights=scratch.weights,
            )

            def add(j: Scalar, state: Any) -> Any:
                return softmax.add(j, number + j - item.first, state)

            plgpu.barrier_wait(scratch.q_filled.at[place])
            state = lax.fori_loop(item.first, item.last, add, softmax.empty())
            plgpu.barrier_arrive(scratch.q_emptied.at[place])
            maximum, total, sums = state
            for part, summed in zip(plan.slices, sums, strict=True):
                channels = pl.ds(part.start, part.stop - part.start)
                store(weighted.at[item.number, item.head, channels], summed)
            store(stats.at[0, item.head, item.number], maximum)
            store(stats.at[1, item.head, item.number], total.sum(axis=0))
            return number + item.last - item.first

        lax.fori_loop(jnp.int32(0), work.mine, attend, jnp.int32(0))
