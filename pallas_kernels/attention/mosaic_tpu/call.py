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

Codes come with the parameters of their page by a second DMA; fixed scales multiply logits and
outputs. Parameters multiply logits and weights, a number a key, not the codes, which a tile of
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

from pallas_kernels import tpus
from pallas_kernels.attention.mosaic_tpu.fetch import Fetch, TileScalars
from pallas_kernels.attention.mosaic_tpu.plan import (
    FIELDS,
    LOG2_E,
    REGISTER_ROWS,
    SUBLANES,
    KernelPages,
    Plan,
    Ref,
    most_queries,
)
from pallas_kernels.attention.mosaic_tpu.rows import Rows
from pallas_kernels.attention.mosaic_tpu.softmax import Softmax
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.ragged import PADDING, Ragged
from pallas_kernels.attention.tiles import Tiles, attend_by_length
from pallas_kernels.checks import require
from pallas_kernels.pages import LANES
from pallas_kernels.quantised_pages import AnyPages, fixed_scales

MAX_TABLE_WIDTH = 1 << 16  # page ids of a sequence: two rows of them must fit into SMEM


def refusal(
    q: jax.Array, pages: AnyPages, page_table: jax.Array, *_: object
) -> str | None:
    """Why these arrays cannot be taken, or None."""
    if not isinstance(pages, KernelPages):
        return f"{type(pages).__name__} are not read yet"
    if pages.layout != "paired":
        return "pages must be paired"
    if jnp.float16 in (q.dtype, pages.kv.dtype):  # no type of codes either
        return "float16 is no type of a TPU's vector unit"
    if pages.page_size % SUBLANES:
        return f"P = {pages.page_size} is not a multiple of {SUBLANES}"
    P, L = pages.page_size, pages.kv.shape[4]
    is_wide = L > LANES and L % LANES
    if pages.kv.dtype.itemsize == 1 and is_wide and P > 16 and P % REGISTER_ROWS:
        return f"P = {P} of rows of {L} bytes, no multiple of {LANES}; 8, 16 or a multiple of 32"
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
    """Attention of the rows of the sequences `taken [B]`, which are `most` tiles if that is known;
    anything in the other rows."""
    (T, H, D), M = q.shape, page_table.shape[1]
    K = pages.num_kv_heads
    plan = Plan.choose(q, pages, tile, M, options)
    tiles = Tiles.plan(ragged, T, plan.num_chunks * plan.chunk, options, taken, most)
    chunks = Tiles.plan(ragged, T, plan.chunk, options, taken, most)
    smem = plan.smem_bytes(tiles.count)
    require(
        smem <= tpus.SMEM_BYTES,
        f"{tiles.count} tiles of {tile} queries, and M = {M} page ids a sequence, take {smem} "
        f"bytes of a TPU's scalar memory, which has {tpus.SMEM_BYTES}",
    )

    rows = chunks.first_row[:, None] + jnp.arange(plan.chunk, dtype=jnp.int32)[None]
    by_chunk = q.at[rows].get(mode="clip").reshape(*rows.shape, K, H // K, D)
    by_chunk = by_chunk.astype(q.dtype if plan.splits else plan.dtype)
    grouped = plan.by_group(plan.pad_lanes(by_chunk))
    sink = jnp.full(H, -jnp.inf, jnp.float32) if sinks is None else sinks * LOG2_E
    sink = jnp.tile(plan.of_rows(sink), (1, plan.num_chunks, 1))
    factors = _factors(pages, options)
    table = jnp.pad(page_table, ((0, 0), (0, plan.table_width - M))).reshape(-1)

    scalars = _scalars(plan, tiles, chunks, ragged)
    out, lse = _call(plan, tiles, scalars, sink, factors, grouped, table, pages, q.dtype)

    chunk, row = chunks.place_of(ragged, T, plan.chunk)
    out = plan.gather(plan.by_head(out))[chunk, :, row].reshape(T, H, D)
    lse = plan.by_head(lse.swapaxes(1, 2)[..., None])[chunk, :, row].reshape(T, H)
    padding = ragged.rows(T)[1] == PADDING
    return (
        jnp.where(padding[:, None, None], 0, out),
        jnp.where(padding[:, None], -jnp.inf, lse),
    )


def _factors(pages: KernelPages, options: AttentionOptions) -> jax.Array:
    """What logits and outputs are multiplied by, of each KV head by turns, `[2K]`."""
    unit = LOG2_E if options.soft_cap is None else 1 / options.soft_cap
    factors = jnp.tile(jnp.array([options.scale * unit, 1.0], jnp.float32), pages.num_kv_heads)
    scales = fixed_scales(pages)
    return factors if scales is None else factors * scales


def _scalars(plan: Plan, tiles: Tiles, chunks: Tiles, ragged: Ragged) -> jax.Array:
    """What the kernel asks of each tile, `[len(FIELDS) * (count + 1)]` int32, field by field.

    The entry behind the last tile stands for the end.
    """
    S = plan.block_tokens
    queries = tiles.end_row - tiles.first_row
    inner_low, _ = plan.options.bounds(tiles.position + queries - 1)
    _, inner_high = plan.options.bounds(tiles.position)
    first_chunk = chunks.starts[tiles.seq]
    first_chunk += (tiles.first_row - ragged.query_starts[tiles.seq]) // plan.chunk
    first = tiles.low // S
    last = jnp.maximum(-(-tiles.high // S), first + 1)
    fast_first = jnp.clip(-(-inner_low // S), first, last)
    # The blocks that are fetched meanwhile have to be whole as well.
    fast_last = jnp.clip(inner_high // S - (plan.num_buffers - 1), fast_first, last)
    is_seen = tiles.low < tiles.high  # else no page is, wherever the bounds lie in it
    fields = dict(
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
    return jnp.concatenate([jnp.pad(fields[name], (0, 1)) for name in FIELDS])


def _call(
    plan: Plan,
    tiles: Tiles,
    scalars: jax.Array,
    sink: jax.Array,
    factors: jax.Array,
    q: jax.Array,
    table: jax.Array,
    pages: KernelPages,
    out_dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel over the tiles in use."""
    groups, R = plan.num_groups, plan.rows
    # A pool that fits would be brought into fast memory whole, at each step.
    pools = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in pages.paged.values()]
    out = jax.ShapeDtypeStruct((*q.shape[:3], plan.out_lanes), out_dtype)
    lse = jax.ShapeDtypeStruct((q.shape[0], plan.chunk_rows, groups), jnp.float32)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(tiles.num_live,),
        in_specs=[
            pl.BlockSpec((R, 1), lambda *_: (0, 0)),
            pl.BlockSpec(sink.shape, lambda *_: (0, 0, 0)),
            pl.BlockSpec(memory_space=pltpu.SMEM),
            *[hbm] * (2 + len(pools)),
        ],
        out_specs=[hbm, hbm],
        scratch_shapes=[
            Rows.scratch(plan, q, out, lse),
            Fetch.scratch(plan, pools),
            Softmax.scratch(plan, q.shape[3], len(pools) > 1),
        ],
    )
    return pl.pallas_call(
        functools.partial(_kernel, plan, tiles.count),
        out_shape=(out, lse),
        grid_spec=grid_spec,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,
            vmem_limit_bytes=tpus.vmem_limit(),
        ),
        name="ragged_paged_attention",
    )(scalars, jnp.asarray(plan.queries()), sink, factors, q, table, *pools)


def _kernel(
    plan: Plan,
    count: int,
    scalars: Ref,
    *refs: Any,
) -> None:
    """One tile of query rows."""
    queries, sink, factors, q, table, *pools, out, lse, of_rows, of_fetch, of_softmax = refs
    t, ahead = pl.program_id(0), plan.num_buffers - 1
    tile = TileScalars(scalars, count)
    rows = Rows(plan, tile, t, q, (out, lse), *of_rows)
    fetch = Fetch(plan, tile, table, pools, *of_fetch)
    softmax = Softmax(plan, tile, t, rows, queries, sink, factors, fetch.buffers, *of_softmax)
    pl.when(t == 0)(fetch.begin)
    fetch.start_ids(t + ahead)
    rows.wait()
    softmax.begin()
    first, last = tile.first(t), tile.last(t)
    fast_first, fast_last = tile.fast_first(t), tile.fast_last(t)
    number = fetch.cursor[0] - first  # of block 0, counted over all tiles

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
    fetch.cursor[0] = number + last
    rows.make_room()
    softmax.finish()
    rows.store()
