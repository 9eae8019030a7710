"""A tokenizer from a Hugging Face model directory.

`tokenizer.json` says how text is split and merged; the other files say which tokens begin and end
a text. SentencePiece's own `tokenizer.model`, a binary file, is not read.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jaxkv.models.errors import ModelError
from jaxkv.models.tokenizer.pieces import (
    SPACE_MARK,
    ByteLevelSpelling,
    SentencePieceSpelling,
    Spelling,
    byte_alphabet,
)
from jaxkv.models.tokenizer.tokenizer import END_TOKENS, Tokenizer


def tokenizer_from_dir(path: Path) -> Tokenizer:
    """Builds the tokenizer of a Hugging Face directory.

    Reads `tokenizer.json`, and, where present, `tokenizer_config.json`, `generation_config.json`,
    `config.json` and `chat_template.jinja`.

    Raises:
      ModelError: `tokenizer.json` is missing, a file is damaged, or the tokenizer is of a kind
        that is not known here.
    """
    path = Path(path)
    config = _json(path / "tokenizer_config.json")
    backend = _backend(path / "tokenizer.json")
    _add_tokens(backend, config, path / "tokenizer_config.json")
    added = backend.get_added_tokens_decoder()
    special_ids = frozenset(i for i, token in added.items() if token.special)
    special_tokens = {
        key: text
        for key in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _text(config.get(key))) is not None
    }
    bos_id = backend.token_to_id(special_tokens.get("bos_token", ""))
    eos_id = backend.token_to_id(special_tokens.get("eos_token", ""))
    stops = {*_eos_ids(path), *(i for i in special_ids if added[i].content in END_TOKENS)}
    prefix_ids, suffix_ids = _affixes(backend)
    return Tokenizer(
        backend=backend,
        spelling=_spelling(backend, path / "tokenizer.json"),
        added_ids=frozenset(added),
        special_ids=special_ids,
        prefix_ids=_overridden(prefix_ids, config.get("add_bos_token"), bos_id),
        suffix_ids=_overridden(suffix_ids, config.get("add_eos_token"), eos_id),
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        bos_id=bos_id,
        stop_ids=frozenset(stops if eos_id is None else stops | {eos_id}),
        special_tokens=MappingProxyType(special_tokens),
        chat_template=_chat_template(path, config),
    )


def _backend(file: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{file} is missing; save the tokenizer with save_pretrained of a fast tokenizer"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from None
    except Exception as error:  # `tokenizers` raises nothing narrower
        reason = " ".join(str(error).split())
        raise ModelError(f"{file}: not a tokenizer: {reason}; fetch it again") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], file: Path) -> None:
    """Adds the tokens that only `tokenizer_config.json` lists, at the ids it gives them."""
    known = backend.get_added_tokens_decoder()
    listed = config.get("added_tokens_decoder", {})
    try:
        entries = sorted((int(token_id), token) for token_id, token in listed.items())
        missing = [(i, AddedToken(**_fields(token))) for i, token in entries if i not in known]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ModelError(f"{file}: added_tokens_decoder is malformed; fetch it again") from None
    for token_id, token in missing:
        backend.add_tokens([token])
        if (got := backend.token_to_id(token.content)) != token_id:
            raise ModelError(
                f"{file}: {token.content!r} is to have id {token_id}, but tokenizer.json makes it "
                f"{got}; the two files are not of one model"
            )


def _fields(token: Mapping[str, Any]) -> dict[str, Any]:
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: token[name] for name in names}


def _spelling(backend: tokenizers.Tokenizer, file: Path) -> Spelling:
    """How tokens are spelled, told from the decoder that `tokenizer.json` describes."""
    state = backend.decoder.__getstate__() if backend.decoder else '{"type": "none"}'
    decoder: dict[str, Any] = json.loads(state)
    steps = decoder.get("decoders", [decoder])
    kinds = {step["type"]: step for step in steps}
    if kinds.keys() <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds:
        return ByteLevelSpelling(MappingProxyType(byte_alphabet()))
    if kinds.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "Replace" in kinds:
        replace = kinds["Replace"]
        if replace["pattern"] == {"String": SPACE_MARK} and replace["content"] == " ":
            strip = kinds.get("Strip", {"content": " ", "start": 0, "stop": 0})
            if (strip["content"], strip["stop"]) == (" ", 0) and strip["start"] in (0, 1):
                return SentencePieceSpelling(
                    strips_leading_space=strip["start"] == 1, byte_fallback="ByteFallback" in kinds
                )
    if kinds.keys() == {"Metaspace"} and decoder["replacement"] == SPACE_MARK:
        return SentencePieceSpelling(
            strips_leading_space=decoder["prepend_scheme"] != "never", byte_fallback=False
        )
    raise ModelError(
        f"{file}: decoder {'+'.join(kinds)} is neither byte-level nor SentencePiece, the "
        "kinds that are read"
    )


def _affixes(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor of `tokenizer.json` puts before and after a text."""
    probe = backend.encode("a", add_special_tokens=True)
    own = [i for i, extra in enumerate(probe.special_tokens_mask) if not extra]
    if not own:  # a vocabulary without "a"
        return tuple(probe.ids), ()
    return tuple(probe.ids[: own[0]]), tuple(probe.ids[own[-1] + 1 :])


def _overridden(
    found: tuple[int, ...], asked: bool | None, token_id: int | None
) -> tuple[int, ...]:
    """`tokenizer_config.json`, where it speaks of BOS or EOS, wins over `tokenizer.json`."""
    if asked is None or token_id is None:
        return found
    if asked:
        return found if token_id in found else (token_id,)
    return tuple(i for i in found if i != token_id)


def _eos_ids(path: Path) -> Iterable[int]:
    for name in ("generation_config.json", "config.json"):
        config = _json(path / name)
        text_config = config.get("text_config")
        for source in (config, text_config if isinstance(text_config, dict) else {}):
            value = source.get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(i) is int and i >= 0 for i in ids):
                raise ModelError(
                    f"{path / name}: eos_token_id is {value!r}, not an id or a list of ids"
                )
            yield from ids


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The default template. A file wins over the config, which may hold several by name."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{file}: cannot be read: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        try:
            named = {entry["name"]: entry["template"] for entry in template}
        except (KeyError, TypeError):
            raise ModelError(
                f"{path / 'tokenizer_config.json'}: chat_template is a list without names and "
                "templates; fetch the file again"
            ) from None
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{path / 'tokenizer_config.json'}: chat_template is not text")
    return template


def _text(token: Any) -> str | None:
    """A special token's text, given as it is or as the fields of an added token."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _json(file: Path) -> dict[str, Any]:
    """The object in `file`, or an empty one where there is no such file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not readable as JSON: {error}; fetch it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file}: holds a {type(value).__name__}, not an object; fetch it again")
    return value
