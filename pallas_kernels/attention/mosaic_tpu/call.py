"""Ragged paged attention for TPUs: one kernel that streams pages past tiles of query rows.

    grid       one step a tile of rows; the G heads that share a KV head are rows of the same tile,
               and so are those of a group of KV heads where all fit into a register
    keys       a tile walks the blocks of keys that its rows see, with an online softmax
    pages      come by one DMA each, K and V of every head, `num_buffers - 1` blocks ahead: the
               last blocks of a tile already fetch the first ones of the next
    page ids   a sequence's row of the page table comes to SMEM one tile ahead

                 first      fast_first              fast_last     last
    blocks        | masked   | whole, next ones whole | masked    |

A block that all rows see whole, and whose successors they see whole too, needs no mask and no
decision about what to fetch: most blocks of a long context are such. Other blocks go one by one
through a general path with the same arithmetic. Blocks begin at multiples of `block_tokens`, so a
row's sums are cut at the same places whatever surrounds it.

Where each sequence has one query, a tile is one row of G heads; longer ones are cut into tiles of
many rows, in a call of the kernel of their own.

A row of a page is K and V of a token and head, cut into pieces as wide as a register. Where one has
some of both, it is an operand of both products as it is: q is 0 in V's lanes, and K's lanes of the
output are dropped.

Codes come with the parameters of their page by a second DMA; fixed scales go into the queries and
the output. Parameters multiply logits and weights, a number a key, not the codes, which a tile of
one row multiplies as they are where the chip can. Source: FlashAttention-2, arXiv 2307.08691; the
pipeline of pages is that of Ragged Paged Attention, arXiv 2604.15464.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.mosaic_tpu import tuning
from pallas_kernels.attention.mosaic_tpu.fetch import FIELDS, Fetch, TileScalars
from pallas_kernels.attention.mosaic_tpu.plan import (
    LOG2_E,
    SUBLANES,
    KernelPages,
    Plan,
    Ref,
    sizes_of,
)
from pallas_kernels.attention.mosaic_tpu.softmax import Softmax
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.ragged import PADDING, Ragged
from pallas_kernels.attention.tiles import Tiles, attend_by_length
from pallas_kernels.pages import LANES
from pallas_kernels.quantised_pages import AnyPages, times_fixed_scales

MAX_TABLE_WIDTH = 1 << 16  # page ids of a sequence: two rows of them must fit into SMEM


def refusal(q: jax.Array, pages: AnyPages, page_table: jax.Array) -> str | None:
    """Why these arrays cannot be taken, or None."""
    if not isinstance(pages, KernelPages):
        return f"{type(pages).__name__} are not read yet"
    if pages.layout != "paired":
        return "pages must be paired"
    if jnp.float16 in (q.dtype, pages.kv.dtype):  # no type of codes either
        return "float16 is no type of a TPU's vector unit"
    if pages.page_size % SUBLANES:
        return f"P = {pages.page_size} is not a multiple of {SUBLANES}"
    if page_table.shape[1] > MAX_TABLE_WIDTH:
        return f"M = {page_table.shape[1]} page ids a sequence; at most {MAX_TABLE_WIDTH}"
    return None


@jax.jit(static_argnames="options")
def ragged_paged_attention(
    q: jax.Array,
    pages: KernelPages,
    page_table: jax.Array,
    ragged: Ragged,
    sinks: jax.Array | None,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.attention.api`; returns `(out [T, H, D], lse [T, H])`."""
    T, H, _ = q.shape
    B, K = page_table.shape[0], pages.num_kv_heads
    attend = functools.partial(_attend, q, pages, page_table, ragged, sinks, options)
    if options.query_tile is not None or T <= B:
        return attend(options.query_tile or 1, None)
    many = max(SUBLANES, sizes_of(pages, "rows").tile_rows // (H // K))
    return attend_by_length(
        ragged, T, functools.partial(attend, 1), functools.partial(attend, many)
    )


def _attend(
    q: jax.Array,
    pages: KernelPages,
    page_table: jax.Array,
    ragged: Ragged,
    sinks: jax.Array | None,
    options: AttentionOptions,
    tile: int,
    taken: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the rows of the sequences `taken [B]`; anything in the other rows."""
    (T, H, D), M = q.shape, page_table.shape[1]
    K = pages.num_kv_heads
    G = H // K
    plan = Plan.choose(q, pages, tile, M, options)
    tiles = Tiles.plan(ragged, T, tile, options, taken)

    rows = tiles.first_row[:, None] + jnp.arange(tile, dtype=jnp.int32)[None]  # [count, tile]
    _, position = ragged.place(rows, tiles.seq[:, None])
    bounds = jnp.stack(options.bounds(position), axis=-1)  # [count, tile, 2]
    scalars = _scalars(plan, tiles, bounds)
    q = times_fixed_scales(q, pages, 0)
    by_head = q.at[rows].get(mode="clip").reshape(tiles.count, tile, K, G, D)
    by_head = by_head.transpose(0, 2, 1, 3, 4).reshape(tiles.count, K, tile * G, D)
    by_head = by_head.astype(q.dtype if plan.splits else plan.dtype)
    grouped = plan.by_group(plan.pad_lanes(by_head))
    bounds = jnp.repeat(bounds, G, axis=1)[:, None]
    bounds = jnp.broadcast_to(bounds, (tiles.count, K, tile * G, 2))
    bounds = plan.by_group(bounds)[:, 0]  # equal in all groups
    sink = jnp.full((H,), -jnp.inf, jnp.float32) if sinks is None else sinks
    sink = jnp.broadcast_to(sink.reshape(K, 1, G), (K, tile, G)).reshape(K, tile * G, 1)
    sink = plan.by_group(sink) * LOG2_E
    table = jnp.pad(page_table, ((0, 0), (0, plan.table_width - M))).reshape(-1)

    out, lse = _call(plan, tiles, scalars, grouped, bounds, sink, table, pages, q.dtype)

    index = tiles.place_of(ragged, T, tile)
    out = plan.gather(plan.by_head(out)).reshape(tiles.count, K, tile, G, D)
    lse = plan.by_head(lse.swapaxes(1, 2)[..., None]).reshape(tiles.count, K, tile, G)
    out = times_fixed_scales(out[index[0], :, index[1]].reshape(T, H, D), pages, 1)
    lse = lse[index[0], :, index[1]].reshape(T, H)
    padding = ragged.rows(T)[1] == PADDING
    return (
        jnp.where(padding[:, None, None], 0, out),
        jnp.where(padding[:, None], -jnp.inf, lse),
    )


def _scalars(plan: Plan, tiles: Tiles, bounds: jax.Array) -> jax.Array:
    """What the kernel asks of each tile, `[len(FIELDS) * (count + 1)]` int32, field by field.

    The entry behind the last tile stands for the end.
    """
    S = plan.block_tokens
    rows = jnp.arange(bounds.shape[1], dtype=jnp.int32)
    live = rows[None] < (tiles.end_row - tiles.first_row)[:, None]
    inner_low = jnp.where(live, bounds[..., 0], 0).max(axis=1)
    inner_high = jnp.where(live, bounds[..., 1], jnp.iinfo(jnp.int32).max).min(axis=1)
    first = tiles.low // S
    last = jnp.maximum(-(-tiles.high // S), first + 1)
    fast_first = jnp.clip(-(-inner_low // S), first, last)
    # The blocks that are fetched meanwhile have to be whole as well.
    fast_last = jnp.clip(inner_high // S - (plan.num_buffers - 1), fast_first, last)
    fields = dict(
        seq=tiles.seq,
        first=first,
        fast_first=fast_first,
        fast_last=fast_last,
        last=last,
        low=tiles.low,
        high=tiles.high,
    )
    return jnp.concatenate([jnp.pad(fields[name], (0, 1)) for name in FIELDS])


def _call(
    plan: Plan,
    tiles: Tiles,
    scalars: jax.Array,
    q: jax.Array,
    bounds: jax.Array,
    sink: jax.Array,
    table: jax.Array,
    pages: KernelPages,
    out_dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel over the tiles in use."""
    groups, R, lanes = plan.num_groups, plan.rows, plan.out_lanes
    pools = list(pages.paged.values())
    of_block = (plan.num_buffers, plan.pages_per_block)

    def of_tile(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda t, *_: (t, *(0 for _ in shape)))

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(tiles.num_live,),
        in_specs=[
            of_tile(*q.shape[1:]),
            of_tile(R, 2),
            pl.BlockSpec((groups, R, 1), lambda t, *_: (0, 0, 0)),
            *[pl.BlockSpec(memory_space=pltpu.HBM)] * (1 + len(pools)),
        ],
        out_specs=[of_tile(groups, R, lanes), of_tile(R, groups)],
        scratch_shapes=[
            pltpu.SMEM((plan.num_buffers * plan.table_width,), jnp.int32),
            pltpu.SMEM((3,), jnp.int32),
            [pltpu.VMEM((*of_block, *pool.shape[1:]), pool.dtype) for pool in pools],
            pltpu.VMEM((groups, R, LANES), jnp.float32),
            pltpu.VMEM((groups, R, LANES), jnp.float32),
            pltpu.VMEM((groups, R, plan.group * lanes), jnp.float32),
            plan.prepares_q
            * [pltpu.VMEM((groups, plan.q_rows, plan.group * q.shape[3]), plan.dtype)],
            plan.splits * [pltpu.VMEM((groups, R, LANES), jnp.float32)],
            2 * plan.affine * [pltpu.VMEM((groups, R, LANES), jnp.float32)],
            pltpu.SemaphoreType.DMA((plan.num_buffers,)),
            pltpu.SemaphoreType.DMA((plan.num_buffers,)),
        ],
    )
    out_shape = (
        jax.ShapeDtypeStruct((tiles.count, groups, R, lanes), out_dtype),
        jax.ShapeDtypeStruct((tiles.count, R, groups), jnp.float32),
    )
    return pl.pallas_call(
        functools.partial(_kernel, plan, tiles.count),
        out_shape=out_shape,
        grid_spec=grid_spec,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,
            vmem_limit_bytes=tuning.vmem_bytes() * 7 // 8,
        ),
        name="ragged_paged_attention",
    )(scalars, q, bounds, sink, table, *pools)


def _kernel(
    plan: Plan,
    count: int,
    scalars: Ref,
    *refs: Any,
) -> None:
    """One tile of query rows."""
    rows, bounds, sink, table, *others = refs
    *pools, out, lse, ids, cursor, buffers, maximum, total, weighted = others[:-5]
    prepared, factor, affine, ids_in, pages_in = others[-5:]
    q = prepared[0] if plan.prepares_q else rows.at[0]
    t, ahead = pl.program_id(0), plan.num_buffers - 1
    tile = TileScalars(scalars, count)
    fetch = Fetch(plan, tile, table, pools, ids, cursor, buffers, ids_in, pages_in)
    softmax = Softmax(plan, bounds, buffers, maximum, total, weighted, q, factor, affine)
    pl.when(t == 0)(fetch.begin)
    fetch.start_ids(t + ahead)
    softmax.begin(rows)
    first, last = tile.first(t), tile.last(t)
    fast_first, fast_last = tile.fast_first(t), tile.fast_last(t)
    number = cursor[0] - first  # of block 0, counted over all tiles

    def general(j: jax.Array, _: None) -> None:
        fetch.start_next(number + j + ahead)
        softmax.add(fetch.wait(t, j, number + j), j, masked=True)

    def fast(j: jax.Array, _: None) -> None:
        start = functools.partial(fetch.start_share, t, j + ahead, number + j + ahead)
        softmax.add(fetch.wait_whole(number + j), j, between=start)

    if plan.options.window is not None or plan.options.keys is not None:
        lax.fori_loop(first, fast_first, general, None)
    lax.fori_loop(fast_first, fast_last, fast, None)
    pl.when(fast_last > fast_first)(lambda: fetch.move_behind(t, fast_last + ahead - 1))
    lax.fori_loop(fast_last, last, general, None)
    cursor[0] = number + last
    softmax.finish(sink, out, lse)
