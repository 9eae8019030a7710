"""Byte-level BPE as in GPT-2: the rules that cut a text into words before merging.

A GGUF file gives the vocabulary and the merges but only the *name* of the cutting rule
(`tokenizer.ggml.pre`), so the rules are kept here. The wrong rule still gives plausible tokens on
prose, so an unknown name is refused. `sentencepiece_bpe` has the other kind of vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from jaxkv.models.errors import ModelError

# Models were trained with these exact patterns: one changed character changes tokens.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizerKind:
    """What one `tokenizer.ggml.pre` name stands for.

    Attributes:
      patterns: applied one after the other; each isolates its matches within the pieces so far.
      whole_words: a word that is in the vocabulary becomes one token, whatever the merges say.
      add_bos: whether BOS is added if the file does not say.
      compose: text is first normalised to Unicode NFC.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    compose: bool = False


def pre_tokenizer_kind(name: str) -> PreTokenizerKind:
    """The rule that `tokenizer.ggml.pre` names.

    Raises:
      ModelError: the name is not known here.
    """
    match name:
        case "smollm" | "starcoder" | "refact":
            return PreTokenizerKind((r"\p{N}", _GPT2))
        case "gpt-2" | "phi-2":
            return PreTokenizerKind((_GPT2,))
        case "llama-bpe" | "llama-v3" | "llama3":
            return PreTokenizerKind((_WORDS % r"\p{N}{1,3}",), whole_words=True, add_bos=True)
        case "qwen2":
            return PreTokenizerKind((_WORDS % r"\p{N}",), compose=True)
        case "tekken":
            return PreTokenizerKind((_TEKKEN,), whole_words=True, add_bos=True)
        case "default":
            # What llama.cpp does with a file that names no rule.
            return PreTokenizerKind((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
    raise ModelError(
        f"tokenizer.ggml.pre is {name!r}, a pre-tokenizer that is not known here; use the model's "
        "Hugging Face directory, whose tokenizer.json says how it splits"
    )


def byte_level_backend(
    vocab: Mapping[str, int], merges: Sequence[str], kind: PreTokenizerKind
) -> tokenizers.Tokenizer:
    """A byte-level BPE without added tokens.

    Args:
      vocab: token string, spelled in GPT-2's byte alphabet, to id.
      merges: `left right`, the first one merged first.
      kind: how text is cut.

    Raises:
      ModelError: a merge is not a pair of tokens whose join is a token.
    """
    try:
        pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
        model = models.BPE(vocab=dict(vocab), merges=pairs, ignore_merges=kind.whole_words)
    except Exception as error:  # `tokenizers` raises nothing narrower
        reason = " ".join(str(error).split())
        raise ModelError(f"tokenizer.ggml.merges does not fit the vocabulary: {reason}") from None
    backend = tokenizers.Tokenizer(model)
    if kind.compose:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend
