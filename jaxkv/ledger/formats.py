"""Bytes of KV formats, as plain arithmetic: the same names as `jaxkv.cache`, and no arrays.

    a token of one head, D values     codes                    parameters
    f32, bf16, f16                    4 D, 2 D, 2 D            none
    int8, fp8_e4m3, fp8_e5m2          D                        4 (a float32 scale)
    .._static                         D                        none; 4 a head and layer
    int4                              D / 2                    4 (two float16)
    kiviB, kivi_kBvB                  D B / 8                  V: 4 for each 32 channels
                                                               K: 4 D a page

A K of D values and a V of D' values are two such vectors; `jaxkv.ledger.memory` adds them up. The
names `kivi2_r32_s1` keep, in pages of bfloat16 of their own, 32 recent tokens and the first page.

Not here: what the formats cost in quality (`quality`), nor what makes the codes (`jaxkv.cache`).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxkv.ledger.errors import LedgerError

CHANNEL_GROUP = 32  # channels of V that share parameters in kivi formats, or a divisor of D


@dataclass(frozen=True, kw_only=True)
class Exact:
    """What is kept in bfloat16 beside codes.

    Attributes:
      recent: tokens before the one that is computed.
      sink_pages: pages at the beginning of a sequence.
    """

    recent: int = 0
    sink_pages: int = 0


@dataclass(frozen=True, kw_only=True)
class Format:
    """One way of storing K and V.

    Attributes:
      name: as `jaxkv.cache` knows it.
      k_bits, v_bits: of a value's code.
      token_bytes: parameters of each vector.
      head_bytes: parameters of K and of V of one head, once for the whole layer.
      by_channel: K's parameters are of a channel and page, V's of a token and CHANNEL_GROUP.
      exact: kept beside codes; None where codes are written at once.
    """

    name: str
    k_bits: int
    v_bits: int
    token_bytes: int = 0
    head_bytes: int = 0
    by_channel: bool = False
    exact: Exact | None = None

    def k_page_bytes(self, page_size: int, dim: int) -> int:
        """Bytes of a page's keys of one head; `dim` values a key."""
        codes = page_size * (self._code_bytes(dim, self.k_bits) + self.token_bytes)
        return codes + (4 * dim if self.by_channel else 0)

    def v_page_bytes(self, page_size: int, dim: int) -> int:
        """Bytes of a page's values of one head; `dim` numbers a value, 0 for none."""
        if not dim:
            return 0
        parameters = self.token_bytes
        if self.by_channel:
            parameters = 4 * (dim // math.gcd(dim, CHANNEL_GROUP))
        return page_size * (self._code_bytes(dim, self.v_bits) + parameters)

    def _code_bytes(self, dim: int, bits: int) -> int:
        if dim * bits % 8:
            raise LedgerError(f"{self.name}: {dim} codes of {bits} bits do not fill whole bytes")
        return dim * bits // 8


def _both(name: str, bits: int, *, token_bytes: int = 0, head_bytes: int = 0) -> Format:
    return Format(
        name=name, k_bits=bits, v_bits=bits, token_bytes=token_bytes, head_bytes=head_bytes
    )


BF16 = _both("bf16", 16)
CODES = ("int8", "fp8_e4m3", "fp8_e5m2")
FORMATS = {
    one.name: one
    for one in (
        _both("f32", 32),
        BF16,
        _both("f16", 16),
        *(_both(name, 8, token_bytes=4) for name in CODES),
        *(_both(f"{name}_static", 8, head_bytes=4) for name in CODES),
        _both("int4", 4, token_bytes=4),
    )
}
KIVI = ("kivi4", "kivi2", "kivi_k4v2", "kivi_k2v4")

_KIVI = re.compile(r"kivi(?:([24])|_k([24])v([24]))(?:_r([0-9]{1,6}))?(?:_s([0-9]{1,4}))?")


def get_format(name: str) -> Format:
    """The format of that name; `int8_static@ID`, with the id of its scales, is one too.

    Raises:
      LedgerError: there is none.
    """
    known = FORMATS.get(name.partition("@")[0] if "_static@" in name else name)
    if known is not None:
        return replace(known, name=name)
    if (match := _KIVI.fullmatch(name)) is not None:
        both, k_bits, v_bits, recent, sinks = (int(x) if x else 0 for x in match.groups())
        return Format(
            name=name,
            k_bits=both or k_bits,
            v_bits=both or v_bits,
            by_channel=True,
            exact=Exact(recent=recent, sink_pages=sinks),
        )
    raise LedgerError(
        f"no KV format {name!r}; there are {', '.join((*FORMATS, *KIVI))}, and kivi formats with "
        "_rR for R recent tokens and _sS for S first pages in bfloat16"
    )


def split_choices(text: str) -> list[str]:
    """The choices in `bf16,int8,kivi4,window=bf16`: a part with `=` belongs to the one before it.

    Raises:
      LedgerError: there is none, or it begins with a part that belongs to another.
    """
    choices: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if "=" not in part:
            choices.append(part)
        elif choices:
            choices[-1] += f",{part}"
        else:
            raise LedgerError(f"{text!r}: {part!r} must come behind a format for all layers")
    if not choices:
        raise LedgerError(f"{text!r} names no format")
    return choices


def choose_formats(text: str, windows: Sequence[bool]) -> tuple[Format, ...]:
    """The format of each layer, as `jaxkv.cache.choose_formats` reads the same text.

    Args:
      text: a format for all layers, and behind it others for some: `kivi4,window=bf16,0=int8`.
      windows: of each layer, whether it keeps but a part of a long sequence.

    Raises:
      LedgerError: no such format or layer.
    """
    first, *others = (part.strip() for part in text.split(","))
    chosen = [get_format(first)] * len(windows)
    for part in others:
        where, equals, name = (x.strip() for x in part.partition("="))
        if not equals or not where:
            raise LedgerError(f"KV format {text!r}: {part!r} must be LAYERS=FORMAT")
        kv_format = get_format(name)
        if where in ("window", "full"):
            indices = [i for i, slides in enumerate(windows) if slides == (where == "window")]
        elif re.fullmatch(r"-?[0-9]{1,6}", where):
            if not -len(windows) <= int(where) < len(windows):
                raise LedgerError(f"no layer {where}: the model has {len(windows)}")
            indices = [int(where) % len(windows)]
        else:
            raise LedgerError(f"{where!r} must be `window`, `full` or a layer's number")
        for index in indices:
            chosen[index] = kv_format
    return tuple(chosen)


def preferred_page_size(formats: Sequence[Format]) -> int:
    """Tokens a page that suit formats: 32 where K's parameters are a page's, else 16."""
    return 32 if any(one.by_channel for one in formats) else 16
