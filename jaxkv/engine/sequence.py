"""A request on its way through the engine."""

from dataclasses import dataclass, field

import numpy as np

from jaxkv.engine.request import Completion, FinishReason, Request
from jaxkv.engine.stopping import AnswerText
from jaxkv.prefix import SequencePages


@dataclass(eq=False)
class Sequence:
    """A request, its tokens, and the pages that hold the computed ones.

    Tokens `[0, num_computed)` have K and V in the pages; the rest are still to be computed. A
    sequence is decoding when exactly one is left.

    Attributes:
      request: what was asked.
      completion: what the user sees.
      pages: the pages it holds.
      max_tokens: longest it may grow, prompt and answer.
      tokens: prompt and generated tokens.
      num_computed: tokens with K and V in the pages.
      text: its answer as text; None where the engine has no detokenizer.
      seen: `[ceil(V / 8)]` uint8, bit set of its tokens, where a penalty asks for it.
      submitted: clock at submission, seconds.
    """

    request: Request
    completion: Completion
    pages: SequencePages
    max_tokens: int
    tokens: list[int]
    text: AnswerText | None
    seen: np.ndarray | None
    submitted: float
    num_computed: int = field(default=0)

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the next steps must compute."""
        return len(self.tokens) - self.num_computed

    @property
    def finished(self) -> bool:
        """Nothing is left to do."""
        return self.completion.finish_reason is not None

    def append(self, token: int) -> None:
        """Adds a generated token, not yet computed."""
        self.tokens.append(token)
        self.completion.tokens.append(token)
        if self.seen is not None:
            mark_seen(self.seen, [token])

    def stop_reason(self) -> FinishReason | None:
        """Why no token may follow the last one, or None."""
        if self.completion.tokens and self.completion.tokens[-1] in self.request.stop_ids:
            return FinishReason.STOP
        if self.text is not None and self.text.stopped:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.max_tokens else None


def mark_seen(bits: np.ndarray, tokens: list[int]) -> None:
    """Sets the bits of `tokens`, least significant first, in `[ceil(V / 8)]` uint8."""
    ids = np.asarray(tokens)
    np.bitwise_or.at(bits, ids >> 3, (1 << (ids & 7)).astype(np.uint8))
