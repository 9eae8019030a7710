"""The names of KV formats, and the bits and bytes that their pages take. Plain Python.

A KV format says how the K and V of a layer are stored in pages. `jaxkv.cache.formats` makes arrays
of it, `jaxkv.ledger` counts its bytes, and both read it here.

    name                        bytes of a vector of D values     parameters, in bytes
    f32, bf16, f16              4 D, 2 D, 2 D                     none
    int8, fp8_e4m3, fp8_e5m2    D                                 4 per vector (a float32 scale)
    int8_static, ..             D                                 4 per head and layer, measured
    int4                        D / 2                             4 per vector (two float16)
    kiviB, kivi_kBvB            D B / 8                           V: 4 per vector and 32 channels
                                                                  K: 4 D per page

A vector is the K or the V of one token and one KV head. The name of a kivi format may end in `_rR`,
`_sS` or both: `kivi2_r32_s1` also keeps at least 32 recent tokens and the first page in bfloat16,
in pages of a pool of their own.

A *choice* gives each layer a format: `kivi4,window=bf16,0=int8,-1=int8`. The first name is for all
layers. Each later part is for some of them and overrides the parts before it: `window` and `full`
are the layers with and without a sliding window, and a number is one layer, counted from the end if
it is negative.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from jaxkv.errors import UsageError

PAGE_SIZES = range(8, 257)  # tokens per page that the attention kernels take
CHANNEL_GROUP = 32  # channels of V that share parameters in kivi formats; a divisor of D if smaller


@dataclass(frozen=True)
class Exact:
    """The tokens that a format of codes also keeps in bfloat16, in pages of another pool.

    Attributes:
      recent: number of tokens before the current one, at least; whole pages are kept.
      sink_pages: number of pages at the beginning of a sequence.
    """

    recent: int = 0
    sink_pages: int = 0


@dataclass(frozen=True)
class FormatSpec:
    """One way of storing K and V, as numbers.

    Attributes:
      name: identifies the format.
      kind: what is stored with the values. `float`: nothing. `symmetric`: a scale per vector.
        `static`: a scale per head and layer. `affine`: scale and minimum per vector, of values in a
        rotated basis. `channel`: scale and minimum, for K per channel and page, for V per vector
        and CHANNEL_GROUP channels.
      dtype: dtype of the stored array; codes of fewer than 8 bits are packed into uint8.
      k_bits: bits of one value of K.
      v_bits: bits of one value of V.
      exact: tokens that are kept in bfloat16, too; None if all tokens are stored in this format
        at once.
    """

    name: str
    kind: Literal["float", "symmetric", "static", "affine", "channel"]
    dtype: str
    k_bits: int
    v_bits: int
    exact: Exact | None = None

    @property
    def head_bytes(self) -> int:
        """Bytes of the parameters of K, or of V, of one head, which a layer has only once."""
        return 4 if self.kind == "static" else 0

    def page_bytes(self, page_size: int, kv_heads: int, head_dim: int) -> int:
        """Returns the bytes of one page of one layer, parameters per page and vector included.

        Raises:
          UsageError: the codes of a vector do not fill whole bytes.
        """
        k, v = self.k_page_bytes(page_size, head_dim), self.v_page_bytes(page_size, head_dim)
        return kv_heads * (k + v)

    def k_page_bytes(self, page_size: int, head_dim: int) -> int:
        """Returns the bytes of the keys of one head in a page; see `page_bytes`."""
        codes = page_size * code_bytes(head_dim, self.k_bits)
        if self.kind == "channel":
            return codes + 4 * head_dim
        return codes + page_size * self._vector_bytes

    def v_page_bytes(self, page_size: int, head_dim: int) -> int:
        """Returns the bytes of the values of one head in a page; see `page_bytes`."""
        parameters = self._vector_bytes
        if self.kind == "channel":
            parameters = 4 * channel_groups(head_dim)
        return page_size * (code_bytes(head_dim, self.v_bits) + parameters)

    @property
    def _vector_bytes(self) -> int:
        return 4 if self.kind in ("symmetric", "affine") else 0


def channel_groups(head_dim: int) -> int:
    """Returns the number of groups of channels of V in a kivi format."""
    return head_dim // math.gcd(head_dim, CHANNEL_GROUP)


def code_bytes(head_dim: int, bits: int) -> int:
    """Returns the bytes of a vector's values.

    Raises:
      UsageError: they do not fill whole bytes.
    """
    if head_dim * bits % 8:
        raise UsageError(f"D = {head_dim}: the codes of a token, {bits} bits each, must fill bytes")
    return head_dim * bits // 8


def _kivi(k_bits: int, v_bits: int, exact: Exact = Exact()) -> FormatSpec:
    name = f"kivi{k_bits}" if k_bits == v_bits else f"kivi_k{k_bits}v{v_bits}"
    if exact.recent:
        name += f"_r{exact.recent}"
    if exact.sink_pages:
        name += f"_s{exact.sink_pages}"
    return FormatSpec(name, "channel", "uint8", k_bits, v_bits, exact)


_CODES = {"int8": "int8", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
_NAMED = (
    FormatSpec("f32", "float", "float32", 32, 32),
    FormatSpec("bf16", "float", "bfloat16", 16, 16),
    FormatSpec("f16", "float", "float16", 16, 16),
    *(FormatSpec(name, "symmetric", dtype, 8, 8) for name, dtype in _CODES.items()),
    *(FormatSpec(f"{name}_static", "static", dtype, 8, 8) for name, dtype in _CODES.items()),
    FormatSpec("int4", "affine", "uint8", 4, 4),
    *(_kivi(k_bits, v_bits) for k_bits, v_bits in ((4, 4), (2, 2), (4, 2), (2, 4))),
)
# Formats by name. Kivi formats that keep exact tokens have further names (`parse_format`).
FORMATS: Mapping[str, FormatSpec] = MappingProxyType({spec.name: spec for spec in _NAMED})

_KIVI = re.compile(r"kivi(?:([24])|_k([24])v([24]))(?:_r([0-9]{1,6}))?(?:_s([0-9]{1,4}))?")
_LAYER = re.compile(r"-?[0-9]{1,6}")


def is_format(name: str) -> bool:
    """Whether a name is that of a format of this package."""
    return name in FORMATS or _KIVI.fullmatch(name) is not None


def parse_format(name: str) -> FormatSpec:
    """Returns the format of a name.

    Raises:
      UsageError: there is no such format.
    """
    if name in FORMATS:
        return FORMATS[name]
    if (match := _KIVI.fullmatch(name)) is not None:
        both, k_bits, v_bits, recent, sinks = (int(x) if x else 0 for x in match.groups())
        return _kivi(both or k_bits, both or v_bits, Exact(recent, sinks))
    raise UsageError(
        f"no KV format {name!r}; there are {', '.join(FORMATS)}, and kivi formats with _rR for R "
        "recent tokens and _sS for S first pages in bfloat16"
    )


def parse_choice(choice: str) -> list[tuple[str, FormatSpec]]:
    """Reads a choice of formats by layer, without knowing the layers.

    Returns:
      Pairs of the layers (`window`, `full`, a number, or an empty text for all) and their format;
      a later pair overrides the earlier ones.

    Raises:
      UsageError: a part names no format or no layers.
    """
    first, *others = (part.strip() for part in choice.split(","))
    parts = [("", parse_format(first))]
    for part in others:
        layers, equals, name = (x.strip() for x in part.partition("="))
        if not equals or not layers:
            raise UsageError(f"KV format {choice!r}: {part!r} must be LAYERS=FORMAT")
        if layers not in ("window", "full") and _LAYER.fullmatch(layers) is None:
            raise UsageError(f"{layers!r} must be `window`, `full` or a layer's number")
        parts.append((layers, parse_format(name)))
    return parts


def formats_by_layer(choice: str, slides: Sequence[bool]) -> tuple[FormatSpec, ...]:
    """Returns the format of each layer.

    Example: `formats_by_layer("kivi4,window=bf16", [True, False])` is (bf16, kivi4).

    Args:
      choice: a choice of formats by layer, see the module.
      slides: for each layer, whether it has a sliding window.

    Raises:
      UsageError: the choice names no format, or a layer that the model does not have.
    """
    count = len(slides)
    chosen: dict[int, FormatSpec] = {}
    for layers, spec in parse_choice(choice):
        if not layers:
            indices = list(range(count))
        elif layers in ("window", "full"):
            indices = [i for i in range(count) if slides[i] == (layers == "window")]
        elif -count <= int(layers) < count:
            indices = [int(layers) % count]
        else:
            raise UsageError(f"no layer {int(layers)}: the model has {count}")
        chosen |= dict.fromkeys(indices, spec)
    return tuple(chosen[i] for i in range(count))


def split_choices(text: str) -> list[str]:
    """Splits a list of choices such as `bf16,int8,kivi4,window=bf16`: a part with `=` belongs to
    the choice before it.

    Raises:
      UsageError: the list is empty, or begins with a part that belongs to a choice before it.
    """
    choices: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if "=" not in part:
            choices.append(part)
        elif choices:
            choices[-1] += f",{part}"
        else:
            raise UsageError(f"{text!r}: {part!r} must follow a format for all layers")
    if not choices:
        raise UsageError(f"{text!r} names no format")
    return choices


def preferred_page_size(choice: str) -> int:
    """Returns the tokens per page that suit a choice of formats: 32 if a page is the group whose
    keys share parameters, else 16.

    Raises:
      UsageError: a part names no format or no layers.
    """
    return 32 if any(spec.kind == "channel" for _, spec in parse_choice(choice)) else 16
