"""A tokenizer from the metadata of a GGUF file.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Where the metadata leave a choice
open, llama.cpp's is taken, since it is what such files are written for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jaxkv.models.errors import ModelError
from jaxkv.models.tokenizer.byte_level_bpe import byte_level_backend, pre_tokenizer_kind
from jaxkv.models.tokenizer.pieces import (
    SPACE_MARK,
    ByteLevelSpelling,
    SentencePieceSpelling,
    Spelling,
    byte_alphabet,
)
from jaxkv.models.tokenizer.sentencepiece_bpe import sentencepiece_backend
from jaxkv.models.tokenizer.tokenizer import END_TOKENS, Tokenizer


class _Type(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens of a file.

    Attributes:
      ids: token string to id.
      tokens: by id.
      types: by id.
      named: ids of bos, eos, eot, eom and unknown, where there is one.
    """

    ids: Mapping[str, int]
    tokens: Sequence[str]
    types: Sequence[int]
    named: Mapping[str, int]

    def of_type(self, *types: _Type) -> list[int]:
        return [i for i, kind in enumerate(self.types) if kind in types]


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that a GGUF file describes.

    Args:
      metadata: key to plain Python value, an array as a list; `GgufFile.metadata`.

    Raises:
      ModelError: keys are missing or do not fit each other, or the tokenizer is of a kind that is
        not known here.
    """
    kind = _get(metadata, "model", str)
    if kind == "gpt2":
        return _byte_level(metadata)
    if kind == "llama":
        return _sentencepiece(metadata)
    raise ModelError(
        f"tokenizer.ggml.model is {kind!r}, which is not read; 'gpt2' (byte-level BPE) and 'llama' "
        "(SentencePiece BPE) are"
    )


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    kind = pre_tokenizer_kind(metadata.get("tokenizer.ggml.pre", "default"))
    vocabulary = _vocabulary(metadata, {})
    return _finish(
        metadata,
        byte_level_backend(vocabulary.ids, _array(metadata, "merges"), kind),
        vocabulary,
        spelling=ByteLevelSpelling(MappingProxyType(byte_alphabet())),
        add_bos=kind.add_bos,
    )


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if metadata.get(f"tokenizer.ggml.{key}"):
            raise ModelError(
                f"tokenizer.ggml.{key} is set, a text clean-up that is not implemented; use the "
                "model's Hugging Face directory"
            )
    vocabulary = _vocabulary(metadata, {"bos": 1, "eos": 2, "unknown": 0})
    tokens, unk_id = vocabulary.tokens, vocabulary.named["unknown"]
    scores = _array(metadata, "scores", len(tokens))
    space_prefix = _flag(metadata, "add_space_prefix", True)
    text_ids = vocabulary.of_type(_Type.NORMAL, _Type.UNUSED)
    return _finish(
        metadata,
        sentencepiece_backend(
            vocabulary.ids,
            {tokens[i]: scores[i] for i in text_ids},
            unk_token=tokens[unk_id],
            add_space_prefix=space_prefix,
        ),
        vocabulary,
        spelling=SentencePieceSpelling(strips_leading_space=space_prefix),
        add_bos=True,
        # SentencePiece looks for user-defined tokens among the marks, where a space and a mark in
        # the text are one. With a prefix that would put the prefix inside the tokens themselves.
        normalize_user_defined=not space_prefix,
    )


def _finish(
    metadata: Mapping[str, Any],
    backend: tokenizers.Tokenizer,
    vocabulary: _Vocabulary,
    *,
    spelling: Spelling,
    add_bos: bool,
    normalize_user_defined: bool = False,
) -> Tokenizer:
    """Adds to `backend` the tokens that are found before splitting, and the rules around them."""
    tokens, named = vocabulary.tokens, vocabulary.named
    special = vocabulary.of_type(_Type.UNKNOWN, _Type.CONTROL)
    user_defined = vocabulary.of_type(_Type.USER_DEFINED)
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in special])
    backend.add_tokens(
        [AddedToken(tokens[i], normalized=normalize_user_defined) for i in user_defined]
    )
    stops = {named[name] for name in ("eos", "eot", "eom") if name in named}
    stops.update(i for i in special if tokens[i] in END_TOKENS)
    template_names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token"}
    return Tokenizer(
        backend=backend,
        spelling=spelling,
        added_ids=frozenset((*special, *user_defined)),
        special_ids=frozenset(special),
        prefix_ids=_affix(metadata, "bos", named, add_bos),
        suffix_ids=_affix(metadata, "eos", named, False),
        vocab_size=len(tokens),
        bos_id=named.get("bos"),
        stop_ids=frozenset(stops),
        special_tokens=MappingProxyType(
            {key: tokens[named[name]] for name, key in template_names.items() if name in named}
        ),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _affix(
    metadata: Mapping[str, Any], name: str, named: Mapping[str, int], default: bool
) -> tuple[int, ...]:
    """What goes around every text: the token `name`, if the file or else `default` says so."""
    if not _flag(metadata, f"add_{name}_token", default):
        return ()
    if name not in named:
        raise ModelError(
            f"BOS or EOS is to be added, but tokenizer.ggml.{name}_token_id is missing; the file "
            "is damaged"
        )
    return (named[name],)


def _vocabulary(metadata: Mapping[str, Any], default_ids: Mapping[str, int]) -> _Vocabulary:
    tokens: list[str] = list(_array(metadata, "tokens"))
    named = _named_ids(metadata, len(tokens), default_ids)
    if "tokenizer.ggml.token_type" in metadata:
        types = list(_array(metadata, "token_type", len(tokens)))
    else:
        types = [int(_Type.NORMAL)] * len(tokens)
    # What ends an answer is not part of it, though some converters call it user-defined.
    for name in named.keys() - {"unknown"}:
        types[named[name]] = int(_Type.CONTROL)
    ids: dict[str, int] = {}
    for i, kind in enumerate(types):
        if kind == _Type.USER_DEFINED:
            if tokens[i] in END_TOKENS:
                types[i] = int(_Type.CONTROL)
            # It is looked for in the text as it is, but some converters keep the mark.
            tokens[i] = tokens[i].replace(SPACE_MARK, " ")
        if (first := ids.setdefault(tokens[i], i)) != i:
            raise ModelError(
                f"tokenizer.ggml.tokens has {tokens[i]!r} at {first} and {i}; the file is damaged"
            )
    return _Vocabulary(ids, tokens, types, named)


def _named_ids(
    metadata: Mapping[str, Any], num_tokens: int, defaults: Mapping[str, int]
) -> dict[str, int]:
    named: dict[str, int] = {}
    for name in ("bos", "eos", "eot", "eom", "unknown"):
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = metadata.get(key, defaults.get(name))
        if token_id is None:
            continue
        if not 0 <= token_id < num_tokens:
            raise ModelError(
                f"{key} is {token_id}, but there are {num_tokens} tokens; the file is damaged"
            )
        named[name] = token_id
    return named


def _get(metadata: Mapping[str, Any], name: str, kind: type) -> Any:
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        raise ModelError(f"the GGUF file has no {key}; use a file with its tokenizer in it")
    value = metadata[key]
    if not isinstance(value, kind):
        raise ModelError(f"{key} is {value!r:.40}, not a {kind.__name__}; the file is damaged")
    return value


def _array(metadata: Mapping[str, Any], name: str, length: int | None = None) -> list[Any]:
    values = _get(metadata, name, list)
    if length is not None and len(values) != length:
        raise ModelError(
            f"tokenizer.ggml.{name} has {len(values)} entries for {length} tokens; the file is "
            "damaged"
        )
    return values


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.{name}", default))
