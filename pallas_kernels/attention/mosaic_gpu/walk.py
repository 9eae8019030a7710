"""The kernel that walks keys: of each item of work, the partial result.

An item is a tile of query rows and a stretch of keys that ends at fixed positions; each head of it
is work by itself. Blocks of threads stay on their processor and take every `ctas`-th. In each one
warpgroup fetches (`fetch`) and one computes (`softmax`), with barriers between them:

    fetch     page ids -> copies -> ring of `stages` blocks -> of codes: numbers
    compute                         K q^T -> weights -> V^T P^T

Not here: what the items are, and joining their results (`call`, `merge`).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic_gpu.fetch import SCALES, Fetch, Operands
from pallas_kernels.attention.mosaic_gpu.plan import Plan, Ref, Scalar, Work, rem, store
from pallas_kernels.attention.mosaic_gpu.softmax import CodeBlocks, FloatBlocks, Softmax

SWIZZLE = 128  # bytes of a row of a tile of an operand
THREADS = 256  # of a block: two warpgroups


def walk(
    plan: Plan,
    q: jax.Array,
    bounds: jax.Array,
    work: jax.Array,
    num_work: jax.Array,
    table: jax.Array,
    pools: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel.

    Args:
      plan: sizes.
      q: `[tiles, heads, N, D]`.
      bounds: `[tiles, 2, N]` int32, keys [low, high) that each row sees.
      work: `[items, 6]` int32, see `plan.Work`.
      num_work: `[1]` int32, items in use; they come first.
      table: `[B, M]` int32.
      pools: `[N, 2K, P, D]`, and scales `[N, 2K, P]` where the plan has some.

    Returns:
      Of each item and head the weighted sum of V `[items, heads, D, N]` and `[2, heads, items, N]`,
      the maximum of the logits in units of log 2 and the sum of exponentials, all float32; of items
      that are not in use anything.
    """
    N, D, items = plan.rows, plan.head_dim, work.shape[0]
    call = plgpu.kernel(
        functools.partial(_kernel, plan, len(pools)),
        out_type=(
            jax.ShapeDtypeStruct((items, plan.heads, D, N), jnp.float32),
            jax.ShapeDtypeStruct((2, plan.heads, items, N), jnp.float32),
        ),
        grid=(plan.ctas,),
        grid_names=("cta",),
        num_threads=THREADS // 128,
        thread_name="role",
        scratch_types=_scratch(plan, [pool.dtype for pool in pools]),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="ragged_paged_attention",
    )
    # One leading axis: a copy has five at most, two of which tiles take.
    flat = [pool.reshape(-1, *pool.shape[2:]) for pool in pools]
    return call(q, bounds, work, num_work, table, *flat)


def _scratch(plan: Plan, dtypes: list[jnp.dtype]) -> dict[str, Any]:
    """Shared memory and barriers."""
    block, D = plan.block, plan.head_dim
    rings = [_matrix(dtypes[0], 2, plan.stages, block, D)]
    if plan.scaled:
        room = max(plan.run, SCALES)
        rings.append(plgpu.SMEM((2, plan.stages, plan.runs, room), jnp.float32))
    copies = 2 * len(dtypes) * plan.runs
    # Where codes are fetched ahead of their use by the same warpgroup, that many items may be.
    q_room = 2 if plan.code is None else plan.stages
    scratch: dict[str, Any] = dict(
        rings=rings,
        q_ring=_matrix(plan.dtype, q_room, plan.rows, D),
        weights=_matrix(plan.dtype, plan.rows, block),
        filled=plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages),
        q_filled=plgpu.Barrier(num_barriers=q_room),
        q_emptied=plgpu.Barrier(num_barriers=q_room),
    )
    if plan.code is None:
        return scratch | dict(emptied=plgpu.Barrier(num_barriers=plan.stages))
    return scratch | dict(
        operands=dict(
            k=_matrix(plan.dtype, block, D),
            v=_matrix(plan.dtype, block, D),
            scales=plgpu.SMEM((2, block), jnp.float32) if plan.scaled else None,
            **{
                name: plgpu.Barrier(num_barriers=1)
                for name in ("k_made", "v_made", "k_used", "v_used")
            },
        )
    )


def _matrix(dtype: jnp.dtype, *shape: int) -> Any:
    """Shared memory in the tiles that products and copies take."""
    width = math.gcd(SWIZZLE // dtype.itemsize, shape[-1])  # 64 codes where D is 192
    transforms = (
        plgpu.TilingTransform((8, width)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(width * dtype.itemsize),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _kernel(plan: Plan, num_pools: int, *refs: Ref, **scratch: Any) -> None:
    q, bounds, items, num_items, table, *others = refs
    pools, (weighted, stats) = others[:num_pools], others[num_pools:]
    cta, role = lax.axis_index("cta"), lax.axis_index("role")
    work = Work(plan=plan, items=items, cta=cta, count=num_items[0] * plan.heads)
    q_ring, q_filled, q_emptied = (scratch[name] for name in ("q_ring", "q_filled", "q_emptied"))
    operands = None
    if plan.code is not None:
        operands = Operands(plan=plan, **scratch["operands"])

    @pl.when(role == 1)
    def _() -> None:
        fetch = Fetch(
            plan=plan,
            work=work,
            q=q,
            table=table,
            pools=tuple(pools),
            rings=tuple(scratch["rings"]),
            filled=scratch["filled"],
            q_ring=q_ring,
            q_filled=q_filled,
            q_emptied=q_emptied,
        )
        if operands is None:
            fetch.floats(scratch["emptied"])
        else:
            fetch.codes(operands)

    @pl.when(role == 0)
    def _() -> None:
        if operands is None:
            ring, filled, emptied = (scratch["rings"][0], scratch["filled"], scratch["emptied"])
            blocks = FloatBlocks(ring=ring, filled=filled, emptied=emptied)
        else:
            blocks = CodeBlocks(operands=operands)

        def attend(n: Scalar, number: Scalar) -> Scalar:
            """Attends over item n; `number` blocks came before it."""
            item, place = work[n], rem(n, q_ring.shape[0])
            softmax = Softmax(
                plan=plan,
                item=item,
                blocks=blocks,
                q=q_ring.at[place],
                bounds=bounds,
                weights=scratch["weights"],
            )

            def add(j: Scalar, state: Any) -> Any:
                return softmax.add(j, number + j - item.first, state)

            plgpu.barrier_wait(q_filled.at[place])
            state = lax.fori_loop(item.first, item.last, add, softmax.empty())
            plgpu.barrier_arrive(q_emptied.at[place])
            maximum, total, sums = state
            for part, summed in zip(plan.slices, sums, strict=True):
                channels = pl.ds(part.start, part.stop - part.start)
                store(weighted.at[item.number, item.head, channels], summed)
            store(stats.at[0, item.head, item.number], maximum)
            store(stats.at[1, item.head, item.number], total.sum(axis=0))
            return number + item.last - item.first

        lax.fori_loop(jnp.int32(0), work.mine, attend, jnp.int32(0))
