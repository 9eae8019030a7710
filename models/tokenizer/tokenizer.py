"""The tokenizer, and the decoder for text that still grows.

`from_dir` and `from_gguf` read tokenizers from files.
"""

import codecs
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import tokenizers

from jaxkv.models.errors import ModelError
from jaxkv.models.tokenizer.pieces import Spelling

# Tokens that end an answer whatever the metadata says. Otherwise an instruct model whose `eos` is
# still that of its base model would go on and write the user's turns too.
END_TOKENS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
    }
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
    """Text to token ids and back.

    Attributes:
      backend: splits and merges; adds no special tokens.
      spelling: what the token strings mean in bytes.
      added_ids: tokens that are found in the text before it is split.
      special_ids: those of `added_ids` that are control tokens, not text.
      prefix_ids: put before every encoded text, such as BOS if the model's own rule adds it.
      suffix_ids: put after every encoded text.
      vocab_size: one more than the highest id; the model's V may be larger, padded.
      bos_id: the beginning-of-sequence token, whether or not `prefix_ids` holds it.
      stop_ids: each of them ends an answer.
      special_tokens: texts that chat templates name: `bos_token`, `eos_token`, `unk_token`, ...
      chat_template: Jinja source, for `jaxkv.models.chat.render_chat`.
    """

    backend: tokenizers.Tokenizer
    spelling: Spelling
    added_ids: frozenset[int]
    special_ids: frozenset[int]
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    vocab_size: int
    bos_id: int | None
    stop_ids: frozenset[int]
    special_tokens: Mapping[str, str]
    chat_template: str | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; the texts of special tokens within it become their ids.

        Characters that the vocabulary cannot express are lost, as in the model's training:
        SmolLM2 has no token for U+0004.

        Args:
          text: at least one character.
          add_special_tokens: adds BOS and EOS by the model's own rule. Pass False for text from a
            chat template, which writes its own.

        Raises:
          ModelError: `text` is empty, or contains a lone surrogate.
        """
        if not text:
            raise ModelError("the text to encode is empty; give at least one character")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ModelError(
                f"the text to encode holds a lone surrogate, U+{ord(text[error.start]):04X}, at "
                f"character {error.start}; decode its bytes as UTF-8 first"
            ) from None
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return [*self.prefix_ids, *ids, *self.suffix_ids] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD.

        The space that encoding put before the text is removed. Ids without a token (the padding
        rows of a model's V) are skipped.

        Raises:
          ModelError: an id is negative.
        """
        raw = b"".join(self.id_to_bytes(i, skip_special_tokens=skip_special_tokens) for i in ids)
        text = raw.decode(errors="replace")
        return text.removeprefix(" ") if self.spelling.strips_leading_space else text

    def id_to_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """The bytes that one token adds to a text; empty for a special token that is skipped.

        Raises:
          ModelError: `token_id` is negative.
        """
        if token_id < 0:
            raise ModelError(f"token id {token_id} is negative; ids start at 0")
        if skip_special_tokens and token_id in self.special_ids:
            return b""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        return self.spelling.to_bytes(token, added=token_id in self.added_ids)

    @property
    def bos_token(self) -> str:
        """Text of the beginning-of-sequence token, "" where there is none."""
        return self.special_tokens.get("bos_token", "")

    @property
    def eos_token(self) -> str:
        """Text of the end-of-sequence token, "" where there is none."""
        return self.special_tokens.get("eos_token", "")


class StreamDecoder:
    """Decodes tokens as they come, and never returns half a character.

    The joined results of `push` and `flush` equal `Tokenizer.decode` of all ids. The time per token
    depends only on its own bytes, and at most three bytes are held back.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues: bool = False
    ):
        """Starts an empty text.

        Args:
          tokenizer: the tokenizer of the model that generates the tokens.
          skip_special_tokens: leaves special tokens out of the text.
          continues: the text carries on from a prompt, so its first space is part of it.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._strips_space = tokenizer.spelling.strips_leading_space and not continues
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next tokens; returns the text that they complete, possibly none.

        Raises:
          ModelError: an id is negative.
        """
        return self._next(
            b"".join(
                self._tokenizer.id_to_bytes(i, skip_special_tokens=self._skip_special_tokens)
                for i in ids
            )
        )

    def flush(self) -> str:
        """Ends the text: returns the bytes that were held back, as U+FFFD."""
        return self._next(b"", final=True)

    def _next(self, raw: bytes, *, final: bool = False) -> str:
        text = self._utf8.decode(raw, final)
        if text and self._strips_space:
            self._strips_space = False
            return text.removeprefix(" ")
        return text
