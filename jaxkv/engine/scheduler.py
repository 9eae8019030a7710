"""Which tokens of which sequences the next step computes: pure host logic, no arrays of K or V.

Under a budget of tokens a step, sequences that decode go first, one token each; what is left goes
to prompts, in chunks: those under way, then waiting ones, in the order of the queue (`waiting`),
from behind what the prefix index has of them. A sequence whose next tokens another one is about to
compute waits for it, and finds them cached. Where the pages run out, the sequence that counts least
gives up its row and starts again later, from what is then still cached of it.
"""

import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from jaxkv.engine.sequence import Sequence
from jaxkv.engine.waiting import WaitingQueue
from jaxkv.prefix import (
    OutOfPages,
    PageTables,
    PrefixIndex,
    SnapshotKey,
    TokenDropper,
    common_length,
)


def int32(values: Iterable[int]) -> NDArray[np.int32]:
    """An array of Python's integers, in a quarter of the time that numpy takes to read them."""
    return np.frombuffer(array("i", values), np.int32)


@dataclass(frozen=True)
class PageCopy:
    """A page to copy before a step writes any: page ids of one layer group."""

    group: int
    source: int
    target: int


@dataclass(frozen=True)
class StepPlan:
    """What one step computes, in batch order; every sequence has pages for its share.

    Attributes:
      sequences: whose tokens.
      num_tokens: of each sequence, how many of its uncomputed tokens.
      rows: of each sequence, its row of the page tables.
      lengths: of each sequence, its tokens that are computed after the step.
      started: those of them that have a row since this plan.
      copies: pages to copy first; reads come before writes.
    """

    sequences: tuple[Sequence, ...]
    num_tokens: tuple[int, ...]
    rows: NDArray[np.int32]
    lengths: NDArray[np.int32]
    started: tuple[Sequence, ...] = ()
    copies: tuple[PageCopy, ...] = ()

    @cached_property
    def total_tokens(self) -> int:
        """Query tokens of the step."""
        return sum(self.num_tokens)

    @property
    def is_decode(self) -> bool:
        """Each sequence has one token."""
        return self.total_tokens == len(self.sequences)

    def tokens(self) -> NDArray[np.int32]:
        """`[total_tokens]`, the step's query tokens, sequence by sequence."""
        ends = zip(self.sequences, self.lengths.tolist(), strict=True)
        if self.is_decode:
            return int32([sequence.tokens[end - 1] for sequence, end in ends])
        shares = zip(ends, self.num_tokens, strict=True)
        chunks = [sequence.tokens[end - n : end] for (sequence, end), n in shares]
        return np.frombuffer(b"".join(chunks), np.int32)

    @cached_property
    def wants_logprobs(self) -> bool:
        """Some sequence wants the most likely tokens reported."""
        reported = [sequence for sequence in self.sequences if sequence.is_reported]
        return any(sequence.request.logprobs is not None for sequence in reported)

    @property
    def seen(self) -> dict[int, NDArray[np.uint8]]:
        """The tokens that a sequence has seen (`Sequence.seen`), by its place in the step."""
        return {i: s.seen for i, s in enumerate(self.sequences) if s.seen is not None}


class Scheduler:
    """Queues of sequences, and the choice of each step.

    Attributes:
      waiting: not started, or preempted.
      running: have a row, in order of admission.
      num_preemptions: how often a sequence gave up its row.
    """

    def __init__(
        self,
        tables: PageTables,
        index: PrefixIndex | None,
        dropper: TokenDropper,
        *,
        max_sequences: int,
        token_budget: int,
        scheduling: str = "lpm",
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._tables = tables
        self._index = index
        self._dropper = dropper
        self._max_sequences = max_sequences
        self._token_budget = token_budget
        self._clock = clock
        self.waiting = WaitingQueue(scheduling, self._cached_tokens)
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._cached: dict[Sequence, tuple[int, int]] = {}  # version of the index, tokens

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, whatever its state; what it computed stays cached."""
        self.waiting.remove(sequence)
        self._cached.pop(sequence, None)
        if sequence.row is not None:
            self._stop(sequence)

    def plan(self) -> StepPlan | None:
        """Chooses the next step, taking pages for it; None when there is nothing to compute."""
        draft = _Draft(self._token_budget)
        num_preemptions = self.num_preemptions
        ready = [sequence for sequence in self.running if not sequence.paused]
        decoding = [sequence for sequence in ready if sequence.num_uncomputed == 1]
        self._add_decoding(draft, decoding[: draft.budget])
        for sequence in [sequence for sequence in ready if sequence.num_uncomputed > 1]:
            if sequence.row is not None and draft.budget:
                num_tokens = sequence.share(draft.budget)
                draft.add(sequence, num_tokens)
                self._make_room(sequence, sequence.num_computed + num_tokens, draft)
        if self.num_preemptions == num_preemptions:  # whoever had to go would only come back
            self._admit(draft)
        if not draft.shares and self.waiting:  # for the rows and pages of those that are paused
            for sequence in [s for s in self.running if s.paused]:
                self._preempt(sequence, draft)
            self._admit(draft)
        return self._finished(draft)

    def advance(self, plan: StepPlan) -> None:
        """Books a step that has run: its tokens are computed, and prompts' pages are known."""
        for sequence, num_tokens in zip(plan.sequences, plan.num_tokens, strict=True):
            sequence.num_uncomputed -= num_tokens
            if sequence.in_prompt:
                self._advance_prompt(sequence)
        if self._tables.sliding:
            self._tables.trim(plan.rows, plan.lengths)

    def _advance_prompt(self, sequence: Sequence) -> None:
        done = sequence.num_computed
        sequence.in_prompt = done < sequence.num_prompt
        # The last page of a prompt or context too: who reads it does not read what comes behind.
        goes_on = sequence.in_prompt and done != sequence.shorten_at
        self._publish(sequence, done - done % self._page_size if goes_on else done)

    @property
    def _page_size(self) -> int:
        return self._tables.page_size

    def _add_decoding(self, draft: "_Draft", decoding: list[Sequence]) -> None:
        if not decoding:
            return
        draft.shares = dict.fromkeys(decoding, 1)
        draft.budget -= len(decoding)
        rows = [sequence.row for sequence in decoding if sequence.row is not None]
        lengths = [len(sequence.tokens) for sequence in decoding]
        for place in self._tables.grow_lacking(rows, lengths):
            sequence = decoding[place]
            if sequence.row is not None:  # not preempted for the sake of an earlier one
                self._make_room(sequence, len(sequence.tokens), draft)

    def shorten(self, sequence: Sequence, lens: Mapping[int, int]) -> bool:
        """Gives a running sequence pages for fewer tokens, preempting those that count less, or
        itself.

        Args:
          sequence: with all its tokens computed up to where some are dropped.
          lens: by layer group, how many are left.

        Returns:
          Whether it has them; not where it was preempted.

        Raises:
          OutOfPages: it runs alone, and still there are too few: nobody will give any.
        """
        while sequence.row is not None:
            try:
                self._dropper.drop(sequence.row, sequence.num_computed, lens)
                return True
            except OutOfPages:
                if len(self.running) == 1:
                    raise
                self._preempt_least(_Draft(0))
        return False

    def _make_room(self, sequence: Sequence, num_tokens: int, draft: "_Draft") -> None:
        """Grows a running sequence, preempting those that count less, or itself."""
        while sequence.row is not None:
            try:
                self._tables.grow(sequence.row, num_tokens)
                return
            except OutOfPages:
                self._preempt_least(draft)

    def _preempt_least(self, draft: "_Draft") -> None:
        least = min(enumerate(self.running), key=lambda pair: (pair[1].request.priority, -pair[0]))
        self._preempt(least[1], draft)

    def _preempt(self, sequence: Sequence, draft: "_Draft") -> None:
        draft.drop(sequence)
        self._stop(sequence)
        self.waiting.put_back(sequence)
        self.num_preemptions += 1

    def _admit(self, draft: "_Draft") -> None:
        if not self.waiting or len(self.running) >= self._max_sequences:
            return
        for sequence in self.waiting.in_order():
            if not draft.budget or len(self.running) >= self._max_sequences:
                return
            if not self._must_wait(sequence) and not self._start(sequence, draft):
                break

    def _start(self, sequence: Sequence, draft: "_Draft") -> bool:
        """Gives a waiting sequence a row and its share of the step; False where pages lack."""
        self._fill_row(sequence)
        assert sequence.row is not None
        num_tokens = sequence.share(draft.budget)
        try:
            self._tables.grow(sequence.row, sequence.num_computed + num_tokens)
        except OutOfPages:
            self._close(sequence)
            return False
        self.waiting.admit(sequence)
        self._cached.pop(sequence, None)
        sequence.fork_of = None
        if sequence.completion.queue_seconds is None:
            sequence.completion.queue_seconds = self._clock() - sequence.submitted
            sequence.completion.cached_tokens = sequence.num_computed
        self.running.append(sequence)
        draft.started.append(sequence)
        draft.add(sequence, num_tokens)
        return True

    def _fill_row(self, sequence: Sequence) -> None:
        """Opens a row with as much of a sequence as is computed already, but for its last token."""
        tables, parent, most = self._tables, sequence.fork_of, sequence.num_findable
        if parent is not None and parent.row is not None:
            at = min(sequence.fork_at, most)
            if tables.can_fork(parent.row, at):
                row, sources = tables.fork(parent.row, at)
                sequence.start(row, at, sources)
                return
        row, found, sources = tables.open(), 0, ()
        if sequence.resumable is not None and self._resume(sequence, row, sequence.resumable):
            return
        if sequence.reads_cache:
            packed, priority = sequence.packed(most), sequence.request.priority
            found, sources = tables.match(row, packed, sequence.namespace, priority=priority)
        sequence.start(row, found, sources)

    def _resume(self, sequence: Sequence, row: int, key: SnapshotKey) -> bool:
        """Starts a sequence behind its context, from what another one has left of it."""
        found = self._dropper.match(row, key, priority=sequence.request.priority)
        if found is None:
            return False
        sequence.start(row, sequence.context, found[1])
        sequence.shortened(found[0].kept)
        return True

    def _must_wait(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to compute what this one could share, or it is
        paused."""
        if sequence.paused:
            return True
        parent = sequence.fork_of
        if parent is not None and not parent.is_finished:
            if parent.row is None and not parent.was_preempted:
                return True
            # A page that this plan fills by a copy can't be copied from in the same plan.
            if parent.row is not None and (
                parent.num_computed < sequence.fork_at or parent.sources
            ):
                return True
        if self._index is None or not sequence.reads_cache:
            return False
        most = sequence.num_findable
        packed, cached = sequence.packed(most), self._cached_tokens(sequence)
        for other in self.running:
            if not other.in_prompt or other.namespace != sequence.namespace:
                continue
            limit = min(most, other.num_prompt, other.context)
            common = common_length(other.packed(limit), packed, 0, most)
            if common >= cached + self._page_size and other.num_computed < common:
                return True
        return False

    def _cached_tokens(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that are cached; looked up again when the index changes."""
        if self._index is None or not sequence.reads_cache:
            return 0
        counters = self._index.counters
        version = counters.stored_pages + counters.evicted_pages
        known = self._cached.get(sequence)
        if known is None or known[0] != version:
            key = sequence.resumable
            if key is not None and self._dropper.get(key) is not None:
                found = sequence.context
            else:
                packed = sequence.packed(sequence.num_findable)
                found = self._index.probe(packed, sequence.namespace)
            known = version, found
            self._cached[sequence] = known
        return known[1]

    def _publish(self, sequence: Sequence, num_tokens: int) -> None:
        assert sequence.row is not None
        if sequence.kept is not None:  # what is left of it is no prefix
            return
        self._tables.publish(
            sequence.row,
            sequence.packed(num_tokens),
            sequence.namespace,
            priority=sequence.request.priority,
        )

    def _stop(self, sequence: Sequence) -> None:
        """Ends a sequence's run; what its row holds becomes known first."""
        self.running.remove(sequence)
        self._publish(sequence, sequence.num_computed)
        self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        """The one place where a row is given back."""
        assert sequence.row is not None
        self._tables.close(sequence.row)
        sequence.stop()

    def _finished(self, draft: "_Draft") -> StepPlan | None:
        if not draft.shares:
            return None
        copies = []
        for sequence in draft.started:
            for group, source in enumerate(sequence.sources):
                if source and sequence.row is not None:
                    place = self._tables.num_stored(group, sequence.row, sequence.num_computed)
                    page = place // self._page_size
                    target = int(self._tables.pages[group][sequence.row, page])
                    copies.append(PageCopy(group, source, target))
            sequence.sources = ()
        return StepPlan(
            sequences=tuple(draft.shares),
            num_tokens=tuple(draft.shares.values()),
            rows=int32([s.row for s in draft.shares if s.row is not None]),
            lengths=int32([len(s.tokens) - s.num_uncomputed + n for s, n in draft.shares.items()]),
            started=tuple(draft.started),
            copies=tuple(copies),
        )


@dataclass
class _Draft:
    """A plan in the making: the tokens left, and each sequence's share."""

    budget: int
    shares: dict[Sequence, int] = field(default_factory=dict)
    started: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        self.shares[sequence] = num_tokens
        self.budget -= num_tokens

    def drop(self, sequence: Sequence) -> None:
        self.budget += self.shares.pop(sequence, 0)
        if sequence in self.started:
            self.started.remove(sequence)
