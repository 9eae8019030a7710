"""Static sizes of a call of the TPU kernel, and where K and V lie in a page's rows."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.mosaic_tpu import tuning
from pallas_kernels.attention.mosaic_tpu.tuning import BlockSizes, Tile
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.pages import LANES, Pages
from pallas_kernels.quantised_pages import AffinePages, SymmetricPages

SUBLANES = 8
LOG2_E = math.log2(math.e)
KernelPages = Pages | SymmetricPages | AffinePages
Ref = Any
Scalar = jax.Array | int  # int32, traced where it is an array


@dataclass(frozen=True)
class Plan:
    """Static sizes of a call of the kernel.

    Attributes:
      row_size: elements of a page's row that are K, and V: D, less where bytes hold several codes.
      lanes: of a piece of a row.
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
    lanes: int
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
    ) -> "Plan":
        K = pages.num_kv_heads
        f32 = jnp.float32 in (q.dtype, pages.kv.dtype)
        kind = "row" if tile == 1 else "rows"
        sizes = sizes_of(pages, kind)
        return cls(
            num_kv_heads=K,
            row_size=pages.row_size,
            lanes=pages.kv.shape[4],
            parts=pages.head_dim // pages.row_size,
            affine=isinstance(pages, AffinePages),
            page_size=pages.page_size,
            rows=round_up(tile * (q.shape[1] // K), SUBLANES),
            block_tokens=block_tokens(pages, kind),
            num_buffers=sizes.num_buffers,
            heads_ahead=min(sizes.heads_ahead, K),
            table_width=round_up(M, 1024),
            dtype=jnp.dtype(jnp.float32 if f32 else jnp.bfloat16),
            options=options,
        )

    @property
    def pages_per_block(self) -> int:
        return self.block_tokens // self.page_size

    @property
    def k_pieces(self) -> range:
        """The pieces of a row that have some of K, which begins it."""
        return range(-(-self.row_size // self.lanes))

    @property
    def v_pieces(self) -> range:
        """The pieces that have some of V, which ends it."""
        return range(self.row_size // self.lanes, 2 * self.row_size // self.lanes)

    def spread(self, q: jax.Array) -> jax.Array:
        """Puts `[..., D]` where K is in its pieces, 0 elsewhere: `[..., parts * lanes of them]`."""
        q = q.reshape(*q.shape[:-1], self.parts, self.row_size)
        unused = len(self.k_pieces) * self.lanes - self.row_size
        q = jnp.pad(q, [*[(0, 0)] * (q.ndim - 1), (0, unused)])
        return q.reshape(*q.shape[:-2], -1)

    def gather(self, out: jax.Array) -> jax.Array:
        """Takes `[..., D]` out of `[..., parts * lanes of V's pieces]`."""
        out = out.reshape(*out.shape[:-1], self.parts, len(self.v_pieces) * self.lanes)
        out = out[..., out.shape[-1] - self.row_size :]
        return out.reshape(*out.shape[:-2], self.parts * self.row_size)


def block_tokens(pages: KernelPages, tile: Tile) -> int:
    """Keys of a block, for the chip that is compiled for."""
    step = math.lcm(pages.page_size, LANES)  # whole pages and whole registers
    _, K, X, _, L = pages.kv.shape
    token = K * X * round_up(L, LANES) * pages.kv.dtype.itemsize
    sizes = sizes_of(pages, tile)
    # An eighth of the fast memory for a buffer leaves room for tiles of queries.
    most = min(sizes.block_bytes, tuning.vmem_bytes() // 8) // token
    return step * max(1, min(sizes.block_tokens, most) // step)


def sizes_of(pages: KernelPages, tile: Tile) -> BlockSizes:
    """Sizes for a kind of tile, from the table of the chip."""
    return tuning.block_sizes(tile, pages.kv.dtype.name)


def round_up(n: int, step: int) -> int:
    """n, or the next multiple of `step`."""
    return -(-n // step) * step
