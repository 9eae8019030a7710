"""Which tokens of which sequences the next step computes: pure host logic, no arrays of K or V.

First come, first served, under a budget of tokens a step. Sequences that decode go first, one
token each; what is left of the budget goes to prompts, in chunks. Where the pages run out, the
sequence that came last gives up all of its own and starts again later (preemption by recompute).
"""

from collections import deque
from dataclasses import dataclass

from jaxkv.engine.sequence import Sequence
from jaxkv.prefix import OutOfPages


@dataclass(frozen=True)
class Scheduled:
    """A sequence's share of a step: its next `num_tokens` uncomputed tokens."""

    sequence: Sequence
    num_tokens: int

    @property
    def completes(self) -> bool:
        """No uncomputed token is left after the step, so that it yields the next token."""
        return self.num_tokens == self.sequence.num_uncomputed


@dataclass(frozen=True)
class StepPlan:
    """What one step computes, in batch order; every sequence has pages for its share."""

    entries: tuple[Scheduled, ...]

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return sum(entry.num_tokens for entry in self.entries)


class Scheduler:
    """Queues of sequences, and the choice of each step.

    Attributes:
      waiting: not started, or preempted; the head goes first.
      running: hold pages, in order of arrival.
      num_preemptions: how often a sequence gave up its pages.
    """

    def __init__(self, max_sequences: int, token_budget: int):
        self._max_sequences = max_sequences
        self._token_budget = token_budget
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, whatever its state, and releases its pages; idempotent."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.pages.release()

    def plan(self) -> StepPlan | None:
        """Chooses the next step, acquiring pages for it; None when nothing is queued."""
        entries: list[Scheduled] = []
        budget = self._token_budget
        decode_first = sorted(self.running, key=lambda sequence: sequence.num_uncomputed > 1)
        for sequence in decode_first:
            if sequence not in self.running:  # preempted for the sake of an earlier one
                continue
            num_tokens = min(sequence.num_uncomputed, budget)
            if num_tokens == 0 or not self._make_room(sequence, num_tokens, entries):
                continue
            entries.append(Scheduled(sequence, num_tokens))
            budget -= num_tokens
        while self.waiting and budget > 0 and len(self.running) < self._max_sequences:
            sequence = self.waiting[0]
            num_tokens = min(sequence.num_uncomputed, budget)
            try:
                sequence.pages.grow(num_tokens)
            except OutOfPages:
                break
            self.running.append(self.waiting.popleft())
            entries.append(Scheduled(sequence, num_tokens))
            budget -= num_tokens
        return StepPlan(tuple(entries)) if entries else None

    def _make_room(self, sequence: Sequence, num_tokens: int, entries: list[Scheduled]) -> bool:
        """Grows a running sequence, preempting those that came last; False where it went itself."""
        while True:
            try:
                sequence.pages.grow(sequence.num_computed + num_tokens)
                return True
            except OutOfPages:
                last = self.running[-1]
                self._preempt(last)
                entries[:] = [entry for entry in entries if entry.sequence is not last]
                if last is sequence:
                    return False

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.pages.release()
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1
