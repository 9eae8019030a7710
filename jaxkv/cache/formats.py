"""KV formats as arrays: each one makes the pages of a layer.

The names, bits and bytes of the formats are in `jaxkv.kv_format`, arithmetic on codes is in
`pallas_kernels.codes`, and `jaxkv.cache.choice` gives each layer its format.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax.numpy as jnp

from jaxkv.kv_format import Exact, FormatSpec, channel_groups, code_bytes, parse_format
from pallas_kernels import AffinePages, AnyPages, ChannelPages, Layout, Pages, SymmetricPages
from pallas_kernels.pages import numbers_shape, pool_shape


@runtime_checkable
class KVFormat(Protocol):
    """One way of storing K and V. A format of your own is an object with these five members.

    The object is compared and hashed as a static part of the cache, so it must be immutable: a
    frozen dataclass is the simplest. `EngineConfig(kv_format=...)` and `choose_formats` take it in
    place of a name.

    Example: 2-bit codes with scale and minimum per token and head, in the rotated basis.

        @dataclass(frozen=True)
        class Int2:
            name = "int2"
            rotates = True
            exact = None

            def init_pages(self, num_pages, page_size, kv_heads, head_dim, layout):
                codes = pool_shape(layout, num_pages, page_size, kv_heads, head_dim // 4)
                parameters = numbers_shape(layout, num_pages, page_size, 2 * kv_heads)
                return AffinePages(
                    kv=jnp.zeros(codes, jnp.uint8),
                    parameters=jnp.zeros(parameters, jnp.uint32),
                    bits=2,
                    layout=layout,
                )

            def bytes_per_page(self, page_size, kv_heads, head_dim):
                return page_size * 2 * kv_heads * (head_dim // 4 + 4)
    """

    @property
    def name(self) -> str:
        """Identifies the format in messages, files and the namespaces of the prefix index: letters,
        digits and `_ . @ -`. Two formats that store anything differently need different names."""
        ...

    @property
    def rotates(self) -> bool:
        """Whether K and V are stored in the basis of `jaxkv.cache.rotation`. Attention then rotates
        q, and rotates the output back."""
        ...

    @property
    def exact(self) -> Exact | None:
        """The tokens that are also kept in bfloat16. None if each step writes its tokens in this
        format; otherwise `init_pages` must return `ChannelPages`, which are written when full."""
        ...

    def init_pages(
        self, num_pages: int, page_size: int, kv_heads: int, head_dim: int, layout: Layout
    ) -> AnyPages:
        """Makes the N pages of one layer, filled with zeros.

        Args:
          num_pages: N, the null page included.
          page_size: P, tokens per page.
          kv_heads: K.
          head_dim: D.
          layout: order of the axes of a page; see `pallas_kernels.pages`.

        Raises:
          ValueError: the format does not fit these sizes.
        """
        ...

    def bytes_per_page(self, page_size: int, kv_heads: int, head_dim: int) -> int:
        """Returns the bytes that one page of one layer takes in the arrays of `init_pages`, its
        parameters included."""
        ...


@dataclass(frozen=True)
class PackageFormat:
    """What the formats of this package share: all but the arrays follows from `spec`."""

    spec: FormatSpec

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def rotates(self) -> bool:
        return self.spec.kind == "affine"

    @property
    def exact(self) -> Exact | None:
        return self.spec.exact

    def bytes_per_page(self, page_size: int, kv_heads: int, head_dim: int) -> int:
        return self.spec.page_bytes(page_size, kv_heads, head_dim)


class FloatFormat(PackageFormat):
    """Floats as they are."""

    def init_pages(
        self, num_pages: int, page_size: int, kv_heads: int, head_dim: int, layout: Layout
    ) -> Pages:
        shape = pool_shape(layout, num_pages, page_size, kv_heads, head_dim)
        return Pages(kv=jnp.zeros(shape, self.spec.dtype), layout=layout)


class SymmetricFormat(PackageFormat):
    """int8 or float8 codes of one byte, and a float32 scale per token and head."""

    def init_pages(
        self, num_pages: int, page_size: int, kv_heads: int, head_dim: int, layout: Layout
    ) -> SymmetricPages:
        codes = pool_shape(layout, num_pages, page_size, kv_heads, head_dim)
        scales = jnp.zeros(numbers_shape(layout, num_pages, page_size, 2 * kv_heads), jnp.float32)
        return SymmetricPages(kv=jnp.zeros(codes, self.spec.dtype), scales=scales, layout=layout)


@dataclass(frozen=True)
class StaticFormat(PackageFormat):
    """int8 or float8 codes of one byte, and a measured scale per head.

    Attributes:
      spec: as for the other formats; its name ends in the id of the scales.
      scales: `[2K]`, of K and V alternating.
    """

    scales: tuple[float, ...]

    def init_pages(
        self, num_pages: int, page_size: int, kv_heads: int, head_dim: int, layout: Layout
    ) -> SymmetricPages:
        if len(self.scales) != 2 * kv_heads:
            raise ValueError(
                f"scales of {len(self.scales) // 2} KV heads, the layer has {kv_heads}"
            )
        shape = pool_shape(layout, num_pages, page_size, kv_heads, head_dim)
        scales = jnp.array(self.scales, jnp.float32)
        return SymmetricPages(kv=jnp.zeros(shape, self.spec.dtype), scales=scales, layout=layout)


class AffineFormat(PackageFormat):
    """Codes of 4 bits in a rotated basis, and scale and minimum per token and head."""

    def init_pages(
        self, num_pages: int, page_size: int, kv_heads: int, head_dim: int, layout: Layout
    ) -> AffinePages:
        row_size = code_bytes(head_dim, self.spec.k_bits)
        codes = pool_shape(layout, num_pages, page_size, kv_heads, row_size)
        parameters = numbers_shape(layout, num_pages, page_size, 2 * kv_heads)
        return AffinePages(
            kv=jnp.zeros(codes, self.spec.dtype),
            parameters=jnp.zeros(parameters, jnp.uint32),
            bits=self.spec.k_bits,
            layout=layout,
        )


class KiviFormat(PackageFormat):
    """K in codes per channel of a page, V per token (KIVI, arXiv 2402.02750). A page is stored as
    codes when it is full; until then its tokens are in bfloat16 pages."""

    def init_pages(
        self, num_pages: int, page_size: int, kv_heads: int, head_dim: int, layout: Layout
    ) -> ChannelPages:
        spec, shape = self.spec, (num_pages, kv_heads, page_size)
        has_sinks = spec.exact is not None and spec.exact.sink_pages > 0
        return ChannelPages(
            k=jnp.zeros((*shape, code_bytes(head_dim, spec.k_bits)), spec.dtype),
            v=jnp.zeros((*shape, code_bytes(head_dim, spec.v_bits)), spec.dtype),
            k_parameters=jnp.zeros((num_pages, kv_heads, 2, head_dim), jnp.float16),
            v_parameters=jnp.zeros((*shape, 2 * channel_groups(head_dim)), jnp.float16),
            k_bits=spec.k_bits,
            v_bits=spec.v_bits,
            narrow_k=spec.k_bits == 2 and has_sinks,
            layout=layout,
        )


_CLASSES = {
    "float": FloatFormat,
    "symmetric": SymmetricFormat,
    "affine": AffineFormat,
    "channel": KiviFormat,
}


def get_format(name: str) -> KVFormat:
    """Returns the format of a name.

    Raises:
      ValueError: there is no such format, or it needs measured scales (`choice.choose_formats`).
    """
    spec = parse_format(name)
    if spec.kind == "static":
        raise ValueError(f"format {name} needs scales that `calibrate` measured")
    return _CLASSES[spec.kind](spec)


EXACT = get_format("bf16")  # for the tokens that a format of codes also keeps exactly
