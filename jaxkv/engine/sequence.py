"""A request on its way through the engine."""

from array import array
from dataclasses import dataclass, field

import numpy as np

from jaxkv.compress.kept import Kept
from jaxkv.engine.request import Completion, FinishReason, Request
from jaxkv.engine.stopping import AnswerText
from jaxkv.prefix import Namespace, SnapshotKey

NEVER = 1 << 60  # tokens that no sequence has


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """A request, its tokens, and the row of the page tables that holds the computed ones.

    Tokens `[0, num_computed)` have K and V in pages; the rest are still to be computed. A sequence
    is decoding when exactly one is left, and it is running while it has a row. What a decode step
    asks of every sequence is a field, not a property: it has to be quick.

    Attributes:
      request: what was asked.
      completion: what the user sees.
      namespace: who may share its pages.
      max_tokens: longest it may grow, prompt and answer.
      tokens: prompt and generated tokens, int32.
      text: its answer as text; None where the engine has no detokenizer.
      seen: `[ceil(V / 8)]` uint8, bit set of its tokens, where a penalty asks for it.
      submitted: clock at submission, seconds.
      fork_of: a sequence that begins with the same `fork_at` tokens, to share pages with once
        they are computed; None where there is none.
      row: of the page tables; None while it waits.
      num_uncomputed: tokens that the next steps must compute.
      num_found: tokens that were computed already when the row was taken.
      in_prompt: some of the prompt is not computed.
      is_reported: more is wanted of each token than the token.
      sources: in each group the page to copy onto the row's next one, before the next step.
      stepwise: it pauses after each token.
      paused: it takes no part in steps until it is resumed.
      was_preempted: it had to give its row up, and goes before those that have not started.
      arrival: see `WaitingQueue`.
      context: its first tokens, after which some are dropped; NEVER where none are.
      shorten_at: the number of computed tokens after which some are dropped next.
      shortened_at: the one after which some were dropped last; 0 before.
      interval: how many tokens later more are dropped; NEVER for once.
      kept: which were left then; None where all are there.
      snapshot_key: under which what is left of its context may be known; None where it may not.
    """

    request: Request
    completion: Completion
    namespace: Namespace
    max_tokens: int
    tokens: array
    text: AnswerText | None
    seen: np.ndarray | None
    submitted: float
    fork_of: "Sequence | None" = None
    fork_at: int = 0
    row: int | None = None
    num_uncomputed: int = field(init=False)
    num_found: int = 0
    in_prompt: bool = True
    is_reported: bool = field(init=False)
    sources: tuple[int, ...] = ()
    stepwise: bool = False
    paused: bool = False
    was_preempted: bool = False
    arrival: int = 0
    context: int = NEVER
    shorten_at: int = field(init=False)
    shortened_at: int = 0
    interval: int = NEVER
    kept: Kept | None = None
    snapshot_key: SnapshotKey | None = None

    def __post_init__(self) -> None:
        self.num_uncomputed = len(self.tokens)
        self.shorten_at = self.context
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
    def num_findable(self) -> int:
        """Tokens that may be found computed: the last one is not wanted, nor the one before a
        log-probability, and behind the context none is of use."""
        return min(self._first_wanted, self.context) - 1

    @property
    def _first_wanted(self) -> int:
        """How many tokens come before the first one that something is wanted of."""
        request = self.request
        return request.prompt_logprobs_from if request.prompt_logprobs else len(self.tokens)

    def share(self, budget: int) -> int:
        """How many of its uncomputed tokens the next step may compute, under a budget."""
        return min(self.num_uncomputed, budget, self.shorten_at - self.num_computed)

    @property
    def resumable(self) -> SnapshotKey | None:
        """The snapshot that it may start from: no token of the context is to be computed."""
        return self.snapshot_key if self._first_wanted > self.context else None

    @property
    def is_finished(self) -> bool:
        """Nothing is left to do."""
        return self.completion.finish_reason is not None

    @property
    def reads_cache(self) -> bool:
        """It may start from cached pages; not where each prompt token's logits are wanted."""
        return not self.request.prompt_logprobs or self.request.prompt_logprobs_from > 1

    def start(self, row: int, num_found: int, sources: tuple[int, ...]) -> None:
        """Takes a row that has the first `num_found` tokens already."""
        self.row, self.num_found, self.sources = row, num_found, sources
        self.num_uncomputed = len(self.tokens) - num_found
        self.in_prompt = num_found < self.num_prompt

    def shortened(self, kept: Kept | None) -> None:
        """The time has come when it loses tokens; `kept` are left, None where none had to go."""
        n = self.num_computed
        if kept is not None:
            self.kept, self.shortened_at = kept, n
            self.completion.dropped_tokens = n - float(np.asarray(kept.counts).mean())
        self.shorten_at = n + self.interval

    def stop(self) -> None:
        """Gives up the row, and with it what was computed."""
        self.completion.computed_tokens += self.num_computed - self.num_found
        self.row, self.num_found, self.sources = None, 0, ()
        self.num_uncomputed = len(self.tokens)
        self.shorten_at, self.shortened_at, self.kept = self.context, 0, None

    def packed(self, num_tokens: int) -> bytes:
        """The first `num_tokens` tokens as the prefix index takes them."""
        return self.tokens[:num_tokens].tobytes()

    def append(self, token: int) -> tuple[str, FinishReason | None]:
        """Adds a generated token, not yet computed.

        Returns:
          The text that it makes certain, and why no token may follow it, or None.
        """
        self.tokens.append(token)
        self.completion.tokens.append(token)
        self.num_uncomputed += 1
        self.paused = self.stepwise
        if self.seen is not None:
            mark_seen(self.seen, [token])
        reason = None
        if token in self.request.stop_ids:
            reason = FinishReason.STOP
        elif len(self.tokens) >= self.max_tokens:
            reason = FinishReason.LENGTH
        return self._settle_text(token, reason) if self.text is not None else ("", reason)

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


def mark_seen(bits: np.ndarray, tokens: list[int]) -> None:
    """Sets the bits of `tokens`, least significant first, in `[ceil(V / 8)]` uint8."""
    ids = np.asarray(tokens)
    np.bitwise_or.at(bits, ids >> 3, (1 << (ids & 7)).astype(np.uint8))
