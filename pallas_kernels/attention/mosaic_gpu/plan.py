"""What the parts of the kernel share: its static sizes, an item of work, layouts of registers."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.options import AttentionOptions

LOG2_E = math.log2(math.e)
PRODUCT = 64  # rows of a product of matrices
# Of a matrix as products leave it, and of a number a row of it or a column.
MATRIX = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)
Ref = Any
Scalar = jax.Array | int  # int32, traced where it is an array


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Static sizes of a call.

    Attributes:
      heads: KV heads, each as often as its query heads take tiles of their own.
      kv_heads, head_dim, page_size: K, D and P.
      rows: N, query rows of a tile, a multiple of 8.
      block: keys of a block.
      stages: blocks in shared memory at once, or on their way there.
      ctas: blocks of threads.
      dtype: of products.
      code: of K and V in the pages, where that is another.
      scaled: codes have scales in their pages.
      one_bound: all rows of a tile see the same keys.
      options: of the call.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    rows: int
    block: int
    stages: int
    ctas: int
    dtype: jnp.dtype
    code: jnp.dtype | None
    scaled: bool
    one_bound: bool
    options: AttentionOptions

    @property
    def slices(self) -> list[slice]:
        """Of the D channels, as many as are summed at once: registers hold two such sums."""
        width = self.head_dim if self.rows <= 16 else PRODUCT
        return [slice(first, first + width) for first in range(0, self.head_dim, width)]

    @property
    def run(self) -> int:
        """Tokens of a copy: they lie in one page and in one block."""
        return math.gcd(self.page_size, self.block)

    @property
    def runs(self) -> int:
        """Copies of a block's K."""
        return self.block // self.run


@dataclass(frozen=True, kw_only=True)
class Work:
    """The items that a block of threads takes: every `ctas`-th, for each head.

    Attributes:
      plan: sizes.
      items: `[items, 6]` int32, see `Item`: seq, tile, start, end, inner_start, inner_end.
      cta: number of the block of threads.
      count: items in use, times heads.
    """

    plan: Plan
    items: Ref
    cta: Scalar
    count: Scalar

    @property
    def mine(self) -> jax.Array:
        """How many there are."""
        return jnp.maximum(div(self.count - self.cta + self.plan.ctas - 1, self.plan.ctas), 0)

    def __getitem__(self, n: Scalar) -> "Item":
        """Number n; past the last one, some item."""
        index = self.cta + n * self.plan.ctas
        number = jnp.minimum(div(index, self.plan.heads), self.items.shape[0] - 1)
        seq, tile, start, end, *inner = (self.items[number, field] for field in range(6))
        return Item(
            number=number,
            head=rem(index, self.plan.heads),
            seq=seq,
            tile=tile,
            start=start,
            end=end,
            inner_start=inner[0],
            inner_end=inner[1],
            first=div(start, self.plan.block),
            last=div(end + self.plan.block - 1, self.plan.block),
        )


@dataclass(frozen=True, kw_only=True)
class Item:
    """An item for one head.

    Attributes:
      number: of the item.
      head: of the plan's.
      seq: row of the page table.
      tile: of query rows.
      start, end: its keys, which lie in blocks [first, last).
      inner_start, inner_end: the keys that every row of the tile sees, past the item perhaps.
    """

    number: Scalar
    head: Scalar
    seq: Scalar
    tile: Scalar
    start: Scalar
    end: Scalar
    inner_start: Scalar
    inner_end: Scalar
    first: Scalar
    last: Scalar


def div(n: Scalar, by: Scalar) -> jax.Array:
    """`n // by` of numbers that are not negative, rounded towards zero of others."""
    return lax.div(jnp.int32(n), jnp.int32(by))


def rem(n: Scalar, by: Scalar) -> jax.Array:
    """`n % by` of numbers that are not negative."""
    return lax.rem(jnp.int32(n), jnp.int32(by))


def store(target: Ref, values: jax.Array) -> None:
    """Writes an array to the device's memory, in pieces as its layout has them."""
    if hasattr(plgpu, "store"):  # new in jax 0.12, which takes no such pieces the old way
        plgpu.store(target, values, optimized=False)
    else:
        target[...] = values
