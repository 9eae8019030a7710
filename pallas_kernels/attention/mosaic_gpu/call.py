"""Ragged paged attention for NVIDIA Hopper GPUs (sm90): one list of work, walked and merged.

    tiles      query rows of a sequence; the G heads that share a KV head are rows of one tile
    items      a tile's keys, cut at multiples of `split`: one list has the work of all processors
    walk       one kernel computes item after item (`walk`), with partial results in float32
    merge      another joins each tile's items in the order of their keys (`merge`)

The list is made on the device from the true lengths. So no step waits for the host, and the work
does not grow with the width of the table. Items are cut at the same keys whatever else is in the
batch, and merged in one order: the bits of a row depend only on its own query and keys.

If each sequence has one query, a tile is the G heads of that query. Longer sequences are cut into
tiles of many queries, in a second call. Products are computed in the type of the pages, to which
queries and weights are rounded; sums and maxima are float32.

Each tile reads a token of K and V once. In decode that is one read per step, for G products per
number, so memory bandwidth is the limit. Source: FlashAttention-2, arXiv 2307.08691; the splits are
those of Flash-Decoding.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import chips
from pallas_kernels.arith import LOG2_E, ceil_div, round_up
from pallas_kernels.attention.mosaic_gpu.merge import STATS, merge
from pallas_kernels.attention.mosaic_gpu.plan import PRODUCT, ItemFields, Plan
from pallas_kernels.attention.mosaic_gpu.walk import Inputs, walk
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.ragged import PADDING, Ragged, owner
from pallas_kernels.attention.tiles import Tiles, attend_by_length
from pallas_kernels.online_softmax import merge_partials
from pallas_kernels.pages import Pages
from pallas_kernels.quantised_pages import AnyPages, SymmetricPages, times_fixed_scales

HEAD_DIMS = range(PRODUCT, 257, PRODUCT)
# Keys of an item, for tiles of one query, of many queries, and of sequences that share their keys.
SPLIT_ONE, SPLIT_MANY, SPLIT_SHARED = 512, 16_384, 2048
CTAS = 264  # blocks of threads: two for each processor of an H100 or H200
BLOCK_BYTES = 32 << 10  # bytes of K and V of a block
STAGES = 3  # blocks in shared memory at once
KernelPages = Pages | SymmetricPages


def refusal(q: jax.Array, pages: AnyPages, page_table: jax.Array, *_: object) -> str | None:
    """Returns why the kernel does not take these arrays on this device, or None if it does."""
    if reason := chips.not_hopper():
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
    """Computes `(out [T, H, D], lse [T, H])`; see `attention.reference` for the arguments."""
    T, B = q.shape[0], page_table.shape[0]
    seq, position = ragged.rows(T)
    low, high = options.bounds(position)
    if ragged.shared is None:
        bounds = jnp.stack([low, high])
        part = _Pass(ragged=ragged, table=page_table, bounds=bounds, out_dtype=q.dtype)
        out, lse = _of_sequences(q, pages, part, sinks, options)
    else:
        # Read shared keys once for all rows of a group, as if the rows were those of one sequence.
        shared = ragged.shared
        group = shared.lengths.at[owner(shared.starts, seq)]
        # Keys below the cut are shared; 0 for a row that is in no group.
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
        rows = _Rows.choose(q, pages, many=True)
        out, lse = _attend(q, pages, common, None, options, rows, SPLIT_SHARED)
        grouped = cut > 0
        out = jnp.where(
            grouped[:, None, None], out, 0
        )  # other rows have those of some tile, perhaps NaN
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
    """A pass of the kernels over query rows and the keys that they see.

    Attributes:
      ragged: the rows of one sequence go into tiles together.
      table: `[B, M]` int32, page table of those sequences.
      bounds: `[2, T]` int32, keys [low, high) that each row sees.
      in_order: the rows of a tile have consecutive positions.
      out_dtype: type of the output.
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
    """Computes all rows of a pass, sequences of one query in another call than longer ones."""
    T = q.shape[0]

    def attend(many: bool, taken: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        rows, split = _Rows.choose(q, pages, many), SPLIT_MANY if many else SPLIT_ONE
        return _attend(q, pages, part, sinks, options, rows, split, taken)

    if options.query_tile is not None or part.table.shape[0] >= T:
        return attend(options.query_tile is not None, None)
    return attend_by_length(part.ragged, T, partial(attend, False), partial(attend, True))


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """How the query rows of a tile are laid out.

    If the G heads of a KV head are more than a tile has room for, they are cut into `groups` of
    `group` heads each, which the kernel treats as heads of their own.

    Attributes:
      many: a tile has many queries, and not one.
      tile: queries of a tile.
      groups: groups of query heads of a KV head.
      group: query heads of a group; the last group may have fewer.
      count: rows of a tile and head, rounded up.
    """

    many: bool
    tile: int
    groups: int
    group: int
    count: int

    @classmethod
    def choose(cls, q: jax.Array, pages: KernelPages, many: bool) -> "_Rows":
        """Chooses the layout for `q [T, H, D]`, by the rows of the output that registers hold."""
        G = q.shape[1] // pages.num_kv_heads
        # For codes some registers hold scales; if rows are many, others hold bounds.
        most = 48 if pages.head_dim <= 128 else 32
        if many and pages.head_dim > 192 and isinstance(pages, SymmetricPages):
            most = 24
        groups = ceil_div(G, most)
        group = ceil_div(G, groups)
        tile = most // group if many else 1
        count = round_up(tile * group, 8)
        return cls(many=many, tile=tile, groups=groups, group=group, count=count)

    def of_heads(self, x: jax.Array, K: int) -> jax.Array:
        """Reshapes `[..., H, n]` to `[..., K, groups, group, n]`, with zeros for missing heads."""
        *lead, H, n = x.shape
        unused = self.groups * self.group - H // K
        x = x.reshape(*lead, K, H // K, n)
        x = jnp.pad(x, (*[(0, 0)] * (x.ndim - 2), (0, unused), (0, 0)))
        return x.reshape(*lead, K, self.groups, self.group, n)

    def of_tiles(self, x: jax.Array) -> jax.Array:
        """Reshapes `[tiles, tile, K, groups, group, n]` to `[tiles, K * groups, count, n]`."""
        tiles, tile, K, groups, group, n = x.shape
        x = x.transpose(0, 2, 3, 1, 4, 5).reshape(tiles, K * groups, tile * group, n)
        return jnp.pad(x, ((0, 0), (0, 0), (0, self.count - tile * group), (0, 0)))

    def of_queries(
        self, x: jax.Array, place: tuple[jax.Array, jax.Array], H: int, K: int
    ) -> jax.Array:
        """Reshapes `[tiles, K * groups, n, count]` to `[T, H, n]`.

        `place` is the tile of each query `[T]`, and its index within the tile `[T]`.
        """
        tiles, _, n, _ = x.shape
        x = x[..., : self.tile * self.group]
        x = x.reshape(tiles, K, self.groups, n, self.tile, self.group)
        x = x.transpose(0, 4, 1, 2, 5, 3)[place]
        T = x.shape[0]
        return x.reshape(T, K, self.groups * self.group, n)[:, :, : H // K].reshape(T, H, n)


def _attend(
    q: jax.Array,
    pages: KernelPages,
    part: _Pass,
    sinks: jax.Array | None,
    options: AttentionOptions,
    rows: _Rows,
    split: int,
    taken: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the rows of some sequences.

    Args:
      q, pages, sinks, options: those of the call.
      part: the pass.
      rows: layout of the rows of a tile.
      split: keys of an item.
      taken: `[B]` bool, the sequences to compute; None for all.

    Returns:
      `(out [T, H, D], lse [T, H])`; rows of other sequences hold anything.
    """
    (T, H, _), K = q.shape, pages.num_kv_heads
    B, M = part.table.shape
    one_each = None if rows.many else B  # or T, if that is less
    tiles = Tiles.plan(part.ragged, T, rows.tile, options, taken, one_each)
    row = tiles.first_row[:, None] + jnp.arange(rows.tile, dtype=jnp.int32)[None]  # [tiles, tile]
    live = row < tiles.end_row[:, None]
    bounds = part.bounds.T.at[row].get(mode="clip")  # [tiles, tile, 2]
    bounds = jnp.where(live[..., None], bounds, 0)
    span = None  # how many keys a tile sees, if that is bounded
    if part.in_order and options.window is not None:
        span = options.window + rows.tile - 1
    most = _most_items(M * pages.page_size, split, span)
    items, starts = _items(tiles, bounds, live, split, most)
    ctas = min(CTAS, tiles.count * most * K * rows.groups)
    plan = _plan(pages, rows, ctas, options)
    if plan.code is not None:
        q = times_fixed_scales(q.astype(jnp.float32), pages, 0)
    grouped = rows.of_tiles(rows.of_heads(q.at[row].get(mode="clip"), K)).astype(plan.dtype)
    bounds = jnp.repeat(bounds.swapaxes(1, 2), rows.group, axis=2)
    bounds = jnp.pad(bounds, ((0, 0), (0, 0), (0, rows.count - bounds.shape[2])))
    sink = jnp.full((H,), -jnp.inf, jnp.float32) if sinks is None else sinks
    sink = jnp.broadcast_to(sink, (rows.tile, H))[None, ..., None]
    sink = rows.of_tiles(rows.of_heads(sink, K))[0, ..., 0] * LOG2_E

    inputs = Inputs(
        q=grouped,
        bounds=bounds,
        items=jnp.stack(items, axis=1),
        num_items=starts[-1:],
        table=part.table,
        pools=list(pages.paged.values()),
    )
    weighted, stats = walk(plan, inputs)
    out, lse = merge(weighted, stats, starts, sink, part.out_dtype)

    place = tiles.place_of(part.ragged, T, rows.tile)
    out = rows.of_queries(out, place, H, K)
    lse = rows.of_queries(lse[:, :, None], place, H, K)[..., 0]
    return times_fixed_scales(out, pages, 1), lse


def _plan(
    pages: KernelPages,
    rows: _Rows,
    ctas: int,
    options: AttentionOptions,
) -> Plan:
    """Returns the static sizes of a call."""
    dtype, code = pages.kv.dtype, None
    if isinstance(pages, SymmetricPages):
        code, dtype = dtype, jnp.dtype(jnp.bfloat16)  # float16 is too narrow for products of scales
    return Plan(
        num_kv_heads=pages.num_kv_heads,
        head_dim=pages.head_dim,
        page_size=pages.page_size,
        tile_heads=pages.num_kv_heads * rows.groups,
        rows=rows.count,
        block_tokens=block_tokens(pages.head_dim),
        stages=stages(pages.head_dim, rows.many),
        ctas=ctas,
        dtype=dtype,
        code=code,
        scaled="scales" in pages.paged,
        one_bound=not rows.many,
        options=options,
    )


def block_tokens(head_dim: int) -> int:
    """Returns the keys of a block, which a stage of the pipeline holds for one KV head."""
    token = 2 * head_dim * 2  # bytes; those of the converted numbers if pages have codes
    return max(PRODUCT, BLOCK_BYTES // token // PRODUCT * PRODUCT)


def stages(head_dim: int, many: bool) -> int:
    """Returns the blocks in shared memory at once.

    With tiles of many queries the largest heads leave room for 2.
    """
    return STAGES - 1 if many and head_dim > 192 else STAGES


def _most_items(table_tokens: int, split: int, span: int | None) -> int:
    """Returns the most items that a tile can have, if it sees `span` keys of a table of tokens."""
    most = ceil_div(table_tokens, split)
    return most if span is None else min(most, ceil_div(span, split) + 1)


def _items(
    tiles: Tiles, bounds: jax.Array, live: jax.Array, split: int, most: int
) -> tuple[ItemFields[jax.Array], jax.Array]:
    """Returns the items of all tiles, in order.

    Args:
      tiles: tiles of query rows.
      bounds: `[tiles, tile, 2]` int32, keys [low, high) that each row sees.
      live: `[tiles, tile]` bool, the rows that exist.
      split: items are cut at multiples of it.
      most: items of a tile, at most.

    Returns:
      The items' fields, and `[tiles + 1]` int32, the first item of each tile.
    """
    lows, highs = bounds[..., 0], bounds[..., 1]
    far = jnp.iinfo(jnp.int32).max
    sees = live & (highs > lows)
    low, high = jnp.where(sees, lows, far).min(axis=1), jnp.where(sees, highs, 0).max(axis=1)
    inner_start = jnp.where(live, lows, 0).max(axis=1)
    inner_end = jnp.where(live, highs, far).min(axis=1)

    first = low // split
    count = jnp.where(high > low, ceil_div(high, split) - first, 0)
    ends = jnp.cumsum(count, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    index = jnp.arange(max(tiles.count * most, STATS), dtype=jnp.int32)
    tile = jnp.minimum(owner(starts, index), tiles.count - 1)
    start = (first[tile] + index - starts[tile]) * split
    start, end = jnp.maximum(start, low[tile]), jnp.minimum(start + split, high[tile])
    fields = ItemFields(
        seq=tiles.seq[tile],
        tile=tile,
        start=start,
        end=end,
        inner_start=inner_start[tile],
        inner_end=inner_end[tile],
    )
    return fields, starts
