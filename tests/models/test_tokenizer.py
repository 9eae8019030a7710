"""Token ids are those of an independent implementation, and text comes back from them whole.

Vocabularies made by hand stand in for the real ones wherever a property does not need those.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from jaxkv.models.checkpoints.gguf_file import open_gguf
from jaxkv.models.errors import ModelError
from jaxkv.models.tokenizer import StreamDecoder, Tokenizer, tokenizer_from_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
CASES = (
    "short",
    "story",
    "english_600",
    "code_py",
    "chat_1turn",
    "chinese_cjk",
    "numbers_spaces",
    "exact_256",
)


def gguf_metadata(model: str, tokens: Sequence[tuple[str, int]], **keys: Any) -> dict[str, Any]:
    values = {
        "model": model,
        "tokens": [token for token, _ in tokens],
        "token_type": [kind for _, kind in tokens],
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | keys).items()}


def byte_level(merges: Sequence[str] = (), **keys: Any) -> dict[str, Any]:
    """Ids 0 to 255 are GPT-2's alphabet, then come what `merges` make and three added tokens."""
    tokens = [(char, NORMAL) for char in sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [(merge.replace(" ", "", 1), NORMAL) for merge in merges]
    first = len(tokens)
    tokens += [("<|start|>", CONTROL), ("<|im_end|>", CONTROL), ("<é>", USER_DEFINED)]
    ids = {"bos_token_id": first, "eos_token_id": first + 1}
    return gguf_metadata("gpt2", tokens, merges=list(merges), **({"pre": "gpt-2"} | ids | keys))


def sentencepiece(pieces: Mapping[str, float], **keys: Any) -> dict[str, Any]:
    """Ids 0 to 2 are unk, BOS and EOS, then 256 bytes, then `pieces`, then two added tokens."""
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    tokens += [(piece, NORMAL) for piece in pieces]
    tokens += [("<end_of_turn>", CONTROL), ("<tool>", USER_DEFINED)]
    scores = [0.0] * 259 + list(pieces.values()) + [0.0, 0.0]
    return gguf_metadata("llama", tokens, scores=scores, **keys)


def words(metadata: Mapping[str, Any], text: str) -> list[str]:
    """The token strings of `text`."""
    tokenizer = tokenizer_from_gguf(metadata)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [metadata["tokenizer.ggml.tokens"][i] for i in ids]


PIECES = {
    "▁": -9.0,
    "a": -9.0,
    "b": -9.0,
    "c": -9.0,
    "ab": -1.0,
    "bc": -2.0,
    "▁a": -3.0,
    "▁ab": -4.0,
}
BYTE_LEVEL = tokenizer_from_gguf(byte_level(["a b", "Ġ ab", "Ã ©"]))
SPACED = tokenizer_from_gguf(sentencepiece(PIECES))


def marks_to_spaces(text: str, tokenizer: Tokenizer) -> str:
    return text.replace("▁", " ") if tokenizer is SPACED else text


BOTH = pytest.mark.parametrize(
    "tokenizer", [pytest.param(BYTE_LEVEL, id="bytes"), pytest.param(SPACED, id="sentencepiece")]
)


# The real vocabularies, against Hugging Face's own tokenizers.


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def real(request: pytest.FixtureRequest, data: Path) -> tuple[Tokenizer, dict, Mapping]:
    path = request.getfixturevalue(f"{request.param}_path")
    return (
        tokenizer_from_gguf(open_gguf(path).metadata),
        json.loads((data / f"{request.param}.json").read_text("utf-8"))["cases"],
        np.load(data / f"{request.param}.npz"),
    )


@pytest.mark.parametrize("case", CASES)
def test_ids_are_those_of_the_reference(real, case: str) -> None:
    tokenizer, cases, arrays = real
    ids = tokenizer.encode(cases[case]["text"])
    assert ids[: cases[case]["cut"]] == arrays[f"{case}/ids"].tolist()


@pytest.mark.parametrize("case", CASES)
def test_text_is_that_of_the_reference_token_by_token_too(real, case: str) -> None:
    tokenizer, cases, arrays = real
    ids = arrays[f"{case}/cont_ids"].tolist()
    expected = cases[case]["continuation"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    stream = StreamDecoder(tokenizer, skip_special_tokens=False, continues=True)
    assert "".join(stream.push([i]) for i in ids) + stream.flush() == expected


def test_no_case_of_the_references_is_left_out(real) -> None:
    assert set(real[1]) == set(CASES)


def test_real_special_tokens_are_known(real) -> None:
    tokenizer, _, _ = real
    expected = {
        49152: (1, {"<|im_end|>", "<|endoftext|>"}, "<|im_start|>", "<|im_end|>", ()),
        262144: (2, {"<eos>", "<end_of_turn>"}, "<bos>", "<eos>", (2,)),
    }
    bos_id, stops, bos_token, eos_token, prefix = expected[tokenizer.vocab_size]
    assert tokenizer.bos_id == bos_id
    assert {tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.stop_ids} == stops
    assert (tokenizer.bos_token, tokenizer.eos_token) == (bos_token, eos_token)
    assert tokenizer.encode("x")[:-1] == list(prefix)


# Byte-level BPE.


@given(st.text(min_size=1))
def test_any_unicode_text_comes_back_from_bytes(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == text


def test_added_tokens_are_not_spelled_in_the_byte_alphabet() -> None:
    assert BYTE_LEVEL.decode([BYTE_LEVEL.vocab_size - 1]) == "<é>"


def test_merges_apply_in_rank_order() -> None:
    assert words(byte_level(["b c", "a b", "bc d"]), "abcd") == ["a", "bcd"]
    assert words(byte_level(["a b", "b c", "bc d"]), "abcd") == ["ab", "c", "d"]


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("smollm", "it's 12345 \n ok", "it|'s|Ġ|1|2|3|4|5|ĠĊ|Ġok"),
        ("gpt-2", "it's 12345 \n ok", "it|'s|Ġ12345|ĠĊ|Ġok"),
        ("llama-bpe", "IT'S 12345 \n\n(ok)\n", "IT|'S|Ġ|123|45|ĠĊĊ|(ok|)Ċ"),
        ("qwen2", "IT'S 123 \n\n(ok)\n", "IT|'S|Ġ|1|2|3|ĠĊĊ|(ok|)Ċ"),
        ("tekken", "aBCd 12 x/\n  y", "a|BCd|Ġ|1|2|Ġx|/Ċ|Ġ|Ġy"),
        ("default", "a+b 1234567 x", "a|+|b|Ġ|123|456|7|Ġx"),
        ("gpt-2", "IT'S  x² ½", "IT|'|S|Ġ|Ġx|Â²|ĠÂ½"),
        ("smollm", "x² ½", "x|Â²|Ġ|Â½"),
    ],
)
def test_each_kind_cuts_text_by_its_own_rule(kind: str, text: str, expected: str) -> None:
    backend = tokenizer_from_gguf(byte_level(pre=kind)).backend
    assert backend.pre_tokenizer is not None
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == expected.split("|")


def test_digits_join_only_in_kinds_that_let_them() -> None:
    assert words(byte_level(["1 2"], pre="gpt-2"), "a12") == ["a", "12"]
    assert words(byte_level(["1 2"], pre="smollm"), "a12") == ["a", "1", "2"]


def test_kinds_that_take_whole_words_do_not_need_their_merges() -> None:
    metadata = byte_level(["a b", "b c"], pre="llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("abc")
    metadata["tokenizer.ggml.token_type"].append(NORMAL)
    assert words(metadata, "abc") == ["abc"]
    assert words(metadata | {"tokenizer.ggml.pre": "gpt-2"}, "abc") == ["ab", "c"]


def test_qwen2_composes_accents_first() -> None:
    assert words(byte_level(pre="qwen2"), "e\u0301") == words(byte_level(pre="gpt-2"), "é")


def test_bos_follows_the_file_and_else_the_kind() -> None:
    for kind, flag, has_bos in [
        ("gpt-2", {}, False),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("gpt-2", {"add_bos_token": True}, True),
    ]:
        tokenizer = tokenizer_from_gguf(byte_level(pre=kind, **flag))
        assert (tokenizer.encode("a")[0] == tokenizer.bos_id) == has_bos


# SentencePiece.


def sentencepiece_by_definition(text: str, scores: Mapping[str, float]) -> list[str]:
    """Joins the adjacent pair of the highest score, the leftmost first, until none is left."""
    symbols = list(text)
    while True:
        joins = [
            (-scores[left + right], i)
            for i, (left, right) in enumerate(pairwise(symbols))
            if left + right in scores
        ]
        if not joins:
            return symbols
        _, i = min(joins)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@given(
    st.lists(st.text("ab▁", min_size=2, max_size=5), unique=True, max_size=12),
    st.text("ab ", min_size=1, max_size=24),
)
def test_pieces_are_those_of_sentencepiece(joined: list[str], text: str) -> None:
    scores = {piece: -float(rank) for rank, piece in enumerate([*joined, "a", "b", "▁"])}
    metadata = sentencepiece(scores, add_space_prefix=False)
    assert words(metadata, text) == sentencepiece_by_definition(text.replace(" ", "▁"), scores)


def test_a_space_is_put_before_the_text_and_taken_away_again() -> None:
    assert words(sentencepiece(PIECES), "ab c") == ["▁ab", "▁", "c"]
    assert words(sentencepiece(PIECES, add_space_prefix=False), "ab c") == ["ab", "▁", "c"]
    for text in ("ab c", " ab", "a  b", " "):
        assert SPACED.decode(SPACED.encode(text)) == text


def test_characters_without_a_token_become_their_bytes() -> None:
    metadata = sentencepiece(PIECES, add_space_prefix=False)
    assert words(metadata, "aé\n") == ["a", "<0xC3>", "<0xA9>", "<0x0A>"]
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.decode(tokenizer.encode("aé\n👍🏽")) == "aé\n👍🏽"


@pytest.mark.parametrize("stored", ["  ", "▁▁"])
@pytest.mark.parametrize("prefix", [True, False])
def test_user_defined_tokens_are_found_however_the_file_spells_them(
    stored: str, prefix: bool
) -> None:
    metadata = sentencepiece(PIECES, add_space_prefix=prefix)
    metadata["tokenizer.ggml.tokens"][-1] = stored
    tokenizer = tokenizer_from_gguf(metadata)
    ids = tokenizer.encode("b  b", add_special_tokens=False)
    assert tokenizer.vocab_size - 1 in ids
    assert tokenizer.decode(ids).replace(" ", "") == "bb"


def test_special_tokens_in_the_text_become_their_ids_and_are_skipped_in_decoding() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece(PIECES, add_space_prefix=False))
    ids = tokenizer.encode("ab<end_of_turn>c")
    assert ids == [1, 263, 267, 262]
    assert tokenizer.decode(ids) == "abc"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>ab<end_of_turn>c"


def test_bos_and_eos_are_added_by_the_rule_of_the_file() -> None:
    for flags, first, last in [
        ({}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_eos_token": True}, [1], [2]),
    ]:
        tokenizer = tokenizer_from_gguf(sentencepiece(PIECES, add_space_prefix=False, **flags))
        assert tokenizer.encode("a") == [*first, 260, *last]
        assert tokenizer.encode("a", add_special_tokens=False) == [260]


def test_what_ends_an_answer_is_eos_end_of_turn_and_what_the_file_names() -> None:
    assert tokenizer_from_gguf(sentencepiece(PIECES)).stop_ids == {2, 267}
    assert tokenizer_from_gguf(sentencepiece(PIECES, eot_token_id=263)).stop_ids == {2, 263, 267}
    spelled_wrong = sentencepiece(PIECES)
    spelled_wrong["tokenizer.ggml.token_type"][267] = USER_DEFINED
    tokenizer = tokenizer_from_gguf(spelled_wrong)
    assert 267 in tokenizer.stop_ids
    assert tokenizer.decode([267]) == ""


# Decoding as tokens come.


@BOTH
@given(data=st.data())
def test_text_in_parts_joins_to_the_text_of_the_whole(tokenizer: Tokenizer, data) -> None:
    some_ids = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=6)
    parts = data.draw(st.lists(some_ids, max_size=10))
    skip = data.draw(st.booleans())
    stream = StreamDecoder(tokenizer, skip_special_tokens=skip)
    text = "".join(stream.push(part) for part in parts) + stream.flush()
    ids = [token_id for part in parts for token_id in part]
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@BOTH
@given(text=st.text(min_size=1, max_size=30))
def test_no_part_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = StreamDecoder(tokenizer, skip_special_tokens=False)
    given_out = ""
    for token_id in ids:
        given_out += stream.push([token_id])
        # The mark that stands for a space is the one character that does not come back.
        assert marks_to_spaces(text, tokenizer).startswith(given_out)
    assert stream.flush() == ""
    assert len(given_out) == len(text)


@BOTH
@given(text=st.text(min_size=1, max_size=30))
def test_decoding_agrees_with_the_backend_on_encoded_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids, skip_special_tokens=True)


def test_bytes_that_never_complete_come_out_at_the_end() -> None:
    stream = StreamDecoder(SPACED)
    assert stream.push([3 + 0xF0, 3 + 0x9F]) == ""
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"


def test_a_continuation_keeps_its_first_space() -> None:
    (_, space_a) = SPACED.encode("a")
    assert StreamDecoder(SPACED).push([space_a]) == "a"
    assert StreamDecoder(SPACED, continues=True).push([space_a]) == " a"


# What cannot be read.


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "bert"}, r"tokenizer.ggml.model is 'bert'"),
        ({"model": None}, "has no tokenizer.ggml.model"),
        ({"tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"tokens": "a b"}, "tokenizer.ggml.tokens is 'a b', not a list"),
        ({"merges": None}, "has no tokenizer.ggml.merges"),
        ({"merges": ["a zz"]}, "tokenizer.ggml.merges does not fit the vocabulary"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges does not fit the vocabulary"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 entries for 259 tokens"),
        ({"pre": "deepseek-v3"}, "tokenizer.ggml.pre is 'deepseek-v3'"),
        ({"eos_token_id": 259}, "eos_token_id is 259, but there are 259 tokens"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is missing"),
        ({"model": "llama"}, "has no tokenizer.ggml.scores"),
        ({"model": "llama", "scores": [0.0]}, "scores has 1 entries for 259 tokens"),
        ({"model": "llama", "remove_extra_whitespaces": True}, "remove_extra_whitespaces is set"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_metadata_that_cannot_be_read_is_one_clear_line(changes: dict, problem: str) -> None:
    metadata = byte_level()
    for name, value in changes.items():
        metadata[f"tokenizer.ggml.{name}"] = value
        if value is None:
            del metadata[f"tokenizer.ggml.{name}"]
    with pytest.raises(ModelError, match=problem) as caught:
        tokenizer_from_gguf(metadata)
    assert "\n" not in str(caught.value)


def test_a_token_listed_twice_is_refused() -> None:
    metadata = sentencepiece(PIECES)
    metadata["tokenizer.ggml.tokens"].append("ab")
    metadata["tokenizer.ggml.token_type"].append(NORMAL)
    with pytest.raises(ModelError, match=r"'ab' at 263 and 269"):
        tokenizer_from_gguf(metadata)


def test_text_that_cannot_be_encoded_is_one_clear_line() -> None:
    with pytest.raises(ModelError, match="empty"):
        BYTE_LEVEL.encode("")
    with pytest.raises(ModelError, match=r"lone surrogate, U\+D800, at character 2"):
        BYTE_LEVEL.encode("ab\ud800c")


def test_ids_outside_the_vocabulary_are_no_text_and_negative_ones_an_error() -> None:
    assert BYTE_LEVEL.decode([10**6]) == ""
    with pytest.raises(ModelError, match="token id -1 is negative"):
        BYTE_LEVEL.decode([-1])
