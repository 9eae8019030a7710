"""The static sizes of a call of the TPU kernel, and the scalars that it reads for each tile."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels import chips
from pallas_kernels.arith import Ref, Scalar, ceil_div, round_up
from pallas_kernels.attention.mosaic_tpu import operands, tuning
from pallas_kernels.attention.mosaic_tpu.tuning import BlockSizes, TileKind
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.pages import LANES, Pages
from pallas_kernels.quantised_pages import AffinePages, SymmetricPages

SUBLANES = 8
PACKED_SUBLANES = 16  # rows of a register of two-byte numbers
REGISTER_ROWS = 32  # rows of a register of one-byte numbers
KernelPages = Pages | SymmetricPages | AffinePages


@dataclass(frozen=True)
class Column:
    """One field of `TileScalars` in scalar memory; `column[t]` is its value for tile t."""

    ref: Ref
    start: int

    def __getitem__(self, t: Scalar) -> jax.Array:
        return self.ref[self.start + t]


class TileScalars[T](NamedTuple):
    """What the kernel needs to know about each tile of query rows.

    Outside the kernel each field is an `[count]` int32 array, inside it is a `Column`.

    Attributes:
      seq: the sequence, a row of the page table.
      first, fast_first, fast_last, last: the blocks of keys [first, last) hold all keys of the
        tile. In [fast_first, fast_last) every row of the tile sees every key.
      low, high: the keys [low, high) are those that any row sees.
      position: position of the first query.
      queries: number of queries.
      first_chunk: index of the tile's first chunk of query rows.
    """

    seq: T
    first: T
    fast_first: T
    fast_last: T
    last: T
    low: T
    high: T
    position: T
    queries: T
    first_chunk: T

    @classmethod
    def columns(cls, ref: Ref, count: int) -> "TileScalars[Column]":
        """Returns the fields of `count` tiles, which lie in `ref` as `packed` returns them."""
        return TileScalars(*(Column(ref, i * (count + 1)) for i in range(len(cls._fields))))


def packed(scalars: TileScalars[jax.Array]) -> jax.Array:
    """Returns the fields one after the other, `[fields * (count + 1)]` int32.

    The additional entry of each field, after the last tile, is 0 and stands for the end.
    """
    return jnp.concatenate([jnp.pad(field, (0, 1)) for field in scalars])


@dataclass(frozen=True)
class Plan:
    """Static sizes of a call of the kernel.

    Attributes:
      num_kv_heads: K.
      head_dim: D.
      lanes: elements of a piece of a row.
      affine: codes have a minimum too, and each byte holds one code of K and one of V.
      page_size: P.
      packed_heads: KV heads that form a group: their query rows share registers.
      heads_per_kv: G, query heads per KV head.
      chunk: queries that are laid out together, for all heads; they fill whole registers, or are
        all queries of a tile.
      num_chunks: chunks of a tile.
      block_tokens: keys of a block.
      num_buffers, groups_ahead: see `BlockSizes`.
      table_width: page ids of a sequence, rounded up.
      dtype: type of the factors of matrix products. If it has one byte, q and the weights are split
        into several parts (`operands`).
      unit: factor from codes that are read as `dtype` to the codes' values.
      options: options of the call.
    """

    num_kv_heads: int
    head_dim: int
    lanes: int
    affine: bool
    page_size: int
    packed_heads: int
    heads_per_kv: int
    chunk: int
    num_chunks: int
    block_tokens: int
    num_buffers: int
    groups_ahead: int
    table_width: int
    dtype: jnp.dtype
    unit: float
    options: AttentionOptions

    @classmethod
    def choose(
        cls, q: jax.Array, pages: KernelPages, tile: int, M: int, options: AttentionOptions
    ) -> "Plan":
        """Chooses the sizes for the chip that the program is compiled for.

        Args:
          q: `[T, H, D]`.
          pages: the pages.
          tile: queries of a tile.
          M: page ids of a sequence.
          options: options of the call.
        """
        kind = "row" if tile == 1 else "rows"
        G, sizes = q.shape[1] // pages.num_kv_heads, sizes_of(pages, kind)
        factors, chunk = _factors(q, pages, kind), min(tile, _chunk(G))
        return cls(
            num_kv_heads=pages.num_kv_heads,
            head_dim=pages.head_dim,
            lanes=pages.kv.shape[4],
            affine=isinstance(pages, AffinePages),
            page_size=pages.page_size,
            packed_heads=_packed_heads(pages, tile * G),
            heads_per_kv=G,
            chunk=chunk,
            num_chunks=ceil_div(tile, chunk),
            block_tokens=block_tokens(pages, kind),
            num_buffers=sizes.num_buffers,
            groups_ahead=sizes.groups_ahead,
            table_width=round_up(M, 1024),
            dtype=jnp.dtype(factors),
            unit=operands.unit(pages.kv.dtype, factors),
            options=options,
        )

    @property
    def pages_per_block(self) -> int:
        """Pages of a block of keys."""
        return self.block_tokens // self.page_size

    @property
    def k_pieces(self) -> range:
        """The pieces of a row that hold some of K, which begins the row."""
        return range(ceil_div(self.head_dim, self.lanes))

    @property
    def v_pieces(self) -> range:
        """The pieces of a row that hold some of V, which ends the row."""
        if self.affine:
            return self.k_pieces
        return range(self.head_dim // self.lanes, 2 * self.head_dim // self.lanes)

    @property
    def out_lanes(self) -> int:
        """Elements that the kernel computes for the output of a head, D of which are used."""
        return len(self.v_pieces) * self.lanes

    @property
    def splits(self) -> bool:
        """Products are computed in the type of the codes, with q and the weights in parts."""
        return self.dtype.itemsize == 1

    @property
    def num_groups(self) -> int:
        """Groups of KV heads."""
        return self.num_kv_heads // self.packed_heads

    @property
    def head_rows(self) -> int:
        """Query rows of a chunk and KV head."""
        return self.chunk * self.heads_per_kv

    @property
    def chunk_rows(self) -> int:
        """Query rows of a chunk and group, rounded up."""
        return round_up(self.packed_heads * self.head_rows, SUBLANES)

    @property
    def rows(self) -> int:
        """Query rows of a tile and group."""
        return self.num_chunks * self.chunk_rows

    @property
    def prepares_q(self) -> bool:
        """q is laid out for a group, or split, before the products."""
        return self.packed_heads > 1 or self.splits

    @property
    def q_rows(self) -> int:
        """Rows of q as a factor of products, all parts included."""
        return operands.num_parts(self.dtype) * self.rows if self.splits else self.rows

    def group_of(self, g: int) -> range:
        """The KV heads of group g."""
        return range(g * self.packed_heads, (g + 1) * self.packed_heads)

    def smem_bytes(self, num_tiles: int) -> int:
        """Bytes of scalar memory that a call with so many tiles needs."""
        fields = len(TileScalars._fields) * (num_tiles + 1)
        return 4 * (fields + self.num_buffers * self.table_width) + (4 << 10)  # 4 KiB: compiler

    def by_group(self, x: jax.Array) -> jax.Array:
        """Reshapes `[..., chunk, K, G, n]` to `[..., groups, chunk_rows, n]`."""
        x = x.swapaxes(-4, -3)
        rows = self.packed_heads * self.head_rows
        x = x.reshape(*x.shape[:-4], self.num_groups, rows, x.shape[-1])
        return _pad(x, -2, self.chunk_rows)

    def of_rows(self, x: jax.Array) -> jax.Array:
        """Repeats a number per query head, `[H]`, for each row: `[groups, chunk_rows, 1]`."""
        x = x.reshape(self.num_kv_heads, self.heads_per_kv, 1)
        return self.by_group(jnp.broadcast_to(x, (self.chunk, *x.shape)))

    def by_head(self, x: jax.Array) -> jax.Array:
        """Reshapes `[..., groups, chunk_rows, n]` to `[..., K, chunk, G, n]`."""
        x = x[..., : self.packed_heads * self.head_rows, :]
        heads = self.num_kv_heads, self.chunk, self.heads_per_kv
        return x.reshape(*x.shape[:-3], *heads, x.shape[-1])

    def queries(self) -> np.ndarray:
        """Returns the index, within the tile, of the query of each row of a group: `[rows, 1]`
        int32."""
        chunk, row = np.divmod(np.arange(self.rows, dtype=np.int32), np.int32(self.chunk_rows))
        return (chunk * self.chunk + row % self.head_rows // self.heads_per_kv)[:, None]

    def pad_lanes(self, q: jax.Array) -> jax.Array:
        """Pads `[..., D]` with zeros to `[..., lanes of K's pieces]`, which K begins."""
        return _pad(q, -1, len(self.k_pieces) * self.lanes)

    def gather(self, out: jax.Array) -> jax.Array:
        """Takes the `[..., D]` of an output from `[..., out_lanes]`."""
        return out[..., self.out_lanes - self.head_dim :]


def _pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Appends zeros along an axis, up to a size."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def most_queries(q: jax.Array, pages: KernelPages) -> int:
    """Returns the queries of a tile of many: whole chunks, at least one.

    They are as many as the table of the chip says, unless their rows and what the kernel keeps for
    each row do not fit into fast memory together with the blocks of keys.
    """
    K, sizes = pages.num_kv_heads, sizes_of(pages, "rows")
    G, itemsize = q.shape[1] // K, max(q.dtype.itemsize, 2)
    lanes = round_up(pages.head_dim, round_up(pages.kv.shape[4], LANES))
    # q and out twice; the weighted sum; what takes a register per row; lse, of all heads.
    registers = 6 if isinstance(pages, AffinePages) else 4
    row = 4 * lanes * itemsize + 4 * lanes + 4 * registers * LANES + 2 * 4 * LANES // K
    tokens = block_tokens(pages, "rows") + skew(pages.kv.dtype)
    room = chips.vmem_limit() - sizes.num_buffers * tokens * _token_bytes(pages)
    # Intermediate values take some too, and more if codes are converted.
    room -= chips.vmem_bytes() // (4 if pages.kv.dtype.itemsize == 1 else 8)
    fit = min(room, chips.vmem_bytes() // 2) // (row * K)
    chunk = _chunk(G)
    return max(1, min(sizes.tile_rows, fit) // (G * chunk)) * chunk


def _chunk(G: int) -> int:
    """Returns the least number of queries that fill whole registers."""
    return PACKED_SUBLANES // math.gcd(G, PACKED_SUBLANES)


def _packed_heads(pages: KernelPages, rows: int) -> int:
    """Returns how many KV heads form a group if each has `rows` query rows."""
    K, whole_registers = pages.num_kv_heads, pages.kv.shape[4] % LANES == 0
    most = SUBLANES // rows if whole_registers else 1  # others are costly to concatenate
    return max((n for n in range(1, most + 1) if K % n == 0), default=1)


def _factors(q: jax.Array, pages: KernelPages, kind: TileKind) -> DTypeLike:
    """Returns the type in which products are computed."""
    if jnp.float32 in (q.dtype, pages.kv.dtype):
        return jnp.float32
    codes = jnp.int8 if isinstance(pages, AffinePages) else pages.kv.dtype
    # For many rows it is cheaper to convert a block's codes than to split the rows.
    unconverted = tuning.factor_type(codes) if kind == "row" else None
    return unconverted or jnp.bfloat16


def block_tokens(pages: KernelPages, kind: TileKind) -> int:
    """Returns the keys of a block, for the chip that the program is compiled for."""
    step = math.lcm(pages.page_size, LANES)  # whole pages and whole registers
    sizes = sizes_of(pages, kind)
    # A buffer takes at most an eighth of fast memory: tiles of queries need room too.
    most = min(sizes.block_bytes, chips.vmem_bytes() // 8) // _token_bytes(pages)
    return step * max(1, min(sizes.block_tokens, most) // step)


def skew(dtype: DTypeLike) -> int:
    """Returns the unused rows (one register) between the keys of two heads.

    Rows at a distance of a power of two are in the same bank of fast memory, which loads one at a
    time.
    """
    return REGISTER_ROWS // jnp.dtype(dtype).itemsize


def _token_bytes(pages: KernelPages) -> int:
    """Returns the bytes of K and V of a token in fast memory."""
    _, K, X, _, lanes = pages.kv.shape
    return K * X * round_up(lanes, LANES) * pages.kv.dtype.itemsize


def sizes_of(pages: KernelPages, kind: TileKind) -> BlockSizes:
    """Returns the sizes for a kind of tile, from the table of the chip."""
    return tuning.block_sizes(kind, pages.kv.dtype.name)
