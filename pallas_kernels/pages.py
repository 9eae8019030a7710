"""The paged K and V of one layer, as every kernel takes them.

One array holds K and V, pages first, so that a page is one contiguous slice: copying, evicting or
saving a page is one slice, and a kernel fetches it with one DMA. Not here: which page belongs to
whom (the host decides), nor how values are written (`pallas_kernels.page_write`).
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

Layout = Literal["token_major", "head_major"]
LAYOUTS: tuple[Layout, ...] = ("token_major", "head_major")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Pages:
    """Physical pages of one layer.

    KV head k keeps its K at index 2k and its V at index 2k + 1 of the `2K` axis, so that a shard
    of that axis holds whole heads.

    Attributes:
      kv: `[N, P, 2K, D]` when token-major (one DMA brings every head), `[N, 2K, P, D]` when
        head-major (one DMA brings one head).
      layout: which of the two; static.
    """

    kv: jax.Array
    layout: Layout = dataclasses.field(default="token_major", metadata=dict(static=True))

    @property
    def num_pages(self) -> int:
        """N, the null page included."""
        return self.kv.shape[0]

    @property
    def page_size(self) -> int:
        """P, tokens a page."""
        return self.kv.shape[1 if self.layout == "token_major" else 2]

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.kv.shape[2 if self.layout == "token_major" else 1] // 2

    @property
    def head_dim(self) -> int:
        """D."""
        return self.kv.shape[3]

    def keys(self, page_ids: jax.Array, offsets: jax.Array) -> jax.Array:
        """Gathers the K of single tokens, by head.

        Args:
          page_ids: `[..., S]` int32; an id out of range reads some page of the pool.
          offsets: `[..., S]` int32 in [0, P).

        Returns:
          `[..., K, S, D]`, a copy.
        """
        return self._gather(page_ids, offsets, 0)

    def values(self, page_ids: jax.Array, offsets: jax.Array) -> jax.Array:
        """Gathers the V of single tokens; see `keys`."""
        return self._gather(page_ids, offsets, 1)

    def _gather(self, page_ids: jax.Array, offsets: jax.Array, kv_index: int) -> jax.Array:
        page_ids, offsets = page_ids[..., None, :], offsets[..., None, :]
        heads = 2 * jnp.arange(self.num_kv_heads)[:, None] + kv_index
        token_major = self.layout == "token_major"
        at = (page_ids, offsets, heads) if token_major else (page_ids, heads, offsets)
        return self.kv.at[at].get(mode="clip")
