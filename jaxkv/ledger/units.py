"""Sizes as people write them. Units of bytes are decimal or binary; those of tokens are binary.

80GB = 80e9 bytes      80GiB = 80 * 2^30 bytes      80G is refused: it may be either
32k  = 32,768 tokens   1m = 1,048,576 tokens        32000 is 32,000
"""

import re
from fractions import Fraction

from jaxkv.ledger.errors import LedgerError

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**i for i, prefix in enumerate("kMGT", start=1)},
    **{f"{prefix}iB": 1024**i for i, prefix in enumerate("KMGT", start=1)},
}
MOST_TOKENS = 1 << 40
MOST_BYTES = 1 << 60

_BYTES = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,9})?) ?([A-Za-z]{0,3})")
_TOKENS = re.compile(r"([0-9]{1,15})([kKmM]?)")
_RATE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,9})?)([kMGTP]?)")
_LOWER = {unit.lower(): unit for unit in UNITS}


def parse_bytes(text: str, least: int = 1) -> int:
    """Returns the bytes of a text such as `80GB`, `79.6GiB` or `1000000`; case does not matter.

    Raises:
      LedgerError: the text is not a size of at least `least` bytes, or its unit may be decimal or
        binary.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise LedgerError(f"{text!r} is not a size: write 80GB, 74.5GiB or a number of bytes")
    number, unit = match.groups()
    if unit.lower() in ("k", "m", "g", "t"):
        raise LedgerError(f"{text!r} may be {unit.upper()}B or {unit.upper()}iB: write one of them")
    if unit and unit.lower() not in _LOWER:
        raise LedgerError(f"{text!r}: no unit {unit!r}; there are {', '.join(UNITS)}")
    num_bytes = int(Fraction(number) * UNITS[_LOWER[unit.lower()] if unit else "B"])
    if not least <= num_bytes <= MOST_BYTES:
        raise LedgerError(f"{text!r} must be at least {least} byte, at most {MOST_BYTES >> 60} EiB")
    return num_bytes


def parse_tokens(text: str) -> int:
    """Returns the tokens of a text such as `4096`, `32k` or `1m`; k is 1,024 and m is 1,048,576.

    Raises:
      LedgerError: the text is not a number of tokens from 1 to 2^40.
    """
    match = _TOKENS.fullmatch(text.strip())
    if match is None:
        raise LedgerError(f"{text!r} is not a number of tokens: write 4096, 32k (32,768) or 1m")
    number, unit = match.groups()
    tokens = int(number) << {"": 0, "k": 10, "m": 20}[unit.lower()]
    if not 1 <= tokens <= MOST_TOKENS:
        raise LedgerError(f"{text!r} must be 1 to {MOST_TOKENS} tokens")
    return tokens


def parse_rate(text: str) -> float:
    """Returns a number per second of a text such as `400T` or `3.35T`, in powers of 1,000.

    Raises:
      LedgerError: the text is not a number above zero.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise LedgerError(f"{text!r} is not a rate: write 400T, 1.5P or a number")
    return float(match[1]) * 1000.0 ** " kMGTP".index(match[2] or " ")
