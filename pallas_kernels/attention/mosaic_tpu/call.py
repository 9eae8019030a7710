"""Ragged paged attention for TPUs: one kernel that streams pages past tiles of query rows.

    grid       one step per tile of rows. The G heads that share a KV head are rows of one tile; so
               are those of a group of KV heads, if all of them fit into a register
    keys       a tile walks the blocks of keys that its rows see, with an online softmax
    pages      arrive by one DMA each, K and V of every head, `num_buffers - 1` blocks ahead: the
               last blocks of a tile already fetch the first ones of the next tile
    page ids   a sequence's row of the page table is copied to SMEM one tile ahead

                 first      fast_first              fast_last     last
    blocks        | masked   | whole, next ones whole | masked    |

A block that all rows see whole, and whose successors they see whole too, needs no mask and no
decision about what to fetch. In a long context most blocks are such. The other blocks go through a
general path with the same arithmetic. Blocks begin at multiples of `block_tokens`, so the sums of a
row are split at the same places whatever else is in the batch.

If each sequence has one query, a tile is one query, that is G rows. Longer sequences are cut into
tiles of many queries, in a second call of the kernel.

A row of a page is K and V of a token and head, cut into pieces as wide as a register. A piece that
has some of both is an operand of both products as it is: q is 0 in the lanes of V, and the lanes of
K are dropped from the output.

Pages of codes have parameters, which arrive by a second DMA per page. They multiply logits and
weights, one number per key, and not the codes, which a tile of one query multiplies without
conversion if the chip can. Fixed scales multiply logits and outputs. Source: FlashAttention-2,
arXiv 2307.08691; the pipeline of pages is that of Ragged Paged Attention, arXiv 2604.15464.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import chips
from pallas_kernels.arith import LOG2_E, Ref, ceil_div
from pallas_kernels.attention.mosaic_tpu.fetch import Fetch, FetchScratch
from pallas_kernels.attention.mosaic_tpu.plan import (
    REGISTER_ROWS,
    SUBLANES,
    KernelPages,
    Plan,
    TileScalars,
    most_queries,
    packed,
)
from pallas_kernels.attention.mosaic_tpu.rows import Rows, RowsScratch
from pallas_kernels.attention.mosaic_tpu.softmax import Softmax, SoftmaxScratch
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.ragged import PADDING, Ragged
from pallas_kernels.attention.tiles import Tiles, attend_by_length
from pallas_kernels.checks import require
from pallas_kernels.pages import LANES
from pallas_kernels.quantised_pages import AnyPages, fixed_scales

MAX_TABLE_WIDTH = 1 << 16  # page ids of a sequence: two rows of them must fit into SMEM


def refusal(q: jax.Array, pages: AnyPages, page_table: jax.Array, *_: object) -> str | None:
    """Returns why the kernel does not take these arrays, or None if it does."""
    if not isinstance(pages, KernelPages):
        return f"{type(pages).__name__} are not read yet"
    if pages.layout != "paired":
        return "pages must be paired"
    if jnp.float16 in (q.dtype, pages.kv.dtype):  # no type of codes either
        return "float16 is no type of a TPU's vector unit"
    if pages.page_size % SUBLANES:
        return f"P = {pages.page_size} is not a multiple of {SUBLANES}"
    P, lanes = pages.page_size, pages.kv.shape[4]
    is_wide = lanes > LANES and lanes % LANES
    if pages.kv.dtype.itemsize == 1 and is_wide and P > 16 and P % REGISTER_ROWS:
        return (
            f"P = {P} of rows of {lanes} bytes, no multiple of {LANES}; 8, 16 or a multiple of 32"
        )
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
    """Computes `(out [T, H, D], lse [T, H])`; see `attention.reference` for the arguments."""
    T, B = q.shape[0], page_table.shape[0]
    attend = functools.partial(_attend, q, pages, page_table, ragged, sinks, options)
    many = most_queries(q, pages)
    if options.query_tile is not None or T <= B:
        return attend(min(options.query_tile or 1, many), None)
    return attend_by_length(
        ragged, T, functools.partial(attend, 1, B), functools.partial(attend, many, None)
    )


def _attend(
    q: jax.Array,
    pages: KernelPages,
    page_table: jax.Array,
    ragged: Ragged,
    sinks: jax.Array | None,
    options: AttentionOptions,
    tile: int,
    most: int | None,
    taken: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the rows of some sequences.

    Args:
      q, pages, page_table, ragged, sinks, options: those of the call.
      tile: queries of a tile.
      most: an upper bound on the number of tiles; None if none is known.
      taken: `[B]` bool, the sequences to compute; None for all.

    Returns:
      `(out [T, H, D], lse [T, H])`; rows of other sequences hold anything.

    Raises:
      ValueError: the scalars of the tiles do not fit into the chip's scalar memory.
    """
    (T, H, D), M = q.shape, page_table.shape[1]
    K = pages.num_kv_heads
    plan = Plan.choose(q, pages, tile, M, options)
    tiles = Tiles.plan(ragged, T, plan.num_chunks * plan.chunk, options, taken, most)
    chunks = Tiles.plan(ragged, T, plan.chunk, options, taken, most)
    smem = plan.smem_bytes(tiles.count)
    require(
        smem <= chips.SMEM_BYTES,
        f"{tiles.count} tiles of {tile} queries, and M = {M} page ids a sequence, take {smem} "
        f"bytes of a TPU's scalar memory, which has {chips.SMEM_BYTES}",
    )

    rows = chunks.first_row[:, None] + jnp.arange(plan.chunk, dtype=jnp.int32)[None]
    by_chunk = q.at[rows].get(mode="clip").reshape(*rows.shape, K, H // K, D)
    by_chunk = by_chunk.astype(q.dtype if plan.splits else plan.dtype)
    sink = jnp.full(H, -jnp.inf, jnp.float32) if sinks is None else sinks * LOG2_E
    # A pool that fits would be copied into fast memory whole, at each step.
    pools = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in pages.paged.values()]
    inputs = Inputs(
        queries=jnp.asarray(plan.queries()),
        sink=jnp.tile(plan.of_rows(sink), (1, plan.num_chunks, 1)),
        factors=_factors(pages, options),
        q=plan.by_group(plan.pad_lanes(by_chunk)),
        table=jnp.pad(page_table, ((0, 0), (0, plan.table_width - M))).reshape(-1),
        pools=pools,
    )
    scalars = packed(_tile_scalars(plan, tiles, chunks, ragged))
    out, lse = _call(plan, tiles, scalars, inputs, q.dtype)

    chunk, row = chunks.place_of(ragged, T, plan.chunk)
    out = plan.gather(plan.by_head(out))[chunk, :, row].reshape(T, H, D)
    lse = plan.by_head(lse.swapaxes(1, 2)[..., None])[chunk, :, row].reshape(T, H)
    padding = ragged.rows(T)[1] == PADDING
    return (
        jnp.where(padding[:, None, None], 0, out),
        jnp.where(padding[:, None], -jnp.inf, lse),
    )


class Inputs(NamedTuple):
    """The arrays that the kernel reads, in the order of its operands.

    Attributes:
      queries: `[rows, 1]` int32, index of each row's query within a tile.
      sink: `[groups, rows, 1]` float32, one more logit per row, in units of log 2.
      factors: `[2K]` float32, the factors of logits and outputs of each KV head, alternating.
      q: `[chunks, groups, chunk_rows, lanes]`.
      table: `[B * table_width]` int32, page ids.
      pools: the arrays of the pages.
    """

    queries: Ref
    sink: Ref
    factors: Ref
    q: Ref
    table: Ref
    pools: Sequence[Ref]


def _factors(pages: KernelPages, options: AttentionOptions) -> jax.Array:
    """Returns the factors of logits and outputs of each KV head, alternating, `[2K]`."""
    unit = LOG2_E if options.soft_cap is None else 1 / options.soft_cap
    factors = jnp.tile(jnp.array([options.scale * unit, 1.0], jnp.float32), pages.num_kv_heads)
    scales = fixed_scales(pages)
    return factors if scales is None else factors * scales


def _tile_scalars(
    plan: Plan, tiles: Tiles, chunks: Tiles, ragged: Ragged
) -> TileScalars[jax.Array]:
    """Returns the scalars of tiles, whose queries are also cut into `chunks`."""
    block = plan.block_tokens
    queries = tiles.end_row - tiles.first_row
    inner_low, _ = plan.options.bounds(tiles.position + queries - 1)
    _, inner_high = plan.options.bounds(tiles.position)
    first_chunk = chunks.starts[tiles.seq]
    first_chunk += (tiles.first_row - ragged.query_starts[tiles.seq]) // plan.chunk
    first = tiles.low // block
    last = jnp.maximum(ceil_div(tiles.high, block), first + 1)
    fast_first = jnp.clip(ceil_div(inner_low, block), first, last)
    # The blocks that are fetched meanwhile have to be whole as well.
    fast_last = jnp.clip(inner_high // block - (plan.num_buffers - 1), fast_first, last)
    is_seen = tiles.low < tiles.high  # else no page is, wherever the bounds lie in it
    return TileScalars(
        seq=tiles.seq,
        first=first,
        fast_first=fast_first,
        fast_last=fast_last,
        last=last,
        low=jnp.where(is_seen, tiles.low, 0),
        high=jnp.where(is_seen, tiles.high, 0),
        position=tiles.position,
        queries=queries,
        first_chunk=first_chunk,
    )


def _call(
    plan: Plan, tiles: Tiles, scalars: jax.Array, inputs: Inputs, out_dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel over the tiles in use.

    Args:
      plan: sizes.
      tiles: the tiles.
      scalars: their fields, see `plan.packed`.
      inputs: what the kernel reads.
      out_dtype: type of the output.

    Returns:
      Out `[chunks, groups, chunk_rows, out_lanes]` and lse `[chunks, chunk_rows, groups]`.
    """
    q, pools = inputs.q, inputs.pools
    out = jax.ShapeDtypeStruct((*q.shape[:3], plan.out_lanes), out_dtype)
    lse = jax.ShapeDtypeStruct((q.shape[0], plan.chunk_rows, plan.num_groups), jnp.float32)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    specs = Inputs(
        queries=pl.BlockSpec((plan.rows, 1), lambda *_: (0, 0)),
        sink=pl.BlockSpec(inputs.sink.shape, lambda *_: (0, 0, 0)),
        factors=pl.BlockSpec(memory_space=pltpu.SMEM),
        q=hbm,
        table=hbm,
        pools=[hbm] * len(pools),
    )
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(tiles.num_live,),
        in_specs=[specs],
        out_specs=[hbm, hbm],
        scratch_shapes=[
            RowsScratch.of(plan, q, out, lse),
            FetchScratch.of(plan, pools),
            SoftmaxScratch.of(plan, q.shape[3], len(pools) > 1),
        ],
    )
    return pl.pallas_call(
        functools.partial(_kernel, plan, tiles.count),
        out_shape=(out, lse),
        grid_spec=grid_spec,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,
            vmem_limit_bytes=chips.vmem_limit(),
        ),
        name="ragged_paged_attention",
    )(scalars, inputs)


def _kernel(
    plan: Plan,
    count: int,
    scalars: Ref,
    inputs: Inputs,
    out: Ref,
    lse: Ref,
    of_rows: RowsScratch,
    of_fetch: FetchScratch,
    of_softmax: SoftmaxScratch,
) -> None:
    """Computes one tile of query rows."""
    t, ahead = pl.program_id(0), plan.num_buffers - 1
    tiles = TileScalars.columns(scalars, count)
    rows = Rows(plan, tiles, t, inputs.q, out, lse, of_rows)
    fetch = Fetch(plan, tiles, inputs.table, inputs.pools, of_fetch)
    softmax = Softmax(
        plan=plan,
        tiles=tiles,
        t=t,
        rows=rows,
        queries=inputs.queries,
        sink=inputs.sink,
        factors=inputs.factors,
        keys=of_fetch.keys,
        stored=of_fetch.parameters,
        scratch=of_softmax,
    )
    pl.when(t == 0)(fetch.begin)
    fetch.start_ids(t + ahead)
    rows.wait()
    softmax.begin()
    first, last = tiles.first[t], tiles.last[t]
    fast_first, fast_last = tiles.fast_first[t], tiles.fast_last[t]
    number = of_fetch.cursor[0] - first  # of block 0, counted over all tiles

    def general(j: jax.Array, _: None) -> None:
        fetch.start_next(number + j + ahead)
        softmax.add(fetch.wait(t, j, number + j), j, masked=True)

    def fast(j: jax.Array, _: None) -> None:
        start = functools.partial(fetch.start_share, t, j + ahead, number + j + ahead)
        softmax.add(fetch.wait_whole(number + j), j, between=start)

    if plan.options.window is not None or plan.options.keys is not None:
        lax.fori_loop(first, fast_first, general, None)
    lax.fori_loop(fast_first, fast_last, fast, None)
    pl.when(fast_last > fast_first)(lambda: fetch.move_past(t, fast_last + ahead - 1))
    lax.fori_loop(fast_last, last, general, None)
    of_fetch.cursor[0] = number + last
    rows.make_room()
    softmax.finish()
    rows.store()
