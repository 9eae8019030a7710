"""What the parts of the kernel share: static sizes, items of work, and layouts of registers."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arith import Ref, Scalar
from pallas_kernels.attention.options import AttentionOptions

PRODUCT = 64  # rows of a product of matrices
# Layouts: of a matrix as products leave it, and of one number per row or per column of it.
MATRIX = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Static sizes of a call.

    Attributes:
      num_kv_heads: K.
      head_dim: D.
      page_size: P.
      tile_heads: heads of a tile. A KV head counts once for each group of its query heads that has
        rows of its own.
      rows: query rows of a tile and head, a multiple of 8.
      block_tokens: keys of a block.
      stages: blocks in shared memory at once; all but one are being fetched.
      ctas: blocks of threads.
      dtype: type of the factors of matrix products.
      code: type of K and V in the pages, if it is not `dtype`; else None.
      scaled: the pages have scales.
      one_bound: all rows of a tile see the same keys.
      options: options of the call.
    """

    num_kv_heads: int
    head_dim: int
    page_size: int
    tile_heads: int
    rows: int
    block_tokens: int
    stages: int
    ctas: int
    dtype: jnp.dtype
    code: jnp.dtype | None
    scaled: bool
    one_bound: bool
    options: AttentionOptions

    @property
    def slices(self) -> list[slice]:
        """The D channels, in slices that are summed together: registers hold two such sums."""
        width = self.head_dim if self.rows <= 16 else PRODUCT
        return [slice(first, first + width) for first in range(0, self.head_dim, width)]

    @property
    def run(self) -> int:
        """Tokens of a copy: they lie in one page and in one block."""
        return math.gcd(self.page_size, self.block_tokens)

    @property
    def runs(self) -> int:
        """Copies of the K of a block."""
        return self.block_tokens // self.run


class ItemFields[T](NamedTuple):
    """What is known about each item of work: a tile of query rows, and some of the keys it sees.

    Outside the kernel each field is an `[items]` int32 array, inside it is the scalar of one item.

    Attributes:
      seq: row of the page table.
      tile: tile of query rows.
      start, end: the keys [start, end) of the item.
      inner_start, inner_end: the keys that every row of the tile sees, some outside of the item.
    """

    seq: T
    tile: T
    start: T
    end: T
    inner_start: T
    inner_end: T


class Item(NamedTuple):
    """An item of work for one head.

    Attributes:
      number: index of the item.
      head: one of the plan's `tile_heads`.
      fields: the item.
      first, last: the blocks [first, last) hold its keys.
    """

    number: Scalar
    head: Scalar
    fields: ItemFields[Scalar]
    first: Scalar
    last: Scalar


@dataclass(frozen=True, kw_only=True)
class Work:
    """The items of a block of threads: every `ctas`-th pair of an item and a head.

    Attributes:
      plan: sizes.
      items: `[items, fields]` int32, see `ItemFields`.
      cta: index of the block of threads.
      count: items in use, times heads.
    """

    plan: Plan
    items: Ref
    cta: Scalar
    count: Scalar

    @property
    def mine(self) -> jax.Array:
        """How many items the block of threads has."""
        return jnp.maximum(div(self.count - self.cta + self.plan.ctas - 1, self.plan.ctas), 0)

    def __getitem__(self, n: Scalar) -> Item:
        """Item n of the block of threads; after the last one, some item."""
        index = self.cta + n * self.plan.ctas
        number = jnp.minimum(div(index, self.plan.tile_heads), self.items.shape[0] - 1)
        fields = ItemFields(*(self.items[number, i] for i in range(len(ItemFields._fields))))
        return Item(
            number=number,
            head=rem(index, self.plan.tile_heads),
            fields=fields,
            first=div(fields.start, self.plan.block_tokens),
            last=div(fields.end + self.plan.block_tokens - 1, self.plan.block_tokens),
        )


def div(n: Scalar, by: Scalar) -> jax.Array:
    """Returns `n / by`, rounded towards zero."""
    return lax.div(jnp.int32(n), jnp.int32(by))


def rem(n: Scalar, by: Scalar) -> jax.Array:
    """Returns the remainder of `n / by`; n is not negative."""
    return lax.rem(jnp.int32(n), jnp.int32(by))


def store(target: Ref, values: jax.Array) -> None:
    """Writes an array to the device's memory, in the pieces that its layout has."""
    if hasattr(plgpu, "store"):  # jax 0.12 has it, and no longer takes such pieces without it
        plgpu.store(target, values, optimized=False)
    else:
        target[...] = values
