"""The paged K and V of one layer, as every kernel takes them: here floats, which most caches hold.

One array holds K and V, pages first, so that a page is one contiguous slice: copying, evicting or
saving a page is one slice, and a kernel fetches it with one DMA. Pages of codes (`quantised_pages`)
offer the same properties and methods. Not here: which page belongs to whom (the host decides), nor
how values are written (`pallas_kernels.page_write`).
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

Layout = Literal["token_major", "head_major", "paired"]
LAYOUTS: tuple[Layout, ...] = ("token_major", "head_major", "paired")
Rows = dict[str, jax.Array]
LANES = 128  # of a TPU's register


class Interleaved:
    """The dimensions of pages with one array of K and V by turns."""

    kv: jax.Array
    layout: Layout

    @property
    def num_pages(self) -> int:
        """N, the null page included."""
        return self.kv.shape[0]

    @property
    def page_size(self) -> int:
        """P, tokens a page."""
        return self.kv.shape[token_axis(self.kv, self.layout)]

    @property
    def num_kv_heads(self) -> int:
        """K."""
        if self.layout == "paired":
            return self.kv.shape[1]
        return self.kv.shape[2 if self.layout == "token_major" else 1] // 2

    @property
    def row_size(self) -> int:
        """Elements of `kv` that a token has for K of one head."""
        if self.layout == "paired":
            return self.kv.shape[2] * self.kv.shape[4] // 2
        return self.kv.shape[3]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.row_size

    def by_token(self, array: jax.Array) -> jax.Array:
        """An array of `paged` with P as an axis: `numbers_shape` may have none."""
        if array.ndim > 3:
            return array
        heads = 2 * self.num_kv_heads
        return array.reshape(-1, *by_layout(self.layout, self.page_size, heads))

    def read_rows(
        self, kv_index: int, page_ids: jax.Array, offsets: jax.Array, run: int
    ) -> jax.Array:
        """Gathers from `kv` as it is stored, `[..., K, n, run * row_size]`; see `Pages.read`."""
        K = self.num_kv_heads
        if self.layout != "paired":
            heads = 2 * jnp.arange(K) + kv_index
            return gather_runs(self.kv, self.layout, page_ids, offsets, heads, run)
        _, _, X, P, L = self.kv.shape
        pieces = self.kv.reshape(-1, K * X, P, L)
        both = gather_runs(pieces, self.layout, page_ids, offsets, jnp.arange(K * X), run)
        *lead, _, n, _ = both.shape
        rows = jnp.moveaxis(both.reshape(*lead, K, X, n, run, L), -4, -2)
        one = rows.reshape(*lead, K, n, run, 2, self.row_size)[..., kv_index, :]
        return one.reshape(*lead, K, n, run * self.row_size)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Pages(Interleaved):
    """Physical pages of one layer.

    KV head k keeps its K at index 2k and its V at index 2k + 1 of the `2K` axis, so that a shard
    of that axis holds whole heads.

    Attributes:
      kv: `[N, P, 2K, D]` when token-major (one DMA brings every head); `[N, 2K, P, D]` when
        head-major (one DMA brings one head); `[N, K, X, P, L]` when paired: head-major, a token's K
        and V one row of 2D elements, cut into X pieces of L: 128, the lanes of a TPU's register,
        where D is a multiple of 64, and else one piece.
      layout: which of them; static.
    """

    kv: jax.Array
    layout: Layout = dataclasses.field(default="token_major", metadata=dict(static=True))

    @property
    def paged(self) -> dict[str, jax.Array]:
        """The arrays whose leading axis is N, by field: what a copy of a page copies."""
        return {"kv": self.kv}

    def read(
        self, kv_index: int, page_ids: jax.Array, offsets: jax.Array, run: int = 1
    ) -> jax.Array:
        """Gathers K (`kv_index` 0) or V (1) in runs of tokens, by head.

        Args:
          kv_index: which of the two.
          page_ids: `[..., n]` int32; an id out of range reads some page of the pool.
          offsets: `[..., n]` int32 in [0, P / run), of a page's runs.
          run: tokens a run; 1 where the layout is token-major.

        Returns:
          `[..., K, n, run * D]`, a copy.
        """
        return self.read_rows(kv_index, page_ids, offsets, run)

    def encode(self, k: jax.Array, v: jax.Array) -> Rows:
        """What `[T, K, D]` K and V are stored as: for each of `paged`, rows `[T, 2K, ...]`."""
        return {"kv": interleave(k, v).astype(self.kv.dtype)}


def pool_shape(
    layout: Layout, num_pages: int, page_size: int, kv_heads: int, row_size: int
) -> tuple[int, ...]:
    """Of `kv`; `row_size` elements for K of a token and head, D where they are no codes."""
    if layout == "paired":
        lanes = 2 * row_size if 2 * row_size % LANES else LANES
        return num_pages, kv_heads, 2 * row_size // lanes, page_size, lanes
    return num_pages, *by_layout(layout, page_size, 2 * kv_heads), row_size


def numbers_shape(layout: Layout, num_pages: int, page_size: int, heads: int) -> tuple[int, ...]:
    """Of what has a number a token and head. Where a TPU reads them, those of a small page, head by
    head, stand in rows of LANES if they fill some: rows of P would be padded to as many."""
    size = heads * page_size
    if layout == "paired" and LANES % page_size == 0 and size % LANES == 0:
        return num_pages, size // LANES, LANES
    return num_pages, *by_layout(layout, page_size, heads)


def by_layout(layout: Layout, page_size: int, heads: int) -> tuple[int, int]:
    """P and heads in the order of a layout."""
    return (page_size, heads) if layout == "token_major" else (heads, page_size)


def token_axis(array: jax.Array, layout: Layout) -> int:
    """The axis P of an array of pages: of `kv`, or of what has a number a token and head."""
    return 1 if layout == "token_major" else {3: 2, 4: 2, 5: 3}[array.ndim]


def token_shape(array: jax.Array, layout: Layout) -> tuple[int, ...]:
    """What one token has in an array of pages."""
    axis = token_axis(array, layout)
    return (*array.shape[1:axis], *array.shape[axis + 1 :])


def token_index(array: jax.Array, layout: Layout, page: Any, offset: Any) -> tuple[Any, ...]:
    """The index of tokens in an array of pages."""
    return (page, *[slice(None)] * (token_axis(array, layout) - 1), offset)


def tokens_of(pages: "Pages", page: jax.Array) -> jax.Array:
    """K and V by turns, `[P, 2K, D]`, of one page of `kv`, without the leading axis."""
    tokens = jnp.moveaxis(page, token_axis(pages.kv, pages.layout) - 1, 0)
    return tokens.reshape(pages.page_size, 2 * pages.num_kv_heads, pages.head_dim)


def interleave(k: jax.Array, v: jax.Array) -> jax.Array:
    """K and V `[T, K, ...]` by turns, `[T, 2K, ...]`."""
    T, K, *rest = k.shape
    return jnp.stack([k, v], axis=2).reshape(T, 2 * K, *rest)


def gather_runs(
    array: jax.Array,
    layout: Layout,
    page_ids: jax.Array,
    offsets: jax.Array,
    heads: jax.Array,
    run: int,
) -> jax.Array:
    """Gathers runs of tokens of some heads from an array of pages.

    Args:
      array: `[N, P, C, ...]` where token-major, else `[N, C, P, ...]`.
      layout: which of the two.
      page_ids, offsets, run: see `Pages.read`.
      heads: `[K]` int32, indices of the axis C.

    Returns:
      `[..., K, n, run * R]`, R what the axes behind P and C have in all.
    """
    page_ids, offsets, heads = page_ids[..., None, :], offsets[..., None, :], heads[:, None]
    N, rest = array.shape[0], math.prod(array.shape[3:])
    if layout == "token_major":
        assert run == 1
        pool = array.reshape(*array.shape[:3], rest)
        return pool.at[page_ids, offsets, heads].get(mode="clip")
    C, P = array.shape[1:3]
    pool = array.reshape(N, C, P // run, run * rest)
    return pool.at[page_ids, heads, offsets].get(mode="clip")
