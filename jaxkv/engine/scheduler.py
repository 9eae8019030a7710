"""Which tokens of which sequences the next step computes: pure host logic without K or V.

A step has a budget of tokens. Sequences that decode get one token each. The rest of the budget goes
to prompts, in chunks: first to prompts that run already, then to waiting sequences, which start
after the part of their tokens that the prefix index has. A sequence whose next tokens a running one
is about to compute waits and then finds them cached. If the pages run out, the least important
sequence gives up its row and starts again later, from what is still cached of it.

    fcfs      first come, first served
    lpm       longest cached prefix first, so that cached pages are used before they are evicted; a
              sequence that was overtaken AGE_GUARD times goes before all that would overtake it
    priority  highest priority first; equal ones by arrival
"""

import time
from collections.abc import Callable

from jaxkv.engine.sequence import Sequence
from jaxkv.engine.step_plan import Draft, PageCopy, StepPlan, int32
from jaxkv.engine.waiting import WaitingQueue
from jaxkv.prefix import OutOfPages, PageTables, PrefixIndex, common_length

SCHEDULING = ("lpm", "fcfs", "priority")
AGE_GUARD = 16
LOOKAHEAD = 128  # waiting sequences whose cached prefix is looked up; later ones keep their turn


class Scheduler:
    """Queues of sequences, and the choice of each step.

    Attributes:
      waiting: sequences without a row: new ones and preempted ones.
      running: sequences with a row, in order of admission.
      num_preemptions: how often a sequence gave up its row.
    """

    def __init__(
        self,
        tables: PageTables,
        index: PrefixIndex | None,
        *,
        max_sequences: int,
        token_budget: int,
        scheduling: str = "lpm",
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Makes empty queues.

        Args:
          tables: the page tables, all rows closed.
          index: index of cached prefixes; None to share none.
          max_sequences: most rows in use at once.
          token_budget: most query tokens in a step.
          scheduling: which waiting sequence starts first, of SCHEDULING.
          clock: seconds.
        """
        self._tables = tables
        self._index = index
        self._max_sequences = max_sequences
        self._token_budget = token_budget
        self._scheduling = scheduling
        self._clock = clock
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._cached: dict[Sequence, tuple[int, int]] = {}  # version of the index, tokens

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out in any state. What it computed stays cached."""
        self.waiting.remove(sequence)
        self._cached.pop(sequence, None)
        if sequence.row is not None:
            self._stop(sequence)

    def plan(self) -> StepPlan | None:
        """Chooses the next step and takes pages for it; None if there is nothing to compute."""
        draft = Draft(self._token_budget)
        num_preemptions = self.num_preemptions
        self._add_decoding(draft)
        self._add_prompts(draft)
        if self.num_preemptions == num_preemptions:  # else a preempted one would only come back
            self._admit_waiting(draft)
        if not draft.shares and self.waiting:
            self._preempt_paused()
            self._admit_waiting(draft)
        return self._finish(draft)

    def advance(self, plan: StepPlan) -> None:
        """Books a step that has run: its tokens are computed, and prompts enter the index."""
        for sequence, num_tokens in zip(plan.sequences, plan.num_tokens, strict=True):
            sequence.num_uncomputed -= num_tokens
            if sequence.in_prompt:
                self._advance_prompt(sequence)
        if self._tables.sliding:
            self._tables.trim(plan.rows, plan.lengths)

    def preempt_least(self) -> Sequence:
        """Takes the row from the running sequence of lowest priority that came last."""
        least = min(enumerate(self.running), key=lambda pair: (pair[1].request.priority, -pair[0]))
        self.preempt(least[1])
        return least[1]

    def preempt(self, sequence: Sequence) -> None:
        """Takes the row from a running sequence and queues it again, before all new ones."""
        self._stop(sequence)
        self.waiting.put_back(sequence)
        self.num_preemptions += 1

    def waiting_in_order(self) -> list[Sequence]:
        """The waiting sequences in the order in which they may start."""
        new = self.waiting.new
        if self._scheduling == "priority":
            new.sort(key=lambda sequence: -sequence.request.priority)
        elif self._scheduling == "lpm" and len(new) > 1:
            new[:LOOKAHEAD] = sorted(new[:LOOKAHEAD], key=self._rank)
        return [*self.waiting.preempted, *new]

    def _rank(self, sequence: Sequence) -> tuple[bool, int]:
        arrival = self.waiting.arrival(sequence)
        is_young = self.waiting.num_admitted - arrival < AGE_GUARD
        return is_young, -self._cached_tokens(sequence) if is_young else arrival

    def _add_decoding(self, draft: Draft) -> None:
        ready = [s for s in self.running if s.num_uncomputed == 1 and not s.paused]
        decoding = ready[: draft.budget]
        if not decoding:
            return
        draft.shares = dict.fromkeys(decoding, 1)
        draft.budget -= len(decoding)
        rows = [sequence.row for sequence in decoding if sequence.row is not None]
        lengths = [len(sequence.tokens) for sequence in decoding]
        for place in self._tables.grow_lacking(rows, lengths):
            self._make_room(decoding[place], len(decoding[place].tokens), draft)

    def _add_prompts(self, draft: Draft) -> None:
        for sequence in [s for s in self.running if s.num_uncomputed > 1 and not s.paused]:
            if sequence.row is not None and draft.budget:
                num_tokens = sequence.share(draft.budget)
                draft.add(sequence, num_tokens)
                self._make_room(sequence, sequence.num_computed + num_tokens, draft)

    def _make_room(self, sequence: Sequence, num_tokens: int, draft: Draft) -> None:
        """Gives a running sequence pages for its first tokens. Until there are enough, it preempts
        other sequences or this one."""
        while sequence.row is not None:
            try:
                self._tables.grow(sequence.row, num_tokens)
                return
            except OutOfPages:
                draft.remove(self.preempt_least())

    def _admit_waiting(self, draft: Draft) -> None:
        if not self.waiting or len(self.running) >= self._max_sequences:
            return
        for sequence in self.waiting_in_order():
            if not draft.budget or len(self.running) >= self._max_sequences:
                return
            if not self._must_wait(sequence, draft) and not self._start(sequence, draft):
                return

    def _preempt_paused(self) -> None:
        """Frees the rows and pages of paused sequences: otherwise nothing could run."""
        for sequence in [s for s in self.running if s.paused]:
            self.preempt(sequence)

    def _start(self, sequence: Sequence, draft: Draft) -> bool:
        """Gives a waiting sequence a row and a share of the step; False if the pages run out."""
        row, num_found, sources = self._open_row(sequence)
        sequence.start(row, num_found)
        num_tokens = sequence.share(draft.budget)
        try:
            self._tables.grow(row, num_found + num_tokens)
        except OutOfPages:
            self._close(sequence)
            return False
        self.waiting.admit(sequence)
        self._cached.pop(sequence, None)
        sequence.fork = None
        if sequence.completion.queue_seconds is None:
            sequence.completion.queue_seconds = self._clock() - sequence.submitted
            sequence.completion.cached_tokens = num_found
        self.running.append(sequence)
        draft.sources[sequence] = sources
        draft.add(sequence, num_tokens)
        return True

    def _open_row(self, sequence: Sequence) -> tuple[int, int, tuple[int, ...]]:
        """Opens a row with as many of a sequence's tokens as are computed already.

        Returns:
          The row, how many tokens it has, and for each layer group the page to copy onto its next
          one; 0 for none.
        """
        tables, most = self._tables, sequence.num_findable
        if sequence.fork is not None and (parent := sequence.fork.parent).row is not None:
            num_tokens = min(sequence.fork.num_tokens, most)
            if tables.can_fork(parent.row, num_tokens):
                row, sources = tables.fork(parent.row, num_tokens)
                return row, num_tokens, sources
        row = tables.open()
        drop, wanted = sequence.drop, sequence.first_wanted
        if drop is not None and (found := drop.resume(row, wanted)) is not None:
            return row, *found
        if not sequence.reads_cache:
            return row, 0, ()
        packed, priority = sequence.packed(most), sequence.request.priority
        return row, *tables.match(row, packed, sequence.namespace, priority=priority)

    def _must_wait(self, sequence: Sequence, draft: Draft) -> bool:
        return (
            sequence.paused
            or self._waits_for_parent(sequence, draft)
            or self._waits_for_prefix(sequence)
        )

    def _waits_for_parent(self, sequence: Sequence, draft: Draft) -> bool:
        """Whether the pages that it shares with the parent of its fork are yet to be written."""
        if sequence.fork is None or sequence.fork.parent.is_finished:
            return False
        parent, num_tokens = sequence.fork
        if parent.row is None:
            return not parent.was_preempted  # a preempted parent has no pages to share any more
        # A page that this plan fills by a copy is no source of another copy in the same plan.
        is_filled_by_copy = bool(draft.sources.get(parent))
        return parent.num_computed < num_tokens or is_filled_by_copy

    def _waits_for_prefix(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to compute at least a page that it could share."""
        if self._index is None or not sequence.reads_cache:
            return False
        most = sequence.num_findable
        packed, cached = sequence.packed(most), self._cached_tokens(sequence)
        for other in self.running:
            if not other.in_prompt or other.namespace != sequence.namespace:
                continue
            common = common_length(other.packed(min(most, other.num_shareable)), packed, 0, most)
            if common >= cached + self._tables.page_size and other.num_computed < common:
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
            drop = sequence.drop
            num_tokens = 0 if drop is None else drop.cached_tokens(sequence.first_wanted)
            if not num_tokens:
                packed = sequence.packed(sequence.num_findable)
                num_tokens = self._index.probe(packed, sequence.namespace)
            known = self._cached[sequence] = version, num_tokens
        return known[1]

    def _advance_prompt(self, sequence: Sequence) -> None:
        done = sequence.num_computed
        sequence.in_prompt = done < sequence.num_prompt
        # The last page of a prompt or context is published before it is full: a sequence that
        # copies it reads no slot after the published tokens.
        goes_on = sequence.in_prompt and (sequence.drop is None or done != sequence.drop.next_at)
        self._publish(sequence, done - done % self._tables.page_size if goes_on else done)

    def _publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Makes the first tokens of a running sequence known to the index."""
        assert sequence.row is not None
        if sequence.drop is not None and sequence.drop.has_dropped:  # what is left is no prefix
            return
        packed, priority = sequence.packed(num_tokens), sequence.request.priority
        self._tables.publish(sequence.row, packed, sequence.namespace, priority=priority)

    def _stop(self, sequence: Sequence) -> None:
        """Ends a sequence's run; what its row holds enters the index first."""
        self.running.remove(sequence)
        self._publish(sequence, sequence.num_computed)
        self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        """The one place where a row is given back."""
        assert sequence.row is not None
        self._tables.close(sequence.row)
        sequence.stop()

    def _finish(self, draft: Draft) -> StepPlan | None:
        if not draft.shares:
            return None
        return StepPlan(
            sequences=tuple(draft.shares),
            num_tokens=tuple(draft.shares.values()),
            rows=int32([s.row for s in draft.shares if s.row is not None]),
            lengths=int32([len(s.tokens) - s.num_uncomputed + n for s, n in draft.shares.items()]),
            started=tuple(draft.sources),
            copies=tuple(self._copies(draft)),
        )

    def _copies(self, draft: Draft) -> list[PageCopy]:
        copies = []
        for sequence, sources in draft.sources.items():
            for group, source in enumerate(sources):
                if source and sequence.row is not None:
                    stored = self._tables.num_stored(group, sequence.row, sequence.num_computed)
                    page = stored // self._tables.page_size
                    target = int(self._tables.pages[group][sequence.row, page])
                    copies.append(PageCopy(group, source, target))
        return copies
