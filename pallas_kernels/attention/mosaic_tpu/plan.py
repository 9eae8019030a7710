"""Static sizes of a call of the TPU kernel, and where K and V lie in a page's rows."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels import tpus
from pallas_kernels.attention.mosaic_tpu import operands, tuning
from pallas_kernels.attention.mosaic_tpu.tuning import BlockSizes, Tile
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.pages import LANES, Pages
from pallas_kernels.quantised_pages import AffinePages, SymmetricPages

SUBLANES = 8
PACKED_SUBLANES = 16  # of a register of two-byte numbers
REGISTER_ROWS = 32  # of one-byte numbers
LOG2_E = math.log2(math.e)
FIELDS = (  # of a tile, in scalar memory
    "seq",
    "first",
    "fast_first",
    "fast_last",
    "last",
    "low",
    "high",
    "position",
    "queries",
    "first_chunk",
)
KernelPages = Pages | SymmetricPages | AffinePages
Ref = Any
Scalar = jax.Array | int  # int32, traced where it is an array


@dataclass(frozen=True)
class Plan:
    """Static sizes of a call of the kernel.

    Attributes:
      head_dim: D.
      lanes: of a piece of a row.
      affine: codes have a minimum, too, and a byte holds one of K and one of V.
      group: KV heads whose query rows share the sublanes of a register.
      heads: G, query heads of a KV head.
      chunk: queries that are laid out together, for all heads; they fill whole registers, or are
        all of a tile.
      num_chunks: of a tile.
      block_tokens: keys of a block.
      num_buffers, groups_ahead: see `BlockSizes`.
      table_width: page ids of a sequence, rounded up.
      dtype: of the factors of products; of one byte, q and weights are split (`operands`).
      unit: what codes are multiplied by, as numbers of `dtype`.
      options: of the call.
    """

    num_kv_heads: int
    head_dim: int
    lanes: int
    affine: bool
    page_size: int
    group: int
    heads: int
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
        K, kind = pages.num_kv_heads, "row" if tile == 1 else "rows"
        G, sizes = q.shape[1] // K, sizes_of(pages, kind)
        factors, chunk = _factors(q, pages, kind), min(tile, _chunk(G))
        return cls(
            num_kv_heads=K,
            head_dim=pages.head_dim,
            lanes=pages.kv.shape[4],
            affine=isinstance(pages, AffinePages),
            page_size=pages.page_size,
            group=_group(pages, tile * G),
            heads=G,
            chunk=chunk,
            num_chunks=-(-tile // chunk),
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
        return self.block_tokens // self.page_size

    @property
    def k_pieces(self) -> range:
        """The pieces of a row that have some of K, which begins it."""
        return range(-(-self.head_dim // self.lanes))

    @property
    def v_pieces(self) -> range:
        """The pieces that have some of V, which ends it."""
        if self.affine:
            return self.k_pieces
        return range(self.head_dim // self.lanes, 2 * self.head_dim // self.lanes)

    @property
    def out_lanes(self) -> int:
        """Of a head's output."""
        return len(self.v_pieces) * self.lanes

    @property
    def splits(self) -> bool:
        """Products are taken in the type of the codes."""
        return self.dtype.itemsize == 1

    @property
    def num_groups(self) -> int:
        return self.num_kv_heads // self.group

    @property
    def head_rows(self) -> int:
        """Query rows of a chunk and KV head."""
        return self.chunk * self.heads

    @property
    def chunk_rows(self) -> int:
        """Query rows of a chunk and group, rounded up."""
        return round_up(self.group * self.head_rows, SUBLANES)

    @property
    def rows(self) -> int:
        """R, the query rows of a tile and group."""
        return self.num_chunks * self.chunk_rows

    @property
    def prepares_q(self) -> bool:
        """q is laid out for a group, or split, before it is multiplied."""
        return self.group > 1 or self.splits

    @property
    def q_rows(self) -> int:
        """Of q as a factor of products, in its parts."""
        return operands.num_parts(self.dtype) * self.rows if self.splits else self.rows

    def smem_bytes(self, num_tiles: int) -> int:
        """Of scalar memory that a call for so many tiles takes."""
        words = len(FIELDS) * (num_tiles + 1) + self.num_buffers * self.table_width
        return 4 * words + (4 << 10)  # and what is the compiler's

    def by_group(self, x: jax.Array) -> jax.Array:
        """Brings `[..., chunk, K, G, n]` into `[..., groups, chunk_rows, n]`."""
        x = x.swapaxes(-4, -3)
        x = x.reshape(*x.shape[:-4], self.num_groups, self.group * self.head_rows, x.shape[-1])
        return self._fill(x, -2, self.chunk_rows)

    def of_rows(self, x: jax.Array) -> jax.Array:
        """Brings what heads have, `[H]`, into `[groups, chunk_rows, 1]`."""
        x = x.reshape(self.num_kv_heads, self.heads, 1)
        return self.by_group(jnp.broadcast_to(x, (self.chunk, *x.shape)))

    def by_head(self, x: jax.Array) -> jax.Array:
        """The way back: `[..., K, chunk, G, n]`."""
        x = x[..., : self.group * self.head_rows, :]
        heads = self.num_kv_heads, self.chunk, self.heads
        return x.reshape(*x.shape[:-3], *heads, x.shape[-1])

    def queries(self) -> np.ndarray:
        """Which query of a tile each row of a group is of, `[R, 1]` int32."""
        chunk, row = np.divmod(np.arange(self.rows, dtype=np.int32), np.int32(self.chunk_rows))
        return (chunk * self.chunk + row % self.head_rows // self.heads)[:, None]

    def pad_lanes(self, q: jax.Array) -> jax.Array:
        """Brings `[..., D]` into `[..., lanes of K's pieces]`, in which K begins."""
        return self._fill(q, -1, len(self.k_pieces) * self.lanes)

    def gather(self, out: jax.Array) -> jax.Array:
        """Takes `[..., D]` out of `[..., out_lanes]`."""
        return out[..., self.out_lanes - self.head_dim :]

    def _fill(self, x: jax.Array, axis: int, size: int) -> jax.Array:
        """Adds zeros behind an axis, up to a size."""
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, size - x.shape[axis])
        return jnp.pad(x, widths)


def most_queries(q: jax.Array, pages: KernelPages) -> int:
    """Queries of a tile of many, by the table of the chip, of which all rows, and what is kept of
    them, fit into its fast memory beside the blocks of keys: whole chunks, and one at least."""
    K, sizes = pages.num_kv_heads, sizes_of(pages, "rows")
    G, itemsize = q.shape[1] // K, max(q.dtype.itemsize, 2)
    lanes = round_up(pages.head_dim, round_up(pages.kv.shape[4], LANES))
    # q and out twice, the weighted sum; what has a register a row; lse, of all heads.
    registers = 6 if isinstance(pages, AffinePages) else 4
    row = 4 * lanes * itemsize + 4 * lanes + 4 * registers * LANES + 2 * 4 * LANES // K
    tokens = block_tokens(pages, "rows") + skew(pages.kv.dtype)
    room = tpus.vmem_limit() - sizes.num_buffers * tokens * _token_bytes(pages)
    # What is on its way takes some, more of it where codes are converted.
    room -= tpus.vmem_bytes() // (4 if pages.kv.dtype.itemsize == 1 else 8)
    fit = min(room, tpus.vmem_bytes() // 2) // (row * K)
    chunk = _chunk(G)
    return max(1, min(sizes.tile_rows, fit) // (G * chunk)) * chunk


def _chunk(G: int) -> int:
    """Queries that fill whole registers."""
    return PACKED_SUBLANES // math.gcd(G, PACKED_SUBLANES)


def _group(pages: KernelPages, rows: int) -> int:
    """KV heads that are worked on at once, `rows` query rows each."""
    K, whole_registers = pages.num_kv_heads, pages.kv.shape[4] % LANES == 0
    most = SUBLANES // rows if whole_registers else 1  # others do not lie side by side for free
    return max((n for n in range(1, most + 1) if K % n == 0), default=1)


def _factors(q: jax.Array, pages: KernelPages, tile: Tile) -> DTypeLike:
    """In which type products are taken."""
    if jnp.float32 in (q.dtype, pages.kv.dtype):
        return jnp.float32
    codes = jnp.int8 if isinstance(pages, AffinePages) else pages.kv.dtype
    # Many rows are worth the conversion of a block's codes, and cost more in parts.
    as_they_are = tuning.factor_type(codes) if tile == "row" else None
    return as_they_are or jnp.bfloat16


def block_tokens(pages: KernelPages, tile: Tile) -> int:
    """Keys of a block, for the chip that is compiled for."""
    step = math.lcm(pages.page_size, LANES)  # whole pages and whole registers
    sizes = sizes_of(pages, tile)
    # An eighth of the fast memory for a buffer leaves room for tiles of queries.
    most = min(sizes.block_bytes, tpus.vmem_bytes() // 8) // _token_bytes(pages)
    return step * max(1, min(sizes.block_tokens, most) // step)


def skew(dtype: DTypeLike) -> int:
    """Rows of a register, that lie between the blocks of two heads: what is a power of two apart is
    in the same bank of fast memory, which loads one at a time."""
    return REGISTER_ROWS // jnp.dtype(dtype).itemsize


def _token_bytes(pages: KernelPages) -> int:
    """Of K and V of a token in fast memory."""
    _, K, X, _, L = pages.kv.shape
    return K * X * round_up(L, LANES) * pages.kv.dtype.itemsize


def sizes_of(pages: KernelPages, tile: Tile) -> BlockSizes:
    """Sizes for a kind of tile, from the table of the chip."""
    return tuning.block_sizes(tile, pages.kv.dtype.name)


def round_up(n: int, step: int) -> int:
    """n, or the next multiple of `step`."""
    return -(-n // step) * step
