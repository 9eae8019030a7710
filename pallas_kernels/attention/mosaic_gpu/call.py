"""Ragged paged attention for NVIDIA GPUs of the Hopper kind (sm90).

    tiles      query rows of a sequence; the G heads that share a KV head are rows of one tile
    items      a tile's keys, cut at multiples of `split`: the work of all processors, in one list
    walk       one kernel takes item after item (`walk`): partial results, float32
    merge      another joins each tile's items in the order of their keys (`merge`)

The list is made on the device from the true lengths, so that no step waits for the host and no
work follows the table's width. Items are cut at the same keys whatever the batch, and merged in
one order: a row's bits depend on its own query and keys.

Where each sequence has one query, a tile is that query's G heads; longer ones are cut into tiles of
many rows, in a call of their own. Products are taken in the type of the pages, to which queries and
weights are rounded; sums and maxima are float32.

A token of K and V is read once a tile. At decode that is one read a step, for G products a number:
the bytes bound it. Source: FlashAttention-2, arXiv 2307.08691; Flash-Decoding's splits.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import gpus
from pallas_kernels.attention.mosaic_gpu.merge import STATS, merge
from pallas_kernels.attention.mosaic_gpu.plan import LOG2_E, PRODUCT, Plan
from pallas_kernels.attention.mosaic_gpu.walk import walk
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.ragged import PADDING, Ragged, owner
from pallas_kernels.attention.tiles import Tiles, attend_by_length
from pallas_kernels.online_softmax import merge_partials
from pallas_kernels.pages import Pages
from pallas_kernels.quantised_pages import AnyPages, SymmetricPages, times_fixed_scales

HEAD_DIMS = range(PRODUCT, 257, PRODUCT)
# Keys of an item: of tiles of one query, of many, and of those of sequences that share their keys.
SPLIT_ONE, SPLIT_MANY, SPLIT_SHARED = 512, 16_384, 2048
CTAS = 264  # two for each processor of an H100 or H200
BLOCK_BYTES = 32 << 10  # of K and V of a block
STAGES = 3  # blocks in shared memory at once
KernelPages = Pages | SymmetricPages


def refusal(
    q: jax.Array, pages: AnyPages, page_table: jax.Array, *_: object
) -> str | None:
    """Why these arrays cannot be taken on this device, or None."""
    if reason := gpus.not_hopper():
        return reason
    if not isinstance(pages, KernelPages):
        return f"{type(pages).__name__} are not read yet; xla reads them"
    if pages.layout != "head_major":
        return "pages must be head-major"
    if pages.kv.dtype == jnp.float32:
        return "pages of float32 would be rounded by the tensor cores; xla takes them as they are"
    if pages.head_dim not in HEAD_DIMS:
        every = ", ".join(map(str, HEAD_DIMS))
        return f"D = {pages.head_dim} is none of {every}; rows may be padded with zeros"
    if pages.page_size % 8:
        return f"P = {pages.page_size} is not a multiple of 8"
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
    seq, position = ragged.rows(T)
    low, high = options.bounds(position)
    if ragged.shared is None:
        bounds = jnp.stack([low, high])
        part = _Pass(ragged=ragged, table=page_table, bounds=bounds, out_dtype=q.dtype)
        out, lse = _of_sequences(q, pages, part, sinks, options)
    else:
        # Shared keys once for all rows of a group, as if they were one sequence's.
        shared = ragged.shared
        group = shared.lengths.at[owner(shared.starts, seq)]
        # 0 for a row that is in no group.
        cut = group.get(mode="fill", fill_value=0, wrap_negative_indices=False)
        leaders = jnp.clip(shared.starts[:-1], 0, B - 1)
        of_groups = Ragged(
            kv_lens=jnp.zeros_like(shared.lengths), query_starts=ragged.query_starts[shared.starts]
        )
        common = _Pass(
            ragged=of_groups,
            table=page_table[leaders],
            bounds=jnp.stack([low, jnp.minimum(high, cut)]),
            in_order=False,
            out_dtype=jnp.float32,
        )
        own = _Pass(
            ragged=ragged,
            table=page_table,
            bounds=jnp.stack([jnp.maximum(low, cut), high]),
            out_dtype=jnp.float32,
        )
        out, lse = _attend(q, pages, common, None, options, many=True, split=SPLIT_SHARED)
        grouped = cut > 0
        out = jnp.where(grouped[:, None, None], out, 0)  # others have some tile's, NaN perhaps
        lse = jnp.where(grouped[:, None], lse, -jnp.inf)
        out, lse = merge_partials(out, lse, *_of_sequences(q, pages, own, sinks, options))
        out = out.astype(q.dtype)
    padding = position == PADDING
    return (
        jnp.where(padding[:, None, None], 0, out),
        jnp.where(padding[:, None], -jnp.inf, lse),
    )


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """A pass of the kernels over rows and the keys that they see.

    Attributes:
      ragged: which rows go into tiles together, as rows of one sequence.
      table: `[B, M]`, of those sequences.
      bounds: `[2, T]`, keys [low, high) that each row sees.
      in_order: rows of a tile have positions in sequence.
      out_dtype: of the output.
    """

    ragged: Ragged
    table: jax.Array
    bounds: jax.Array
    in_order: bool = True
    out_dtype: DTypeLike


def _of_sequences(
    q: jax.Array,
    pages: KernelPages,
    part: _Pass,
    sinks: jax.Array | None,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the rows of sequences, those of one query apart from longer ones."""
    T = q.shape[0]

    def attend(many: bool, taken: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        split = SPLIT_MANY if many else SPLIT_ONE
        return _attend(q, pages, part, sinks, options, many=many, split=split, taken=taken)

    if options.query_tile is not None or part.table.shape[0] >= T:
        return attend(options.query_tile is not None, None)
    return attend_by_length(part.ragged, T, partial(attend, False), partial(attend, True))


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """How the rows of a tile are laid out.

    The G heads of a KV head are cut into `groups` of `group` heads, where they are more than a
    tile takes; each group is a head of its own to the kernel.

    Attributes:
      tile: queries of a tile.
      groups, group: see above.
      count: N, rows of a tile, rounded up.
    """

    tile: int
    groups: int
    group: int
    count: int

    @classmethod
    def choose(cls, G: int, pages: KernelPages, many: bool) -> "_Rows":
        # What the registers hold of O; for codes some hold scales, and bounds where rows are many.
        most = 48 if pages.head_dim <= 128 else 32
        if many and pages.head_dim > 192 and isinstance(pages, SymmetricPages):
            most = 24
        groups = -(-G // most)
        group = -(-G // groups)
        tile = most // group if many else 1
        return cls(tile=tile, groups=groups, group=group, count=_round_up(tile * group, 8))

    def of_heads(self, x: jax.Array, K: int) -> jax.Array:
        """`[..., H, R]` as `[..., K, groups, group, R]`, zeros where there is no head."""
        *lead, H, R = x.shape
        unused = self.groups * self.group - H // K
        x = x.reshape(*lead, K, H // K, R)
        x = jnp.pad(x, (*[(0, 0)] * (x.ndim - 2), (0, unused), (0, 0)))
        return x.reshape(*lead, K, self.groups, self.group, R)

    def of_tiles(self, x: jax.Array) -> jax.Array:
        """`[tiles, tile, K, groups, group, R]` as `[tiles, K * groups, N, R]`."""
        tiles, tile, K, groups, group, R = x.shape
        x = x.transpose(0, 2, 3, 1, 4, 5).reshape(tiles, K * groups, tile * group, R)
        return jnp.pad(x, ((0, 0), (0, 0), (0, self.count - tile * group), (0, 0)))

    def of_queries(
        self, x: jax.Array, place: tuple[jax.Array, jax.Array], H: int, K: int
    ) -> jax.Array:
        """`[tiles, K * groups, R, N]` as `[T, H, R]`, by tile and row within it of each query."""
        tiles, _, R, _ = x.shape
        x = x[..., : self.tile * self.group]
        x = x.reshape(tiles, K, self.groups, R, self.tile, self.group)
        x = x.transpose(0, 4, 1, 2, 5, 3)[place]
        T = x.shape[0]
        return x.reshape(T, K, self.groups * self.group, R)[:, :, : H // K].reshape(T, H, R)


def _attend(
    q: jax.Array,
    pages: KernelPages,
    part: _Pass,
    sinks: jax.Array | None,
    options: AttentionOptions,
    *,
    many: bool,
    split: int,
    taken: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the rows of the sequences `taken [B]`; anything in the other rows."""
    (T, H, _), K = q.shape, pages.num_kv_heads
    B, M = part.table.shape
    rows = _Rows.choose(H // K, pages, many)
    one_each = None if many else B  # or T, which are fewer
    tiles = Tiles.plan(part.ragged, T, rows.tile, options, taken, one_each)
    row = tiles.first_row[:, None] + jnp.arange(rows.tile, dtype=jnp.int32)[None]  # [tiles, tile]
    live = row < tiles.end_row[:, None]
    bounds = part.bounds.T.at[row].get(mode="clip")  # [tiles, tile, 2]
    bounds = jnp.where(live[..., None], bounds, 0)
    span = None  # of the keys that a tile sees
    if part.in_order and options.window is not None:
        span = options.window + rows.tile - 1
    most = _most_items(M * pages.page_size, split, span)
    work, starts = _items(tiles, bounds, live, split, most)
    ctas = min(CTAS, tiles.count * most * K * rows.groups)
    plan = _plan(pages, rows, ctas, many, options)
    if plan.code is not None:
        q = times_fixed_scales(q.astype(jnp.float32), pages, 0)
    grouped = rows.of_tiles(rows.of_heads(q.at[row].get(mode="clip"), K)).astype(plan.dtype)
    bounds = jnp.repeat(bounds.swapaxes(1, 2), rows.group, axis=2)
    bounds = jnp.pad(bounds, ((0, 0), (0, 0), (0, rows.count - bounds.shape[2])))
    sink = jnp.full((H,), -jnp.inf, jnp.float32) if sinks is None else sinks
    sink = jnp.broadcast_to(sink, (rows.tile, H))[None, ..., None]
    sink = rows.of_tiles(rows.of_heads(sink, K))[0, ..., 0] * LOG2_E

    pools = tuple(pages.paged.values())
    partial = walk(plan, grouped, bounds, work, starts[-1:], part.table, pools)
    out, lse = merge(*partial, starts, sink, part.out_dtype)

    place = tiles.place_of(part.ragged, T, rows.tile)
    out = rows.of_queries(out, place, H, K)
    lse = rows.of_queries(lse[:, :, None], place, H, K)[..., 0]
    return times_fixed_scales(out, pages, 1), lse


def _plan(
    pages: KernelPages,
    rows: _Rows,
    ctas: int,
    many: bool,
    options: AttentionOptions,
) -> Plan:
    dtype, code = pages.kv.dtype, None
    if isinstance(pages, SymmetricPages):
        code, dtype = dtype, jnp.dtype(jnp.bfloat16)  # float16 is too narrow for products of scales
    return Plan(
        heads=pages.num_kv_heads * rows.groups,
        kv_heads=pages.num_kv_heads,
        head_dim=pages.head_dim,
        page_size=pages.page_size,
        rows=rows.count,
        block=block_tokens(pages),
        stages=stages(pages.head_dim, many),
        ctas=ctas,
        dtype=dtype,
        code=code,
        scaled="scales" in pages.paged,
        one_bound=not many,
        options=options,
    )


def block_tokens(pages: KernelPages, *_: object) -> int:
    """Keys of a block: what a stage of the pipeline holds of one KV head."""
    token = 2 * pages.head_dim * 2  # of the numbers, where codes are stored
    return max(PRODUCT, BLOCK_BYTES // token // PRODUCT * PRODUCT)


def stages(head_dim: int, many: bool) -> int:
    """Blocks in shared memory at once; tiles of many rows of the largest heads leave room for 2."""
    return STAGES - 1 if many and head_dim > 192 else STAGES


def _most_items(table_tokens: int, split: int, span: int | None) -> int:
    """The most items that a tile of so many keys, wherever they begin, can have."""
    most = -(-table_tokens // split)
    return most if span is None else min(most, -(-span // split) + 1)


def _items(
    tiles: Tiles, bounds: jax.Array, live: jax.Array, split: int, most: int
) -> tuple[jax.Array, jax.Array]:
    """The items of all tiles, in order.

    Args:
      tiles: tiles of query rows.
      bounds: `[tiles, tile, 2]` int32, keys [low, high) that each row sees.
      live: `[tiles, tile]`, the rows that there are.
      split: where items are cut.
      most: items of a tile.

    Returns:
      `work` of `walk.walk`, and `[tiles + 1]` int32, the first item of each tile.
    """
    lows, highs = bounds[..., 0], bounds[..., 1]
    far = jnp.iinfo(jnp.int32).max
    sees = live & (highs > lows)
    low, high = jnp.where(sees, lows, far).min(axis=1), jnp.where(sees, highs, 0).max(axis=1)
    inner_start = jnp.where(live, lows, 0).max(axis=1)
    inner_end = jnp.where(live, highs, far).min(axis=1)

    first = low // split
    count = jnp.where(high > low, -(-high // split) - first, 0)
    ends = jnp.cumsum(count, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    index = jnp.arange(max(tiles.count * most, STATS), dtype=jnp.int32)
    tile = jnp.minimum(owner(starts, index), tiles.count - 1)
    start = (first[tile] + index - starts[tile]) * split
    start, end = jnp.maximum(start, low[tile]), jnp.minimum(start + split, high[tile])
    fields = tiles.seq[tile], tile, start, end, inner_start[tile], inner_end[tile]
    return jnp.stack(fields, axis=1), starts


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
