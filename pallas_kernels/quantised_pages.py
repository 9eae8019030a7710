"""Pages of codes: K and V of one layer in few bits, with the parameters that turn them back.

    SymmetricPages   int8 or fp8; a scale a token and head in the page, or a fixed one a head
    AffinePages      4 bits or 2; scale and minimum a token and head in the page
    ChannelPages     K a channel over a page, V a token: written whole, when a page is full

Parameters lie beside the codes with the page as their leading axis too, so that they follow every
copy of a page. Layouts, and K and V by turns on one axis, are as in `pages.Pages`; so are the
properties and methods. Not here: the codes themselves (`codes`), nor which pages are full.
"""

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import codes
from pallas_kernels.pages import Interleaved, Layout, Pages, Rows, gather_runs, interleave

CHANNEL_GROUP = 32  # channels of V that share parameters in ChannelPages, or a divisor of D


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SymmetricPages(Interleaved):
    """Pages of int8 or float8 codes: `x = code * scale`.

    Attributes:
      kv: codes, shaped as in `Pages`; of float8 never -0 (`codes.encode_symmetric`).
      scales: float32, `[N, P, 2K]` when token-major, `[N, 2K, P]` when head-major, and when paired
        the same in rows of 128 (`pages.numbers_shape`); `[2K]` where they are fixed, measured
        beforehand.
      layout: static.
    """

    kv: jax.Array
    scales: jax.Array
    layout: Layout = dataclasses.field(default="token_major", metadata=dict(static=True))

    @property
    def is_static(self) -> bool:
        """Scales are fixed, and no part of the pages."""
        return self.scales.ndim == 1

    @property
    def paged(self) -> dict[str, jax.Array]:
        """See `Pages.paged`."""
        return {"kv": self.kv} if self.is_static else {"kv": self.kv, "scales": self.scales}

    def read(
        self, kv_index: int, page_ids: jax.Array, offsets: jax.Array, run: int = 1
    ) -> jax.Array:
        """See `Pages.read`; float32."""
        K, D = self.num_kv_heads, self.head_dim
        heads = 2 * jnp.arange(K) + kv_index
        code = self.read_rows(kv_index, page_ids, offsets, run)
        code = code.reshape(*code.shape[:-1], run, D).astype(jnp.float32)
        if self.is_static:
            scale = self.scales[heads].reshape(*(1,) * (code.ndim - 4), K, 1, 1)
        else:
            scales = self.by_token(self.scales)
            scale = gather_runs(scales, self.layout, page_ids, offsets, heads, run)
        return (code * scale[..., None]).reshape(*code.shape[:-2], run * D)

    def encode(self, k: jax.Array, v: jax.Array) -> Rows:
        """See `Pages.encode`."""
        x, dtype = interleave(k, v), self.kv.dtype
        if self.is_static:
            return {"kv": codes.encode_symmetric(x, self.scales[None, :, None], dtype)}
        scale = codes.symmetric_scale(x, dtype)
        return {"kv": codes.encode_symmetric(x, scale, dtype), "scales": scale[..., 0]}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AffinePages(Interleaved):
    """Pages of packed codes: `x = code * scale + minimum`, for each token and head.

    Attributes:
      kv: uint8, shaped as in `Pages` with `D * bits / 8` for D (`codes.pack_bits`). Where paired,
        codes have 4 bits and a row D bytes, one a channel: K's code low, V's high.
      parameters: uint32, shaped as the scales of SymmetricPages: the bits of scale, the low half,
        and minimum, float16 both.
      bits: of a code; static.
      layout: static.
    """

    kv: jax.Array
    parameters: jax.Array
    bits: int = dataclasses.field(default=4, metadata=dict(static=True))
    layout: Layout = dataclasses.field(default="token_major", metadata=dict(static=True))

    @property
    def head_dim(self) -> int:
        """D."""
        return self.row_size * 8 // self.bits

    @property
    def paged(self) -> dict[str, jax.Array]:
        """See `Pages.paged`."""
        return {"kv": self.kv, "parameters": self.parameters}

    def read(
        self, kv_index: int, page_ids: jax.Array, offsets: jax.Array, run: int = 1
    ) -> jax.Array:
        """See `Pages.read`; float32."""
        code = self._read_codes(kv_index, page_ids, offsets, run)
        heads = 2 * jnp.arange(self.num_kv_heads) + kv_index
        parameters = self.by_token(self.parameters)
        stored = gather_runs(parameters, self.layout, page_ids, offsets, heads, run)
        x = codes.decode_affine(code, codes.unpack_affine(stored[..., None]))
        return x.reshape(*x.shape[:-2], -1)

    def encode(self, k: jax.Array, v: jax.Array) -> Rows:
        """See `Pages.encode`."""
        code, parameters = codes.encode_affine(interleave(k, v), self.bits, axis=-1)
        if self.layout == "paired":
            packed = (code[:, 0::2] | code[:, 1::2] << 4).reshape(*code.shape[:2], -1)
        else:
            packed = codes.pack_bits(code, self.bits)
        return {"kv": packed, "parameters": codes.pack_affine(parameters)[..., 0]}

    def _read_codes(
        self, kv_index: int, page_ids: jax.Array, offsets: jax.Array, run: int
    ) -> jax.Array:
        """Gathers codes `[..., K, n, run, D]`."""

        def read(index: int) -> jax.Array:
            rows = self.read_rows(index, page_ids, offsets, run)
            return rows.reshape(*rows.shape[:-1], run, self.row_size)

        if self.layout == "paired":
            row = jnp.concatenate([read(0), read(1)], axis=-1)
            return row >> 4 * kv_index & 0xF
        return codes.unpack_bits(read(kv_index), self.bits)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ChannelPages:
    """Pages of packed codes in which a channel of K has its parameters over all tokens of a page,
    and V for each token and CHANNEL_GROUP channels (KIVI, arXiv 2402.02750).

    A page is written whole (`page_write.seal_pages`): its parameters are known when it is full.

    Attributes:
      k, v: uint8 codes, `[N, P, K, D * bits / 8]` when token-major, else `[N, K, P, ...]`.
      k_parameters: float16 `[N, K, 2, D]`: scale, minimum.
      v_parameters: float16 `[N, P, K, 2 * groups]` or `[N, K, P, 2 * groups]`: all scales, then all
        minima.
      k_bits, v_bits: of a code; static.
      narrow_k: K's codes may leave out the extremes of a channel (`codes.encode_affine`). Of use
        with few bits, and where the first tokens, which have extreme keys that matter, are kept
        elsewhere; static.
      layout: static.
    """

    k: jax.Array
    v: jax.Array
    k_parameters: jax.Array
    v_parameters: jax.Array
    k_bits: int = dataclasses.field(default=4, metadata=dict(static=True))
    v_bits: int = dataclasses.field(default=4, metadata=dict(static=True))
    narrow_k: bool = dataclasses.field(default=False, metadata=dict(static=True))
    layout: Layout = dataclasses.field(default="token_major", metadata=dict(static=True))

    @property
    def num_pages(self) -> int:
        """N, the null page included."""
        return self.k.shape[0]

    @property
    def page_size(self) -> int:
        """P, tokens a page."""
        return self.k.shape[1 if self.layout == "token_major" else 2]

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.k_parameters.shape[1]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.k_parameters.shape[3]

    @property
    def paged(self) -> dict[str, jax.Array]:
        """See `Pages.paged`."""
        names = ("k", "v", "k_parameters", "v_parameters")
        return {name: getattr(self, name) for name in names}

    def read(
        self, kv_index: int, page_ids: jax.Array, offsets: jax.Array, run: int = 1
    ) -> jax.Array:
        """See `Pages.read`; float32."""
        D, heads = self.head_dim, jnp.arange(self.num_kv_heads)
        at = page_ids, offsets, heads, run
        packed = gather_runs(self.v if kv_index else self.k, self.layout, *at)
        packed = packed.reshape(*packed.shape[:-1], run, -1)
        code = codes.unpack_bits(packed, self.v_bits if kv_index else self.k_bits)
        if kv_index:
            stored = gather_runs(self.v_parameters, self.layout, *at)
            stored = stored.reshape(*stored.shape[:-1], run, 2, -1, 1)
            code = code.reshape(*code.shape[:-1], stored.shape[-2], -1)  # by group of channels
            parameters = codes.Affine(stored[..., 0, :, :], stored[..., 1, :, :])
        else:
            stored = self.k_parameters.at[page_ids[..., None, :], heads[:, None]].get(mode="clip")
            parameters = codes.Affine(stored[..., 0:1, :], stored[..., 1:2, :])
        x = codes.decode_affine(code, parameters)
        return x.reshape(*packed.shape[:-2], run * D)

    def encode_page(self, k: jax.Array, v: jax.Array) -> Rows:
        """What the `[P, K, D]` K and V of a full page are stored as: for each of `paged`, a page
        without the leading axis."""
        P, K, D = k.shape
        k_code, k_stored = codes.encode_affine(k, self.k_bits, axis=0, narrow=self.narrow_k)
        groups = v.reshape(P, K, -1, math.gcd(D, CHANNEL_GROUP))
        v_code, v_stored = codes.encode_affine(groups, self.v_bits, axis=-1)
        page = {
            "k": codes.pack_bits(k_code, self.k_bits),
            "v": codes.pack_bits(v_code.reshape(P, K, D), self.v_bits),
            "v_parameters": jnp.concatenate([part[..., 0] for part in v_stored], axis=-1),
        }
        if self.layout != "token_major":
            page = {name: array.swapaxes(0, 1) for name, array in page.items()}
        return page | {"k_parameters": jnp.stack([part[0] for part in k_stored], axis=1)}


TokenPages = Pages | SymmetricPages | AffinePages  # written a token at a time
AnyPages = TokenPages | ChannelPages


def times_fixed_scales(x: jax.Array, pages: AnyPages, kv_index: int) -> jax.Array:
    """`x [T, H, D]` times the fixed scale of K (`kv_index` 0) or V (1) of each head's KV head, as
    products of codes want q and their output; `x` itself where pages have no fixed scales."""
    if (scales := fixed_scales(pages)) is None:
        return x
    scales = jnp.repeat(scales[kv_index::2], x.shape[1] // pages.num_kv_heads)
    return (x.astype(jnp.float32) * scales[None, :, None]).astype(x.dtype)


def fixed_scales(pages: AnyPages) -> jax.Array | None:
    """Scales that are fixed, of K and V of each KV head by turns, `[2K]`; None where none are."""
    if isinstance(pages, SymmetricPages) and pages.is_static:
        return pages.scales
    return None
