"""The paged K and V of one layer, as every kernel takes them: pages of floats.

One array holds K and V with the page as its leading axis. So a page is one contiguous slice, which
is copied, evicted or saved as one, and which a kernel fetches with one DMA. Pages of codes
(`quantised_pages`) have the same properties and methods. The host decides which page belongs to
which sequence; `pallas_kernels.page_write` writes values.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

Layout = Literal["head_major", "paired"]
LAYOUTS: tuple[Layout, ...] = ("head_major", "paired")
Stored = dict[str, jax.Array]  # values as pages store them, by the names of `paged`
LANES = 128  # elements of a row of a TPU's register


class Interleaved:
    """The dimensions of pages with one array for K and V."""

    kv: jax.Array
    layout: Layout

    @property
    def num_pages(self) -> int:
        """N, the null page included."""
        return self.kv.shape[0]

    @property
    def page_size(self) -> int:
        """P, tokens per page."""
        return self.kv.shape[token_axis(self.kv)]

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.kv.shape[1] if self.layout == "paired" else self.kv.shape[1] // 2

    @property
    def row_size(self) -> int:
        """Elements of `kv` for the K of one token and head."""
        if self.layout == "paired":
            return self.kv.shape[2] * self.kv.shape[4] // 2
        return self.kv.shape[3]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.row_size

    def by_token(self, array: jax.Array) -> jax.Array:
        """Returns an array of `paged` with P as an axis, which `numbers_shape` may not have."""
        if array.ndim > 3:
            return array
        return array.reshape(-1, 2 * self.num_kv_heads, self.page_size)

    def read_rows(
        self, kv_index: int, page_ids: jax.Array, offsets: jax.Array, run: int
    ) -> jax.Array:
        """Gathers from `kv` without decoding, `[..., K, n, run * row_size]`; see `Pages.read`."""
        K = self.num_kv_heads
        if self.layout != "paired":
            return gather_runs(self.kv, page_ids, offsets, 2 * jnp.arange(K) + kv_index, run)
        _, _, X, P, lanes = self.kv.shape
        pieces = self.kv.reshape(-1, K * X, P, lanes)
        both = gather_runs(pieces, page_ids, offsets, jnp.arange(K * X), run)
        *lead, _, n, _ = both.shape
        rows = jnp.moveaxis(both.reshape(*lead, K, X, n, run, lanes), -4, -2)
        one = rows.reshape(*lead, K, n, run, 2, self.row_size)[..., kv_index, :]
        return one.reshape(*lead, K, n, run * self.row_size)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Pages(Interleaved):
    """Physical pages of one layer, as floats.

    Attributes:
      kv: float32, bfloat16 or float16.

        Head-major: `[N, 2K, P, D]`. KV head k has its K at index 2k and its V at index 2k + 1, so a
        shard of that axis holds whole heads. One DMA fetches one head of a page.

        Paired: `[N, K, X, P, lanes]`. K and V of a token and head are one row of 2D elements, cut
        into X pieces: of 128 lanes, as wide as a TPU's register, if D is a multiple of 64, and else
        one piece. One DMA fetches all heads of a page.
      layout: `head_major` or `paired`; static.

    Example:
      `Pages(kv=jnp.zeros((64, 2 * 8, 16, 128), jnp.bfloat16))` has 64 pages of 16 tokens, with 8 KV
      heads of 128 dimensions.
    """

    kv: jax.Array
    layout: Layout = dataclasses.field(default="head_major", metadata=dict(static=True))

    @property
    def paged(self) -> Stored:
        """The arrays whose leading axis is N, by field: what a copy of a page copies."""
        return {"kv": self.kv}

    def read(
        self, kv_index: int, page_ids: jax.Array, offsets: jax.Array, run: int = 1
    ) -> jax.Array:
        """Gathers K (`kv_index` 0) or V (1) of runs of tokens, for all heads.

        Args:
          kv_index: which of the two.
          page_ids: `[..., n]` int32; an id outside the pool reads some page of the pool.
          offsets: `[..., n]` int32 in [0, P / run): the index of a run within its page.
          run: tokens of a run, a divisor of P.

        Returns:
          `[..., K, n, run * D]`, a copy.
        """
        return self.read_rows(kv_index, page_ids, offsets, run)

    def encode(self, k: jax.Array, v: jax.Array) -> Stored:
        """Returns what K and V `[T, K, D]` are stored as: `[T, 2K, ...]` for each of `paged`."""
        return {"kv": interleave(k, v).astype(self.kv.dtype)}


def pool_shape(
    layout: Layout, num_pages: int, page_size: int, kv_heads: int, row_size: int
) -> tuple[int, ...]:
    """Returns the shape of `kv`.

    `row_size` is the number of elements for the K of one token and head: D for floats.
    """
    if layout == "paired":
        lanes = 2 * row_size if 2 * row_size % LANES else LANES
        return num_pages, kv_heads, 2 * row_size // lanes, page_size, lanes
    return num_pages, 2 * kv_heads, page_size, row_size


def numbers_shape(layout: Layout, num_pages: int, page_size: int, heads: int) -> tuple[int, ...]:
    """Returns the shape of an array with one number per token and head.

    It is `[N, heads, P]`. In paired pages, if the numbers of a small page fill whole rows of LANES,
    they lie head by head in such rows: a TPU would pad rows of P numbers to as many.
    """
    size = heads * page_size
    if layout == "paired" and LANES % page_size == 0 and size % LANES == 0:
        return num_pages, size // LANES, LANES
    return num_pages, heads, page_size


def token_axis(array: jax.Array) -> int:
    """Returns the axis P of `kv`, or of an array with one number per token and head."""
    return 3 if array.ndim == 5 else 2


def token_shape(array: jax.Array) -> tuple[int, ...]:
    """Returns the shape of what an array of pages has for one token."""
    axis = token_axis(array)
    return (*array.shape[1:axis], *array.shape[axis + 1 :])


def token_index(array: jax.Array, page: Any, offset: Any) -> tuple[Any, ...]:
    """Returns the index of tokens in an array of pages."""
    return (page, *[slice(None)] * (token_axis(array) - 1), offset)


def tokens_of(pages: Pages, page: jax.Array) -> jax.Array:
    """Returns K and V, alternating, `[P, 2K, D]`, of one page of `kv` without its leading axis."""
    tokens = jnp.moveaxis(page, token_axis(pages.kv) - 1, 0)
    return tokens.reshape(pages.page_size, 2 * pages.num_kv_heads, pages.head_dim)


def interleave(k: jax.Array, v: jax.Array) -> jax.Array:
    """Returns K and V `[T, K, ...]`, alternating, as `[T, 2K, ...]`."""
    T, K, *rest = k.shape
    return jnp.stack([k, v], axis=2).reshape(T, 2 * K, *rest)


def gather_runs(
    array: jax.Array, page_ids: jax.Array, offsets: jax.Array, heads: jax.Array, run: int
) -> jax.Array:
    """Gathers runs of tokens of some heads from an array of pages.

    Args:
      array: `[N, heads, P, ...]`.
      page_ids, offsets, run: see `Pages.read`.
      heads: `[K]` int32, indices of the second axis.

    Returns:
      `[..., K, n, run * size]`, where `size` is the product of the axes after P.
    """
    N, num_heads, P, *rest = array.shape
    pool = array.reshape(N, num_heads, P // run, run * math.prod(rest))
    at = page_ids[..., None, :], heads[:, None], offsets[..., None, :]
    return pool.at[at].get(mode="clip")
