"""Pages of codes: K and V of one layer in few bits, with the parameters to decode them.

    SymmetricPages   int8 or fp8; one scale per token and head, or a fixed one per head
    AffinePages      4 or 2 bits; scale and minimum per token and head
    ChannelPages     4 or 2 bits; K has parameters per channel of a page, V per token. A page is
                     written whole, when it is full

Parameters have the page as their leading axis too, so every copy of a page takes them along.
Layouts, properties and methods are those of `pages.Pages`. `codes` says what codes are.
"""

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import codes
from pallas_kernels.pages import Interleaved, Layout, Pages, Stored, gather_runs, interleave

# Channels of V that share parameters in ChannelPages; fewer if D is not a multiple of it.
CHANNEL_GROUP = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SymmetricPages(Interleaved):
    """Pages of int8 or float8 codes: `x = code * scale`.

    Attributes:
      kv: int8 or float8 codes, shaped as in `Pages`. A float8 code is never -0
        (`codes.encode_symmetric`).
      scales: float32, `[N, 2K, P]`, which paired pages may have in rows of 128
        (`pages.numbers_shape`); or `[2K]` fixed scales, which were measured beforehand.
      layout: see `Pages`; static.
    """

    kv: jax.Array
    scales: jax.Array
    layout: Layout = dataclasses.field(default="head_major", metadata=dict(static=True))

    @property
    def is_static(self) -> bool:
        """The scales are fixed, and are not part of the pages."""
        return self.scales.ndim == 1

    @property
    def paged(self) -> Stored:
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
            scale = gather_runs(scales, page_ids, offsets, heads, run)
        return (code * scale[..., None]).reshape(*code.shape[:-2], run * D)

    def encode(self, k: jax.Array, v: jax.Array) -> Stored:
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
      kv: uint8, shaped as in `Pages` with `D * bits / 8` in place of D (`codes.pack_bits`). In
        paired pages codes have 4 bits and a row has D bytes, one per channel: the code of K is in
        the low half of the byte, that of V in the high half.
      parameters: uint32, shaped like the scales of SymmetricPages. The low half is the scale, the
        high half the minimum; both are float16.
      bits: bits per code, 2 or 4; static.
      layout: see `Pages`; static.
    """

    kv: jax.Array
    parameters: jax.Array
    bits: int = dataclasses.field(default=4, metadata=dict(static=True))
    layout: Layout = dataclasses.field(default="head_major", metadata=dict(static=True))

    @property
    def head_dim(self) -> int:
        """D."""
        return self.row_size * 8 // self.bits

    @property
    def paged(self) -> Stored:
        """See `Pages.paged`."""
        return {"kv": self.kv, "parameters": self.parameters}

    def read(
        self, kv_index: int, page_ids: jax.Array, offsets: jax.Array, run: int = 1
    ) -> jax.Array:
        """See `Pages.read`; float32."""
        code = self._read_codes(kv_index, page_ids, offsets, run)
        heads = 2 * jnp.arange(self.num_kv_heads) + kv_index
        parameters = self.by_token(self.parameters)
        stored = gather_runs(parameters, page_ids, offsets, heads, run)
        x = codes.decode_affine(code, codes.unpack_affine(stored[..., None]))
        return x.reshape(*x.shape[:-2], -1)

    def encode(self, k: jax.Array, v: jax.Array) -> Stored:
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
        """Gathers codes, `[..., K, n, run, D]` uint8."""

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
    """Pages of packed codes with parameters per channel of K and per token of V.

    K has one scale and minimum per channel, over all tokens of a page. V has them for each token
    and CHANNEL_GROUP channels. Source: KIVI, arXiv 2402.02750. A page is written whole
    (`page_write.seal_pages`): its parameters are known when it is full.

    Attributes:
      k, v: uint8 codes, `[N, K, P, D * bits / 8]`.
      k_parameters: float16 `[N, K, 2, D]`: scale, minimum.
      v_parameters: float16 `[N, K, P, 2 * groups]`: all scales, then all minima.
      k_bits, v_bits: bits per code, 2 or 4; static.
      narrow_k: the codes of K may leave out the extremes of a channel (`codes.encode_affine`). This
        helps if bits are few and the first tokens, whose extreme keys matter, are kept elsewhere;
        static.
      layout: the layout of the other pages of the cache; these arrays are the same in both; static.
    """

    k: jax.Array
    v: jax.Array
    k_parameters: jax.Array
    v_parameters: jax.Array
    k_bits: int = dataclasses.field(default=4, metadata=dict(static=True))
    v_bits: int = dataclasses.field(default=4, metadata=dict(static=True))
    narrow_k: bool = dataclasses.field(default=False, metadata=dict(static=True))
    layout: Layout = dataclasses.field(default="head_major", metadata=dict(static=True))

    @property
    def num_pages(self) -> int:
        """N, the null page included."""
        return self.k.shape[0]

    @property
    def page_size(self) -> int:
        """P, tokens per page."""
        return self.k.shape[2]

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.k_parameters.shape[1]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.k_parameters.shape[3]

    @property
    def paged(self) -> Stored:
        """See `Pages.paged`."""
        names = ("k", "v", "k_parameters", "v_parameters")
        return {name: getattr(self, name) for name in names}

    def read(
        self, kv_index: int, page_ids: jax.Array, offsets: jax.Array, run: int = 1
    ) -> jax.Array:
        """See `Pages.read`; float32."""
        D, heads = self.head_dim, jnp.arange(self.num_kv_heads)
        at = page_ids, offsets, heads, run
        packed = gather_runs(self.v if kv_index else self.k, *at)
        packed = packed.reshape(*packed.shape[:-1], run, -1)
        code = codes.unpack_bits(packed, self.v_bits if kv_index else self.k_bits)
        if kv_index:
            stored = gather_runs(self.v_parameters, *at)
            stored = stored.reshape(*stored.shape[:-1], run, 2, -1, 1)
            code = code.reshape(*code.shape[:-1], stored.shape[-2], -1)  # per group of channels
            parameters = codes.Affine(stored[..., 0, :, :], stored[..., 1, :, :])
        else:
            stored = self.k_parameters.at[page_ids[..., None, :], heads[:, None]].get(mode="clip")
            parameters = codes.Affine(stored[..., 0:1, :], stored[..., 1:2, :])
        x = codes.decode_affine(code, parameters)
        return x.reshape(*packed.shape[:-2], run * D)

    def encode_page(self, k: jax.Array, v: jax.Array) -> Stored:
        """Returns what K and V `[P, K, D]` of a full page are stored as.

        That is one page, without the leading axis, of each of `paged`.
        """
        P, K, D = k.shape
        k_code, k_stored = codes.encode_affine(k, self.k_bits, axis=0, narrow=self.narrow_k)
        groups = v.reshape(P, K, -1, math.gcd(D, CHANNEL_GROUP))
        v_code, v_stored = codes.encode_affine(groups, self.v_bits, axis=-1)
        by_token = {
            "k": codes.pack_bits(k_code, self.k_bits),
            "v": codes.pack_bits(v_code.reshape(P, K, D), self.v_bits),
            "v_parameters": jnp.concatenate([part[..., 0] for part in v_stored], axis=-1),
        }
        page = {name: array.swapaxes(0, 1) for name, array in by_token.items()}
        return page | {"k_parameters": jnp.stack([part[0] for part in k_stored], axis=1)}


TokenPages = Pages | SymmetricPages | AffinePages  # pages that are written token by token
AnyPages = TokenPages | ChannelPages


def times_fixed_scales(x: jax.Array, pages: AnyPages, kv_index: int) -> jax.Array:
    """Multiplies `x [T, H, D]` by the fixed scale of K (`kv_index` 0) or V (1) of each KV head.

    Kernels multiply q and their output so in place of the codes. If the pages have no fixed scales,
    `x` itself is returned.
    """
    if (scales := fixed_scales(pages)) is None:
        return x
    scales = jnp.repeat(scales[kv_index::2], x.shape[1] // pages.num_kv_heads)
    return (x.astype(jnp.float32) * scales[None, :, None]).astype(x.dtype)


def fixed_scales(pages: AnyPages) -> jax.Array | None:
    """Returns the fixed scales `[2K]` of K and V of each KV head, alternating; None if none are."""
    if isinstance(pages, SymmetricPages) and pages.is_static:
        return pages.scales
    return None
