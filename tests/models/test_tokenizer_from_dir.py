"""A Hugging Face directory gives the tokenizer that its files describe, in each form they take."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from jaxkv.models.errors import ModelError
from jaxkv.models.tokenizer import StreamDecoder, tokenizer_from_dir


def byte_level() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "ab"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<é tool>", normalized=False)])
    return backend


def sentencepiece(*, prefix: bool) -> tokenizers.Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    replace = normalizers.Replace(" ", "▁")
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), replace] if prefix else [replace]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("▁▁b", normalized=False)])
    return backend


def template(backend: tokenizers.Tokenizer, single: str) -> tokenizers.Tokenizer:
    names = ("<s>", "</s>")
    tokens = [(name, backend.token_to_id(name)) for name in names]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
    return backend


def save(folder: Path, backend: tokenizers.Tokenizer, **files: Any) -> Path:
    """Writes tokenizer.json, and each of `files` as NAME.json."""
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


NAMES = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}


@pytest.mark.parametrize(
    "backend",
    [byte_level(), sentencepiece(prefix=True), sentencepiece(prefix=False)],
    ids=["byte-level", "sentencepiece-with-prefix", "sentencepiece"],
)
@pytest.mark.parametrize("text", ["ab a", " é\n👍🏽 b", "ab<s> a<é tool>b", "▁▁b"])
def test_ids_and_text_are_those_of_the_saved_tokenizer(
    tmp_path: Path, backend: tokenizers.Tokenizer, text: str
) -> None:
    tokenizer = tokenizer_from_dir(save(tmp_path, backend))
    ids = tokenizer.encode(text)
    assert ids == backend.encode(text).ids
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == backend.decode(
            ids, skip_special_tokens=skip
        )
    assert tokenizer.vocab_size == backend.get_vocab_size()


def test_a_metaspace_decoder_is_sentencepiece(tmp_path: Path) -> None:
    backend = sentencepiece(prefix=True)
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = tokenizer_from_dir(save(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("a ab")) == "a ab"
    assert StreamDecoder(tokenizer, continues=True).push(tokenizer.encode("a")) == " a"


@pytest.mark.parametrize(
    ("single", "config", "expected"),
    [
        ("$A", {}, "a"),
        ("<s> $A", {}, "<s>a"),
        ("<s> $A </s>", {}, "<s>a</s>"),
        ("<s> $A", {"add_bos_token": False}, "a"),
        ("$A", {"add_bos_token": True}, "<s>a"),
        ("<s> $A", {"add_bos_token": True, "add_eos_token": True}, "<s>a</s>"),
        ("<s> $A </s>", {"add_eos_token": False}, "<s>a"),
    ],
)
def test_bos_and_eos_follow_both_files(
    tmp_path: Path, single: str, config: dict, expected: str
) -> None:
    backend = template(byte_level(), single)
    tokenizer = tokenizer_from_dir(save(tmp_path, backend, tokenizer_config=NAMES | config))
    ids = tokenizer.encode("a")
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert tokenizer.encode("a", add_special_tokens=False) == [backend.token_to_id("a")]


def test_stops_are_gathered_from_every_file_that_names_one(tmp_path: Path) -> None:
    backend = byte_level()
    save(
        tmp_path,
        backend,
        tokenizer_config=NAMES,
        generation_config={"eos_token_id": [7, 8]},
        config={"eos_token_id": None, "text_config": {"eos_token_id": 9}},
    )
    tokenizer = tokenizer_from_dir(tmp_path)
    assert tokenizer.stop_ids == {7, 8, 9, *map(backend.token_to_id, ("</s>", "<|im_end|>"))}
    assert tokenizer.bos_id == backend.token_to_id("<s>")
    assert dict(tokenizer.special_tokens) == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


@pytest.mark.parametrize(
    ("key", "file", "expected"),
    [
        (None, None, None),
        ("key", None, "key"),
        ("key", "file", "file"),
        ([{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}], None, "d"),
        ([{"name": "rag", "template": "r"}], None, None),
    ],
    ids=["none", "key", "file-wins", "named-default", "no-default"],
)
def test_the_chat_template_is_found_in_each_of_its_places(
    tmp_path: Path, key: Any, file: str | None, expected: str | None
) -> None:
    save(tmp_path, byte_level(), tokenizer_config={"chat_template": key})
    if file:
        (tmp_path / "chat_template.jinja").write_text(file, encoding="utf-8")
    assert tokenizer_from_dir(tmp_path).chat_template == expected


def added(content: str, *, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"content": content, "special": special} | flags


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    size = byte_level().get_vocab_size()
    listed = {str(size + 1): added("<b>", special=False), str(size): added("<a>", special=True)}
    save(tmp_path, byte_level(), tokenizer_config={"added_tokens_decoder": listed})
    tokenizer = tokenizer_from_dir(tmp_path)
    assert tokenizer.encode("<a><b>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<b>"
    assert tokenizer.vocab_size == size + 2


def test_a_saved_length_limit_does_not_cut_the_text(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=4)
    tokenizer = tokenizer_from_dir(save(tmp_path, backend))
    assert len(tokenizer.encode("xyz")) == 3
    assert len(tokenizer.encode("x" * 100)) == 100


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", b"{", "tokenizer.json: not a tokenizer"),
        ("tokenizer.json", b'{"version": "1.0"}', "tokenizer.json: not a tokenizer"),
        ("tokenizer.json", b"\xff", "tokenizer.json: cannot be read"),
        ("tokenizer_config.json", b"{\n", "tokenizer_config.json: not readable as JSON"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json: not readable as JSON"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json: holds a list"),
        ("tokenizer_config.json", b'{"chat_template": 1}', "chat_template is not text"),
        ("tokenizer_config.json", b'{"chat_template": [1]}', "chat_template is a list without"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": 1}}', "is malformed"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": []}', "is malformed"),
        ("generation_config.json", b'{"eos_token_id": "2"}', "eos_token_id is '2'"),
        ("config.json", b'{"eos_token_id": [true]}', r"eos_token_id is \[True\]"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: cannot be read"),
    ],
)
def test_a_damaged_directory_is_one_clear_line(
    tmp_path: Path, file: str, content: bytes | None, problem: str
) -> None:
    save(tmp_path, byte_level())
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelError, match=problem) as caught:
        tokenizer_from_dir(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_token_listed_at_another_id_is_refused(tmp_path: Path) -> None:
    listed = {"9999": added("<a>", special=True)}
    save(tmp_path, byte_level(), tokenizer_config={"added_tokens_decoder": listed})
    with pytest.raises(ModelError, match="'<a>' is to have id 9999"):
        tokenizer_from_dir(tmp_path)


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (None, "none"),
        (decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()]), "Replace"),
    ],
    ids=["wordpiece", "none", "other-mark"],
)
def test_a_spelling_that_is_not_known_is_refused_by_name(
    tmp_path: Path, decoder: Any, name: str
) -> None:
    backend = byte_level()
    if decoder is None:
        saved = json.loads(backend.to_str()) | {"decoder": None}
        backend = tokenizers.Tokenizer.from_str(json.dumps(saved))
    else:
        backend.decoder = decoder
    with pytest.raises(ModelError, match=f"decoder {name}"):
        tokenizer_from_dir(save(tmp_path, backend))
