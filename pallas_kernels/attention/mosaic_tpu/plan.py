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
      group: KV heads whose query rows share the sublanes of a register.
      head_rows: query rows of a tile times G.
      block_tokens: keys of a block.
      num_buffers, groups_ahead: see `BlockSizes`.
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
    group: int
    head_rows: int
    block_tokens: int
    num_buffers: int
    groups_ahead: int
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
        rows = tile * (q.shape[1] // K)
        return cls(
            num_kv_heads=K,
            row_size=pages.row_size,
            lanes=pages.kv.shape[4],
            parts=pages.head_dim // pages.row_size,
            affine=isinstance(pages, AffinePages),
            page_size=pages.page_size,
            group=max(n for n in range(1, K + 1) if K % n == 0 and n <= max(1, SUBLANES // rows)),
            head_rows=rows,
            block_tokens=block_tokens(pages, kind),
            num_buffers=sizes.num_buffers,
            groups_ahead=sizes.groups_ahead,
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

    @property
    def num_groups(self) -> int:
        return self.num_kv_heads // self.group

    @property
    def rows(self) -> int:
        """R, the query rows of a group, rounded up."""
        return round_up(self.group * self.head_rows, SUBLANES)

    @property
    def out_lanes(self) -> int:
        """Of a head's output: V's pieces, for each code of a byte."""
        return self.parts * len(self.v_pieces) * self.lanes

    def by_group(self, x: jax.Array) -> jax.Array:
        """Brings `[..., K, head_rows, n]` into `[..., groups, R, n]`."""
        x = x.reshape(*x.shape[:-3], self.num_groups, self.group * self.head_rows, x.shape[-1])
        return self._fill(x, -2, self.rows)

    def by_head(self, x: jax.Array) -> jax.Array:
        """The way back: `[..., K, head_rows, n]`."""
        x = x[..., : self.group * self.head_rows, :]
        return x.reshape(*x.shape[:-3], self.num_kv_heads, self.head_rows, x.shape[-1])

    def spread(self, q: jax.Array) -> jax.Array:
        """Puts q where K is in an operand of a group's heads, 0 elsewhere.

        Args:
          q: `[..., K, head_rows, D]`.

        Returns:
          `[..., K, head_rows, parts * group * lanes of K's pieces]`: for each code of a byte, for
          each head of the group, its pieces.
        """
        heads = self.num_groups, self.group, self.head_rows
        q = q.reshape(*q.shape[:-3], *heads, self.parts, 1, self.row_size)
        q = self._fill(q, -1, len(self.k_pieces) * self.lanes)
        own = jnp.eye(self.group, dtype=bool)[:, None, None, :, None]
        q = jnp.where(own, q, jnp.zeros_like(q))
        return q.reshape(*q.shape[:-6], self.num_kv_heads, self.head_rows, -1)

    def gather(self, out: jax.Array) -> jax.Array:
        """Takes `[..., D]` out of `[..., out_lanes]`."""
        out = out.reshape(*out.shape[:-1], self.parts, len(self.v_pieces) * self.lanes)
        out = out[..., out.shape[-1] - self.row_size :]
        return out.reshape(*out.shape[:-2], self.parts * self.row_size)

    def _fill(self, x: jax.Array, axis: int, size: int) -> jax.Array:
        """Adds zeros behind an axis, up to a size."""
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, size - x.shape[axis])
        return jnp.pad(x, widths)


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
