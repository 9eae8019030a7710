"""Ragged paged attention for TPUs: one kernel that streams pages past tiles of query rows.

    grid       one step a tile of rows; the G heads that share a KV head are rows of the same tile
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

A row of a page is K and V of a token and head, side by side. Where they share registers, the row is
an operand of both products as it is: q is 0 in V's lanes, and K's lanes of the output are dropped.

Codes come with the parameters of their page by a second DMA; fixed scales go into the queries and
the output. Parameters multiply logits and weights, a number a key, not the codes. Source:
FlashAttention-2, arXiv 2307.08691; the pipeline of pages is that of Ragged Paged Attention, arXiv
2604.15464.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention import tuning
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.ragged import PADDING, Ragged
from pallas_kernels.attention.tiles import Tiles
from pallas_kernels.attention.tuning import BlockSizes, Tile
from pallas_kernels.pages import Pages
from pallas_kernels.quantised_pages import AffinePages, AnyPages, SymmetricPages

LANES, SUBLANES = 128, 8
LOG2_E = math.log2(math.e)
MAX_TABLE_WIDTH = 1 << 16  # page ids of a sequence: two rows of them must fit into SMEM
KernelPages = Pages | SymmetricPages | AffinePages
Ref = Any
Scalar = jax.Array | int  # int32, traced where it is an array


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
    single = ragged.query_starts[1:] - ragged.query_starts[:-1] == 1
    tile = max(SUBLANES, _sizes(pages, "rows").tile_rows // (H // K))
    seq, _ = ragged.rows(T)
    chosen = single[seq]
    of_one, of_many = attend(1, single), attend(tile, ~single)
    return (
        jnp.where(chosen[:, None, None], of_one[0], of_many[0]),
        jnp.where(chosen[:, None], of_one[1], of_many[1]),
    )


@dataclass(frozen=True)
class _Plan:
    """Static sizes of a call of the kernel.

    Attributes:
      row_size: elements of a page's row that are K, and V: D, less where bytes hold several codes.
      parts: codes of a byte, or 1; channels `[p row_size, (p + 1) row_size)` are part p.
      affine: codes have a minimum, too.
      rows: R, query rows of a tile times G, rounded up.
      block_tokens: keys of a block.
      num_buffers, heads_ahead: see `BlockSizes`.
      table_width: page ids of a sequence, rounded up.
      dtype: in which products are taken.
      options: of the call.
    """

    num_kv_heads: int
    row_size: int
    parts: int
    affine: bool
    page_size: int
    rows: int
    block_tokens: int
    num_buffers: int
    heads_ahead: int
    table_width: int
    dtype: jnp.dtype
    options: AttentionOptions

    @classmethod
    def choose(
        cls, q: jax.Array, pages: KernelPages, tile: int, M: int, options: AttentionOptions
    ) -> "_Plan":
        K = pages.num_kv_heads
        f32 = jnp.float32 in (q.dtype, pages.kv.dtype)
        kind = "row" if tile == 1 else "rows"
        sizes = _sizes(pages, kind)
        return cls(
            num_kv_heads=K,
            row_size=pages.row_size,
            parts=pages.head_dim // pages.row_size,
            affine=isinstance(pages, AffinePages),
            page_size=pages.page_size,
            rows=_round_up(tile * (q.shape[1] // K), SUBLANES),
            block_tokens=block_tokens(pages, kind),
            num_buffers=sizes.num_buffers,
            heads_ahead=min(sizes.heads_ahead, K),
            table_width=_round_up(M, 1024),
            dtype=jnp.dtype(jnp.float32 if f32 else jnp.bfloat16),
            options=options,
        )

    @property
    def pages_per_block(self) -> int:
        return self.block_tokens // self.page_size

    @property
    def k_lanes(self) -> range:
        """Lanes of a row in whole registers that have all of K, or to the row's end."""
        return range(min(_round_up(self.row_size, LANES), 2 * self.row_size))

    @property
    def v_lanes(self) -> range:
        """The same of V, which ends a row."""
        return range(self.row_size // LANES * LANES, 2 * self.row_size)

    def spread(self, q: jax.Array) -> jax.Array:
        """Puts `[..., D]` where the lanes of K are, 0 elsewhere: `[..., parts * len(k_lanes)]`."""
        q = q.reshape(*q.shape[:-1], self.parts, self.row_size)
        unused = len(self.k_lanes) - self.row_size
        q = jnp.pad(q, [*[(0, 0)] * (q.ndim - 1), (0, unused)])
        return q.reshape(*q.shape[:-2], -1)

    def gather(self, out: jax.Array) -> jax.Array:
        """Takes `[..., D]` out of `[..., parts * len(v_lanes)]`."""
        out = out.reshape(*out.shape[:-1], self.parts, len(self.v_lanes))
        out = out[..., len(self.v_lanes) - self.row_size :]
        return out.reshape(*out.shape[:-2], self.parts * self.row_size)


def block_tokens(pages: KernelPages, tile: Tile) -> int:
    """Keys of a block, for the chip that is compiled for."""
    step = math.lcm(pages.page_size, LANES)  # whole pages and whole registers
    token = pages.num_kv_heads * _round_up(2 * pages.row_size, LANES) * pages.kv.dtype.itemsize
    sizes = _sizes(pages, tile)
    # An eighth of the fast memory for a buffer leaves room for tiles of queries.
    most = min(sizes.block_bytes, tuning.vmem_bytes() // 8) // token
    return step * max(1, min(sizes.block_tokens, most) // step)


def _sizes(pages: KernelPages, tile: Tile) -> BlockSizes:
    return tuning.block_sizes(tile, pages.kv.dtype.name)


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


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
    plan = _Plan.choose(q, pages, tile, M, options)
    R = plan.rows
    tiles = Tiles.plan(ragged, T, tile, options, taken)

    rows = tiles.first_row[:, None] + jnp.arange(tile, dtype=jnp.int32)[None]  # [count, tile]
    _, position = ragged.place(rows, tiles.seq[:, None])
    bounds = jnp.stack(options.bounds(position), axis=-1)  # [count, tile, 2]
    scalars = _scalars(plan, tiles, bounds)
    fixed = pages.scales if isinstance(pages, SymmetricPages) and pages.is_static else None
    if fixed is not None:
        q = _times(q, jnp.repeat(fixed[0::2], G))
    grouped = q.at[rows].get(mode="clip").reshape(tiles.count, tile, K, G, D)
    grouped = grouped.transpose(0, 2, 1, 3, 4).reshape(tiles.count, K, tile * G, D)
    unused = R - tile * G
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, unused), (0, 0))).astype(plan.dtype)
    grouped = plan.spread(grouped)
    bounds = jnp.pad(jnp.repeat(bounds, G, axis=1), ((0, 0), (0, unused), (0, 0)))
    sink = jnp.full((H,), -jnp.inf, jnp.float32) if sinks is None else sinks
    sink = jnp.broadcast_to(sink.reshape(K, 1, G), (K, tile, G)).reshape(K, tile * G)
    sink = jnp.pad(sink, ((0, 0), (0, unused)))[:, :, None] * LOG2_E
    table = jnp.pad(page_table, ((0, 0), (0, plan.table_width - M))).reshape(-1)

    out, lse = _call(plan, tiles, scalars, grouped, bounds, sink, table, pages, q.dtype)

    index = tiles.place_of(ragged, T, tile)
    out = plan.gather(out)[:, :, : tile * G].reshape(tiles.count, K, tile, G, D)
    lse = lse[:, :, : tile * G, 0].reshape(tiles.count, K, tile, G)
    out = out[index[0], :, index[1]].reshape(T, H, D)
    lse = lse[index[0], :, index[1]].reshape(T, H)
    if fixed is not None:
        out = _times(out, jnp.repeat(fixed[1::2], G))
    padding = ragged.rows(T)[1] == PADDING
    return (
        jnp.where(padding[:, None, None], 0, out),
        jnp.where(padding[:, None], -jnp.inf, lse),
    )


def _times(x: jax.Array, by_head: jax.Array) -> jax.Array:
    """`x [T, H, D]` times a number a head, in float32."""
    return (x.astype(jnp.float32) * by_head[None, :, None]).astype(x.dtype)


_FIELDS = ("seq", "first", "fast_first", "fast_last", "last", "low", "high")


def _scalars(plan: _Plan, tiles: Tiles, bounds: jax.Array) -> jax.Array:
    """What the kernel asks of each tile, `[len(_FIELDS) * (count + 1)]` int32, field by field.

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
    return jnp.concatenate([jnp.pad(fields[name], (0, 1)) for name in _FIELDS])


def _call(
    plan: _Plan,
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
    K, R = plan.num_kv_heads, plan.rows
    q_lanes, out_lanes = q.shape[-1], plan.parts * len(plan.v_lanes)
    pools = list(pages.paged.values())
    of_block = (plan.num_buffers, plan.pages_per_block)

    def of_tile(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda t, *_: (t, *(0 for _ in shape)))

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(tiles.num_live,),
        in_specs=[
            of_tile(K, R, q_lanes),
            of_tile(R, 2),
            pl.BlockSpec((K, R, 1), lambda t, *_: (0, 0, 0)),
            *[pl.BlockSpec(memory_space=pltpu.HBM)] * (1 + len(pools)),
        ],
        out_specs=[of_tile(K, R, out_lanes), of_tile(K, R, 1)],
        scratch_shapes=[
            pltpu.SMEM((plan.num_buffers * plan.table_width,), jnp.int32),
            pltpu.SMEM((3,), jnp.int32),
            [pltpu.VMEM((*of_block, *pool.shape[1:]), pool.dtype) for pool in pools],
            pltpu.VMEM((K, R, LANES), jnp.float32),
            pltpu.VMEM((K, R, LANES), jnp.float32),
            pltpu.VMEM((K, R, out_lanes), jnp.float32),
            [pltpu.VMEM((K, R, LANES), jnp.float32) for _ in range(2 * plan.affine)],
            pltpu.SemaphoreType.DMA((plan.num_buffers,)),
            pltpu.SemaphoreType.DMA((plan.num_buffers,)),
        ],
    )
    out_shape = (
        jax.ShapeDtypeStruct((tiles.count, K, R, out_lanes), out_dtype),
        jax.ShapeDtypeStruct((tiles.count, K, R, 1), jnp.float32),
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
    plan: _Plan,
    count: int,
    scalars: Ref,
    q: Ref,
    bounds: Ref,
    sink: Ref,
    table: Ref,
    *refs: Ref,
) -> None:
    """One tile of query rows."""
    *pools, out, lse, ids, cursor, buffers, maximum, total, weighted, affine, ids_in, pages_in = (
        refs
    )
    t, ahead = pl.program_id(0), plan.num_buffers - 1
    tile = _TileScalars(scalars, count)
    fetch = _Fetch(plan, tile, table, pools, ids, cursor, buffers, ids_in, pages_in)
    softmax = _Softmax(plan, q, bounds, buffers, maximum, total, weighted, affine)
    pl.when(t == 0)(fetch.begin)
    fetch.start_ids(t + ahead)
    softmax.clear()
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


@dataclass(frozen=True)
class _TileScalars:
    """What `_scalars` says of tile t; blocks [first, last) hold all its keys, [low, high)."""

    ref: Ref
    count: int

    def _read(self, name: str, t: Scalar) -> jax.Array:
        return self.ref[_FIELDS.index(name) * (self.count + 1) + t]

    def __getattr__(self, name: str) -> Callable[[Scalar], jax.Array]:
        return functools.partial(self._read, name)


@dataclass(frozen=True)
class _Fetch:
    """Blocks of pages on their way from HBM, `num_buffers - 1` ahead of the one in work.

    Blocks are numbered over all tiles, and number k goes to buffer `k % num_buffers`. The cursor
    outlives a grid step: number of blocks consumed before this tile, then tile and block to fetch
    next.
    """

    plan: _Plan
    tile: _TileScalars
    table: Ref
    pools: Sequence[Ref]
    ids: Ref
    cursor: Ref
    buffers: Sequence[Ref]
    ids_arrived: Ref
    pages_arrived: Ref

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
        """Starts a head's share of block j of tile t, number k, all of whose pages are there."""
        n, K = self.plan.pages_per_block, self.plan.num_kv_heads
        self._start(t, j, k, range(share * n // K, (share + 1) * n // K))

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
        # Of the block's tokens [start, end) are seen; what is not may be NaN, and 0 * NaN is NaN.
        P, S = jnp.int32(self.plan.page_size), self.plan.block_tokens
        start = jnp.clip(self.tile.low(t) - j * S, 0, S)
        end = jnp.clip(self.tile.high(t) - j * S, start, S)

        def blank(i: Scalar, _: None) -> None:
            for buffer in self.buffers:
                page = buffer[slot, i]
                token = i * P + lax.broadcasted_iota(jnp.int32, page.shape, 1)
                seen = (token >= start) & (token < end)
                buffer[slot, i] = jnp.where(seen, page, jnp.zeros_like(page))

        lax.fori_loop(0, lax.div(start + P - 1, P), blank, None)
        lax.fori_loop(lax.div(end, P), self.plan.pages_per_block, blank, None)
        return slot

    def wait_whole(self, k: Scalar) -> Scalar:
        """Waits for block number k, of which every row sees all; returns its buffer's number."""
        self._wait(k, self.plan.pages_per_block)
        return self._slot(k)

    def _wait(self, k: Scalar, num_pages: Scalar) -> None:
        """Waits for so many pages of block number k: it is their bytes that count."""
        slot = self._slot(k)
        for buffer in self.buffers:
            pages = buffer.at[slot, pl.ds(0, num_pages)]
            pltpu.make_async_copy(pages, pages, self.pages_arrived.at[slot]).wait()

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
        place = self._slot(t) * self.plan.table_width + j * self.plan.pages_per_block + i
        page = self.ids[place]
        for pool, buffer in zip(self.pools, self.buffers, strict=True):
            arrived = self.pages_arrived.at[slot]
            pltpu.make_async_copy(pool.at[page], buffer.at[slot, i], arrived).start()

    def _ids(self, t: Scalar) -> Any:
        width, slot = self.plan.table_width, self._slot(t)
        start = pl.multiple_of(self.tile.seq(t) * width, width)
        row, target = self.table.at[pl.ds(start, width)], self.ids.at[pl.ds(slot * width, width)]
        return pltpu.make_async_copy(row, target, self.ids_arrived.at[slot])


@dataclass(frozen=True)
class _Softmax:
    """The online softmax of one tile, logits in units of log 2.

    `total` keeps a partial sum a lane, `maximum` the same value in all lanes. Where codes have a
    minimum, `affine` holds the sum of a row's q, by which K's minima multiply, in all lanes, and
    the sum of V's minima by weight, in parts a lane.
    """

    plan: _Plan
    q: Ref
    bounds: Ref
    buffers: Sequence[Ref]
    maximum: Ref
    total: Ref
    weighted: Ref
    affine: Sequence[Ref]

    def clear(self) -> None:
        """No key yet."""
        if self.plan.affine:
            q_sum, minima = self.affine
            for h in range(self.plan.num_kv_heads):
                row = self.q[0, h].astype(jnp.float32).sum(axis=1, keepdims=True)
                q_sum[h] = jnp.broadcast_to(row, q_sum.shape[1:])
            minima[...] = jnp.zeros(minima.shape, jnp.float32)
        self.maximum[...] = jnp.full(self.maximum.shape, -jnp.inf, jnp.float32)
        self.total[...] = jnp.zeros(self.total.shape, jnp.float32)
        self.weighted[...] = jnp.zeros(self.weighted.shape, jnp.float32)

    def add(
        self,
        slot: Scalar,
        j: Scalar,
        *,
        masked: bool = False,
        between: Callable[[int], None] = lambda head: None,
    ) -> None:
        """Adds block j of the keys, which is in a buffer.

        Args:
          slot: of the buffer.
          j: of the block.
          masked: some row does not see all of it.
          between: called before each head's second product, with the head: scalar work, which the
            compiler then lays under the products.
        """
        # Some heads' first products go ahead: their softmax then runs under other products.
        K, k_parts, logits = self.plan.num_kv_heads, {}, {}
        visible = self._visible(j) if masked else None
        scales, minima = self._parameters(slot)
        lead = self.plan.heads_ahead
        for i in range(K + lead):
            if i < K:
                k_parts[i] = self._parts(slot, i, self.plan.k_lanes)
                logits[i] = self._logits(k_parts[i], i, scales, minima)
                if visible is not None:
                    logits[i] = jnp.where(visible, logits[i], -jnp.inf)
            h = i - lead
            if h < 0:
                continue
            weights, decay = self._weigh(h, logits.pop(h))
            between(h)
            if minima is not None:
                self._add_minima(h, weights * _row(minima, 2 * h + 1), decay)
            if scales is not None:
                weights = weights * _row(scales, 2 * h + 1)
            weights = weights.astype(self.plan.dtype)
            v_parts = k_parts.pop(h)
            if self.plan.parts == 1 or self.plan.k_lanes != self.plan.v_lanes:
                v_parts = self._parts(slot, h, self.plan.v_lanes)  # loads cost less than registers
            added = jnp.concatenate([self._dot(weights, v, 1, 0) for v in v_parts], axis=1)
            self.weighted[h] = self.weighted[h] * decay + added

    def finish(self, sink: Ref, out: Ref, lse: Ref) -> None:
        """Normalises; the sink joins the denominator here, once."""
        for h in range(self.plan.num_kv_heads):
            m = self.maximum[h][:, :1]
            m_new = _finite(jnp.maximum(m, sink[h]))
            decay = jnp.exp2(m - m_new)
            total = self.total[h].sum(axis=1, keepdims=True) * decay + jnp.exp2(sink[h] - m_new)
            safe = jnp.where(total == 0.0, 1.0, total)
            weighted = self.weighted[h]
            if self.plan.affine:
                weighted += self.affine[1][h].sum(axis=1, keepdims=True)
            out[0, h] = (weighted * (decay / safe)).astype(out.dtype)
            lse[0, h] = m_new / LOG2_E + jnp.log(total)

    def _parts(self, slot: Scalar, h: int, lanes: range) -> list[jax.Array]:
        """Some lanes of a head's rows, `[block_tokens, len(lanes)]`, for each of the codes of a
        byte."""
        plan = self.plan
        rows = self.buffers[0][slot, :, h, :, lanes.start : lanes.stop]
        shape = plan.block_tokens, len(lanes)
        if plan.parts == 1:
            return [rows.astype(plan.dtype).reshape(shape)]
        rows, bits = rows.astype(jnp.int32).reshape(shape), 8 // plan.parts
        codes = [rows >> bits * part & (1 << bits) - 1 for part in range(plan.parts)]
        return [code.astype(jnp.float32).astype(plan.dtype) for code in codes]

    def _parameters(self, slot: Scalar) -> tuple[jax.Array | None, jax.Array | None]:
        """Scales and minima of a block's codes, `[2K, block_tokens]`, where pages have them."""
        if len(self.buffers) == 1:
            return None, None
        pages = range(self.plan.pages_per_block)
        stored = jnp.concatenate([self.buffers[1][slot, i] for i in pages], axis=1)
        if not self.plan.affine:
            return stored, None
        return _from_float16(stored & 0xFFFF), _from_float16(stored >> 16)

    def _logits(
        self,
        k_parts: list[jax.Array],
        h: int,
        scales: jax.Array | None,
        minima: jax.Array | None,
    ) -> jax.Array:
        options, lanes = self.plan.options, self.plan.k_lanes
        products = [
            self._dot(self.q[0, h, :, i * len(lanes) : (i + 1) * len(lanes)], k, 1, 1)
            for i, k in enumerate(k_parts)
        ]
        x = functools.reduce(operator.add, products)
        if scales is not None:
            x = x * _row(scales, 2 * h)
        if minima is not None:
            x += self.affine[0][h][:, :1] * _row(minima, 2 * h)
        if options.soft_cap is None:
            return x * (options.scale * LOG2_E)
        x = jnp.tanh(x * (options.scale / options.soft_cap))
        return x * (options.soft_cap * LOG2_E)

    def _weigh(self, h: int, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The weights of a block's keys, and the factor on what came before."""
        m = self.maximum[h]
        m_new = jnp.maximum(m, logits.max(axis=1, keepdims=True))
        finite = _finite(m_new)
        decay = jnp.exp2(m - finite)
        weights, total = [], self.total[h] * decay
        for start in range(0, self.plan.block_tokens, LANES):
            weights.append(jnp.exp2(logits[:, start : start + LANES] - finite))
            total += weights[-1]
        self.maximum[h], self.total[h] = m_new, total
        return jnp.concatenate(weights, axis=1), decay[:, :1]

    def _add_minima(self, h: int, weighted: jax.Array, decay: jax.Array) -> None:
        """Adds what a block's keys add to all channels, `[R, block_tokens]`."""
        minima = self.affine[1]
        parts = range(0, self.plan.block_tokens, LANES)
        added = sum(weighted[:, start : start + LANES] for start in parts)
        minima[h] = minima[h] * decay + added

    def _visible(self, j: Scalar) -> jax.Array:
        """Which keys of block j each row sees, `[R, block_tokens]`."""
        bounds = self.bounds[0]
        R, S = self.plan.rows, self.plan.block_tokens
        key = j * S + lax.broadcasted_iota(jnp.int32, (R, S), 1)
        return (key >= bounds[:, :1]) & (key < bounds[:, 1:])

    def _dot(self, a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
        highest = lax.Precision.HIGHEST if self.plan.dtype == jnp.float32 else None
        return lax.dot_general(
            a,
            b,
            (((axis_a,), (axis_b,)), ((), ())),
            precision=highest,
            preferred_element_type=jnp.float32,
        )


def _row(x: jax.Array, i: int) -> jax.Array:
    return x[i : i + 1]


def _from_float16(bits: jax.Array) -> jax.Array:
    """The float32 of a finite float16's bits (uint32): a TPU has no such type."""
    size = bits & 0x7FFF
    normal = lax.bitcast_convert_type((size << 13) + (112 << 23), jnp.float32)
    small = size.astype(jnp.int32).astype(jnp.float32) * 2.0**-24  # no implicit leading 1
    value = jnp.where(size < 0x400, small, normal)
    return jnp.where(bits > 0x7FFF, -value, value)


def _finite(x: jax.Array) -> jax.Array:
    """0 for -inf: where no key has come yet, exp2(-inf - 0) is 0, not NaN."""
    return jnp.where(x == -jnp.inf, 0.0, x)
