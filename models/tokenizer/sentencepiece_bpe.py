"""SentencePiece BPE built from a vocabulary and its scores, for files that list no merges.

SentencePiece (Kudo and Richardson, arXiv 1808.06226) joins, again and again, the adjacent pair
whose join is the token of the highest score, the leftmost first. The BPE of `tokenizers` joins the
pair of the lowest merge rank, the leftmost first. Listing, for each token from the highest score to
the lowest, every way to cut it into two tokens makes the two equal. Unigram models are not read.
"""

from collections.abc import Mapping

import tokenizers
from tokenizers import decoders, models, normalizers

from jaxkv.models.tokenizer.pieces import SPACE_MARK


def merges_from_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Merges that make a BPE join what SentencePiece joins, in rank order.

    Two cuts of one token have different ranks here and equal scores in SentencePiece. That could
    show only in three adjacent tokens x, y, z where x + y and y + z are the same text; no text
    that leads there is known. Every character of a token is taken to be a token, as
    SentencePiece's trainer sees to.

    Args:
      scores: score of every token that is text, with `SPACE_MARK` for the space; a higher score
        joins first.
    """
    # One comprehension, for Gemma's 262,144 tokens have 1.7 million cuts.
    return [
        (left, right)
        for token in sorted(scores, key=scores.__getitem__, reverse=True)
        for cut in range(1, len(token))
        if (left := token[:cut]) in scores and (right := token[cut:]) in scores
    ]


def sentencepiece_backend(
    vocab: Mapping[str, int],
    scores: Mapping[str, float],
    *,
    unk_token: str | None,
    add_space_prefix: bool,
) -> tokenizers.Tokenizer:
    """A SentencePiece BPE with byte fallback, without added tokens.

    Args:
      vocab: token string to id, all of them.
      scores: score of each token that is text.
      unk_token: stands for what neither tokens nor bytes express.
      add_space_prefix: puts a space before the text, and, as llama.cpp does and SentencePiece
        does not, after each added token within it.
    """
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=dict(vocab),
            merges=merges_from_scores(scores),
            unk_token=unk_token,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    mark = normalizers.Replace(" ", SPACE_MARK)
    prepend = [normalizers.Prepend(SPACE_MARK)] if add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, mark])
    strip = [decoders.Strip(" ", 1, 0)] if add_space_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend
