"""A request on its way through the engine."""

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxkv.engine.completion import Completion, FinishReason
from jaxkv.engine.drop_state import DropState
from jaxkv.engine.request import Request
from jaxkv.engine.sampling import SeenTokens
from jaxkv.engine.stopping import AnswerText
from jaxkv.prefix import Namespace


class Fork(NamedTuple):
    """A sequence to share pages with: both begin with the same tokens.

    Attributes:
      parent: the other sequence.
      num_tokens: how many tokens they share.
    """

    parent: "Sequence"
    num_tokens: int


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """A request, its tokens, and the row of the page tables with the computed ones.

    Tokens `[0, num_computed)` have K and V in pages; the others are still to compute. A sequence
    decodes if exactly one is left, and it runs while it has a row. What each decode step reads of
    every sequence is a field and not a property, for speed.

    Attributes:
      request: what was asked.
      completion: what the user sees.
      namespace: the sequences that may share its pages.
      max_tokens: the length at which it ends, prompt and answer.
      tokens: prompt and generated tokens, int32.
      text: its answer as text; None without a detokenizer.
      seen: its tokens for the repetition penalty; None without one.
      submitted: clock at submission, in seconds.
      fork: a sequence to share pages with when it starts; None for most.
      drop: which of its tokens are dropped, and when; None in an engine that drops none.
      stepwise: it pauses after each token.
      row: its row of the page tables; None while it waits.
      num_uncomputed: tokens that are still to compute.
      num_found: tokens that were computed already when it got its row.
      in_prompt: some token of the prompt is not computed.
      is_reported: more than the token itself is reported of each token.
      paused: it takes no part in steps until it is resumed.
      was_preempted: it had to give up its row at some time.
    """

    request: Request
    completion: Completion
    namespace: Namespace
    max_tokens: int
    tokens: array
    text: AnswerText | None = None
    seen: SeenTokens | None = None
    submitted: float = 0.0
    fork: Fork | None = None
    drop: DropState | None = None
    stepwise: bool = False
    row: int | None = None
    num_uncomputed: int = field(init=False)
    num_found: int = 0
    in_prompt: bool = True
    is_reported: bool = field(init=False)
    paused: bool = False
    was_preempted: bool = False

    def __post_init__(self) -> None:
        self.num_uncomputed = len(self.tokens)
        self.is_reported = self.request.logprobs is not None or self.request.keep_logits

    @property
    def num_computed(self) -> int:
        """Tokens with K and V in the row's pages."""
        return len(self.tokens) - self.num_uncomputed

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return self.completion.prompt_tokens

    @property
    def first_wanted(self) -> int:
        """Position of the first token that needs the logits before it."""
        request = self.request
        return request.prompt_logprobs_from if request.prompt_logprobs else len(self.tokens)

    @property
    def num_findable(self) -> int:
        """Largest number of tokens that may come from the prefix cache: the token before the first
        wanted one must be computed, and after a context nothing is reused."""
        end = self.first_wanted
        return (end if self.drop is None else min(end, self.drop.context)) - 1

    @property
    def num_shareable(self) -> int:
        """Tokens of the prompt whose pages other sequences may share once they are computed."""
        return self.num_prompt if self.drop is None else self.drop.context

    @property
    def reads_cache(self) -> bool:
        """It may start from cached pages; not if the logits at every prompt token are wanted."""
        return self.first_wanted > 1 or not self.request.prompt_logprobs

    @property
    def is_finished(self) -> bool:
        """The request has ended."""
        return self.completion.finish_reason is not None

    def share(self, budget: int) -> int:
        """How many of its uncomputed tokens the next step computes, at most `budget`."""
        num_tokens = min(self.num_uncomputed, budget)
        return num_tokens if self.drop is None else self.drop.limit(self.num_computed, num_tokens)

    def start(self, row: int, num_found: int) -> None:
        """Takes a row that has the first `num_found` tokens already."""
        self.row, self.num_found = row, num_found
        self.num_uncomputed = len(self.tokens) - num_found
        self.in_prompt = num_found < self.num_prompt

    def stop(self) -> None:
        """Gives up the row, and with it everything that was computed."""
        self.completion.computed_tokens += self.num_computed - self.num_found
        self.row, self.num_found = None, 0
        self.num_uncomputed = len(self.tokens)
        if self.drop is not None:
            self.drop.restart()

    def packed(self, num_tokens: int) -> bytes:
        """The first `num_tokens` tokens in the form that the prefix index takes."""
        return self.tokens[:num_tokens].tobytes()

    def append(self, token: int) -> tuple[str, FinishReason | None]:
        """Adds a generated token, which is not computed yet.

        Returns:
          The text that is certain now, and why no token may follow, or None.
        """
        self.tokens.append(token)
        self.completion.tokens.append(token)
        self.num_uncomputed += 1
        self.paused = self.stepwise
        if self.seen is not None:
            self.seen.add([token])
        reason = None
        if token in self.request.stop_ids:
            reason = FinishReason.STOP
        elif len(self.tokens) >= self.max_tokens:
            reason = FinishReason.LENGTH
        return self._settle_text(token, reason) if self.text is not None else ("", reason)

    def resume(self, last_token: int) -> None:
        """Ends a pause, with `last_token` in place of the token that was generated last."""
        self.tokens[-1] = self.completion.tokens[-1] = last_token
        if self.seen is not None:
            self.seen.reset(self.tokens)
        self.paused = False

    def _settle_text(
        self, token: int, reason: FinishReason | None
    ) -> tuple[str, FinishReason | None]:
        assert self.text is not None
        text = "" if token in self.request.stop_ids else self.text.push(token)
        if reason is not None:
            text += self.text.finish()
        if self.text.stopped:
            reason = FinishReason.STOP
        self.completion.text += text
        return text, reason
