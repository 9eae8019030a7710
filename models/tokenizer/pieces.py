"""Which bytes a vocabulary's token strings stand for, in the two spellings in use.

A token may hold part of a character, so tokens become bytes one by one, and only the joined bytes
become text. Which tokens are left out, and how the pieces are joined, is decided in
`jaxkv.models.tokenizer.tokenizer`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(Protocol):
    """How a vocabulary writes bytes as token strings.

    Attributes:
      strips_leading_space: encoding put a space before the text, which decoding takes away.
    """

    @property
    def strips_leading_space(self) -> bool: ...

    def to_bytes(self, token: str, *, added: bool) -> bytes:
        """The bytes that a token stands for; `added` tokens are found in the text as they are."""
        ...


@dataclass(frozen=True)
class ByteLevelSpelling:
    """GPT-2's spelling: each byte is one printable character.

    Attributes:
      byte_of: the character's byte, from `byte_alphabet`.
    """

    byte_of: Mapping[str, int]

    @property
    def strips_leading_space(self) -> bool:
        return False

    def to_bytes(self, token: str, *, added: bool) -> bytes:
        if added:
            return token.encode()
        try:
            return bytes([self.byte_of[char] for char in token])
        except KeyError:  # not a piece of text, such as the name of an unused slot
            return token.encode()


@dataclass(frozen=True)
class SentencePieceSpelling:
    """SentencePiece's spelling: UTF-8, a mark for the space, and `<0x0A>` for a lone byte.

    Attributes:
      strips_leading_space: as `Spelling` has it.
      byte_fallback: the vocabulary has tokens for lone bytes.
    """

    strips_leading_space: bool
    byte_fallback: bool = True

    def to_bytes(self, token: str, *, added: bool) -> bytes:
        if self.byte_fallback and not added and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE_MARK, " ").encode()


def byte_alphabet() -> dict[str, int]:
    """GPT-2's table from character to byte.

    Printable Latin-1 stands for itself; the other 68 bytes, in order, are U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(0x100)) - set(printable))
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(hidden)
    }
