"""KV formats: how K and V of a layer are stored in pages, as a type.

    f32, bf16, f16                     as they are
    int8, fp8_e4m3, fp8_e5m2           codes, and a scale for each token and head
    int8_static, fp8_e4m3_static, ..   codes, and a scale for each head, measured beforehand
    int4                               codes with a minimum too, after a Hadamard rotation
    kivi4, kivi2, kivi_k4v2, ..        K by channel over a page, V by token (arXiv 2402.02750); the
                                       page that is being filled is bfloat16. `kivi2_r32_s1` keeps
                                       so 32 earlier tokens, and one page at the beginning

A page's bytes are a function of the model, the format and the token prefix alone, so the format's
name is part of whatever identifies a page: the prefix index, an exported file. Not here: arithmetic
on codes (`pallas_kernels.codes`), nor which layer has which format (`choice`).
"""

import math
import re
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import AffinePages, AnyPages, ChannelPages, Layout, Pages, SymmetricPages
from pallas_kernels.pages import numbers_shape, pool_shape
from pallas_kernels.quantised_pages import CHANNEL_GROUP


@dataclass(frozen=True)
class Exact:
    """What a layer keeps in bfloat16 beside its pages of codes, in pages of a pool of its own.

    Attributes:
      recent: tokens before the one that is computed, at least; rounded up to whole pages.
      sink_pages: pages at the beginning of a sequence.
    """

    recent: int = 0
    sink_pages: int = 0


class KVFormat(Protocol):
    """One way of storing K and V."""

    @property
    def name(self) -> str:
        """What identifies it in messages, files and index namespaces."""
        ...

    @property
    def rotates(self) -> bool:
        """K and V are stored, and q and the output seen, in another basis (`rotation`)."""
        ...

    @property
    def exact(self) -> Exact | None:
        """What is kept as it is; None where every token is written as codes at once."""
        ...

    def init_pages(
        self, num_pages: int, page_size: int, kv_heads: int, head_dim: int, layout: Layout
    ) -> AnyPages:
        """Makes N pages for one layer, all zero."""
        ...

    def bytes_per_page(self, page_size: int, kv_heads: int, head_dim: int) -> int:
        """Bytes of a page of one layer, parameters included."""
        ...


@dataclass(frozen=True)
class FloatFormat:
    """Floats as they are; attributes as in KVFormat."""

    name: str
    dtype: DTypeLike
    rotates = False
    exact = None

    def init_pages(
        self, num_pages: int, page_size: int, kv_heads: int, head_dim: int, layout: Layout
    ) -> Pages:
        """See KVFormat."""
        shape = pool_shape(layout, num_pages, page_size, kv_heads, head_dim)
        return Pages(kv=jnp.zeros(shape, self.dtype), layout=layout)

    def bytes_per_page(self, page_size: int, kv_heads: int, head_dim: int) -> int:
        """See KVFormat."""
        return page_size * 2 * kv_heads * head_dim * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class SymmetricFormat:
    """int8 or float8 codes of one byte, a float32 scale for each token and head.

    Attributes:
      name: see KVFormat.
      dtype: of the codes.
    """

    name: str
    dtype: DTypeLike
    rotates = False
    exact = None

    def init_pages(
        self, num_pages: int, page_size: int, kv_heads: int, head_dim: int, layout: Layout
    ) -> SymmetricPages:
        """See KVFormat."""
        codes = pool_shape(layout, num_pages, page_size, kv_heads, head_dim)
        scales = numbers_shape(layout, num_pages, page_size, 2 * kv_heads)
        return SymmetricPages(
            kv=jnp.zeros(codes, self.dtype), scales=jnp.zeros(scales, jnp.float32), layout=layout
        )

    def bytes_per_page(self, page_size: int, kv_heads: int, head_dim: int) -> int:
        """See KVFormat."""
        return page_size * 2 * kv_heads * (head_dim + 4)


@dataclass(frozen=True)
class StaticFormat:
    """int8 or float8 codes of one byte, and a scale for each head that was measured beforehand.

    Attributes:
      name: see KVFormat; it has the scales' id.
      dtype: of the codes.
      scales: `[2K]`, of K and V by turns.
    """

    name: str
    dtype: DTypeLike
    scales: tuple[float, ...]
    rotates = False
    exact = None

    def init_pages(
        self, num_pages: int, page_size: int, kv_heads: int, head_dim: int, layout: Layout
    ) -> SymmetricPages:
        """See KVFormat.

        Raises:
          ValueError: the scales are for another number of heads.
        """
        if len(self.scales) != 2 * kv_heads:
            raise ValueError(
                f"scales of {len(self.scales) // 2} KV heads, the layer has {kv_heads}"
            )
        shape = pool_shape(layout, num_pages, page_size, kv_heads, head_dim)
        scales = jnp.array(self.scales, jnp.float32)
        return SymmetricPages(kv=jnp.zeros(shape, self.dtype), scales=scales, layout=layout)

    def bytes_per_page(self, page_size: int, kv_heads: int, head_dim: int) -> int:
        """See KVFormat."""
        return page_size * 2 * kv_heads * head_dim


@dataclass(frozen=True)
class RotatedFormat:
    """Codes of 4 bits in a rotated basis, scale and minimum for each token and head; attributes as
    in KVFormat."""

    name: str = "int4"
    bits: int = 4
    rotates = True
    exact = None

    def init_pages(
        self, num_pages: int, page_size: int, kv_heads: int, head_dim: int, layout: Layout
    ) -> AffinePages:
        """See KVFormat."""
        row_size = _code_bytes(head_dim, self.bits)
        codes = pool_shape(layout, num_pages, page_size, kv_heads, row_size)
        parameters = numbers_shape(layout, num_pages, page_size, 2 * kv_heads)
        return AffinePages(
            kv=jnp.zeros(codes, jnp.uint8),
            parameters=jnp.zeros(parameters, jnp.uint32),
            bits=self.bits,
            layout=layout,
        )

    def bytes_per_page(self, page_size: int, kv_heads: int, head_dim: int) -> int:
        """See KVFormat."""
        return page_size * 2 * kv_heads * (_code_bytes(head_dim, self.bits) + 4)


@dataclass(frozen=True)
class KiviFormat:
    """K in codes by channel over a page, V by token; a page becomes codes when it is full.

    Attributes:
      k_bits, v_bits: of a code, 2 or 4.
      exact: what stays bfloat16.
    """

    k_bits: int
    v_bits: int
    exact: Exact = Exact()
    rotates = False

    @property
    def name(self) -> str:
        """See KVFormat."""
        same = self.k_bits == self.v_bits
        name = f"kivi{self.k_bits}" if same else f"kivi_k{self.k_bits}v{self.v_bits}"
        if self.exact.recent:
            name += f"_r{self.exact.recent}"
        return name + (f"_s{self.exact.sink_pages}" if self.exact.sink_pages else "")

    def init_pages(
        self, num_pages: int, page_size: int, kv_heads: int, head_dim: int, layout: Layout
    ) -> ChannelPages:
        """See KVFormat."""
        shape = num_pages, kv_heads, page_size
        groups = _groups(head_dim)
        return ChannelPages(
            k=jnp.zeros((*shape, _code_bytes(head_dim, self.k_bits)), jnp.uint8),
            v=jnp.zeros((*shape, _code_bytes(head_dim, self.v_bits)), jnp.uint8),
            k_parameters=jnp.zeros((num_pages, kv_heads, 2, head_dim), jnp.float16),
            v_parameters=jnp.zeros((*shape, 2 * groups), jnp.float16),
            k_bits=self.k_bits,
            v_bits=self.v_bits,
            narrow_k=self.k_bits == 2 and self.exact.sink_pages > 0,
            layout=layout,
        )

    def bytes_per_page(self, page_size: int, kv_heads: int, head_dim: int) -> int:
        """See KVFormat."""
        codes = _code_bytes(head_dim, self.k_bits) + _code_bytes(head_dim, self.v_bits)
        v_parameters = 4 * _groups(head_dim)
        return kv_heads * (page_size * (codes + v_parameters) + 4 * head_dim)


EXACT = FloatFormat("bf16", jnp.bfloat16)  # of the pages beside those of codes
CODE_DTYPES = {"int8": jnp.int8, "fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}
STATIC = {f"{name}_static": dtype for name, dtype in CODE_DTYPES.items()}
FORMATS: dict[str, KVFormat] = {
    format.name: format
    for format in (
        FloatFormat("f32", jnp.float32),
        EXACT,
        FloatFormat("f16", jnp.float16),
        *(SymmetricFormat(name, dtype) for name, dtype in CODE_DTYPES.items()),
        RotatedFormat(),
        KiviFormat(4, 4),
        KiviFormat(2, 2),
        KiviFormat(4, 2),
        KiviFormat(2, 4),
    )
}

_KIVI = re.compile(r"kivi(?:([24])|_k([24])v([24]))(?:_r([0-9]{1,6}))?(?:_s([0-9]{1,4}))?")


def get_format(name: str) -> KVFormat:
    """Returns the format of that name.

    Raises:
      ValueError: there is none, or it needs measured scales (`choice.choose_formats`).
    """
    if name in FORMATS:
        return FORMATS[name]
    if (match := _KIVI.fullmatch(name)) is not None:
        both, k_bits, v_bits, recent, sinks = (int(x) if x else 0 for x in match.groups())
        return KiviFormat(both or k_bits, both or v_bits, Exact(recent, sinks))
    if name in STATIC:
        raise ValueError(f"format {name} needs scales that `calibrate` measured")
    raise ValueError(
        f"no KV format {name!r}; there are {', '.join((*FORMATS, *STATIC))}, and kivi formats with "
        "_rR for R recent tokens and _sS for S first pages in bfloat16"
    )


def _groups(head_dim: int) -> int:
    return head_dim // math.gcd(head_dim, CHANNEL_GROUP)


def _code_bytes(head_dim: int, bits: int) -> int:
    """Bytes of a token's codes of one head.

    Raises:
      ValueError: they do not fill whole bytes.
    """
    if head_dim * bits % 8:
        raise ValueError(f"D = {head_dim}: a token's codes of {bits} bits must fill bytes")
    return head_dim * bits // 8
