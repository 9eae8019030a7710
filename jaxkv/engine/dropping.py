"""Dropping tokens of running sequences, between two steps.

A sequence loses tokens when its context is computed and then, if the engine has an interval, each
time that so many more are there. This depends only on its length, so a sequence that starts again
after a preemption loses the same tokens. Which tokens are dropped is decided in `jaxkv.compress`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from jaxkv.compress import Compression
from jaxkv.compress.kept import Kept, Row
from jaxkv.engine.runner import StepRunner
from jaxkv.engine.scheduler import Scheduler
from jaxkv.engine.sequence import Sequence
from jaxkv.engine.step_plan import PageCopy
from jaxkv.prefix import OutOfPages, PageTables, Snapshot, SnapshotKey, TokenDropper

NEVER = 1 << 60  # more tokens than a sequence has


@dataclass(slots=True, kw_only=True)
class DropState:
    """Which tokens of one sequence are dropped, and when.

    Attributes:
      dropper: has the snapshots.
      context: how many of its first tokens lose some, once all of them are computed.
      interval: after how many further tokens more are dropped; NEVER to drop once.
      snapshot_key: names the snapshot with what is left of the context.
      next_at: number of computed tokens at which tokens are dropped next.
      last_at: the same for the last time; 0 before.
      kept: the tokens that were kept then; None while all are there.
    """

    dropper: TokenDropper
    context: int
    interval: int
    snapshot_key: SnapshotKey
    next_at: int = field(init=False)
    last_at: int = field(init=False)
    kept: Kept | None = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """The sequence has given up its row: it computes its tokens again, and drops them again."""
        self.next_at, self.last_at, self.kept = self.context, 0, None

    @property
    def has_dropped(self) -> bool:
        """The row holds only some of the computed tokens."""
        return self.kept is not None

    def limit(self, num_computed: int, num_tokens: int) -> int:
        """How many of the next tokens may be computed before some are dropped."""
        return min(num_tokens, self.next_at - num_computed)

    def cached_tokens(self, sequence: Sequence) -> int:
        """The whole context if the sequence can start from a snapshot of it, else 0."""
        return self.context if self._snapshot(sequence) is not None else 0

    def resume(self, sequence: Sequence, row: int) -> tuple[int, tuple[int, ...]] | None:
        """Fills an empty row with what another sequence has left of the same context.

        Returns:
          How many tokens are computed then, and for each layer group the page to copy onto the
          row's next one, 0 for none. None if there is no such snapshot.
        """
        if self._snapshot(sequence) is None:
            return None
        priority = sequence.request.priority
        found = self.dropper.match(row, self.snapshot_key, priority=priority)
        assert found is not None
        self.book(sequence, self.context, found[0].kept)
        return self.context, found[1]

    def book(self, sequence: Sequence, num_tokens: int, kept: Kept | None) -> None:
        """Books that of `num_tokens` computed tokens only `kept` are left; None if all are."""
        if kept is not None:
            self.kept, self.last_at = kept, num_tokens
            sequence.completion.dropped_tokens = num_tokens - float(np.asarray(kept.counts).mean())
        self.next_at = num_tokens + self.interval

    def snapshot(self) -> Snapshot | None:
        """What is left of the context of another sequence with the same key."""
        return self.dropper.get(self.snapshot_key)

    def _snapshot(self, sequence: Sequence) -> Snapshot | None:
        """The snapshot, if the sequence needs no logits at a token of the context."""
        return self.snapshot() if sequence.first_wanted > self.context else None


class DropStage:
    """Drops tokens of an engine's sequences after each step.

    Attributes:
      budget: how many tokens of a context are kept.
    """

    def __init__(
        self,
        compression: Compression,
        runner: StepRunner,
        scheduler: Scheduler,
        tables: PageTables,
        dropper: TokenDropper,
    ):
        """Takes the parts of an engine.

        Args:
          compression: with a score method.
          runner: has the cache.
          scheduler: preempts sequences if pages run out.
          tables: the page tables.
          dropper: exchanges the pages of their rows, and has the snapshots.
        """
        self.budget = compression.budget
        self._compression = compression
        method = compression.score_method()
        self._compressor = runner.steps.compressor(method, runner.cache)
        self._is_query_aware = method.query_aware
        self._runner, self._scheduler = runner, scheduler
        self._tables, self._dropper = tables, dropper

    def prepare(self, sequence: Sequence) -> None:
        """Tells a new sequence when it loses tokens. It shares what is left with sequences of the
        same context or, if queries influence the choice, of the same prompt."""
        request = sequence.request
        context = request.context or sequence.num_prompt
        num_compared = sequence.num_prompt if self._is_query_aware else context
        sequence.drop = DropState(
            dropper=self._dropper,
            context=context,
            interval=self._compression.interval or NEVER,
            snapshot_key=SnapshotKey(
                sequence.packed(num_compared),
                sequence.namespace,
                method=self._compression,
                dropped_at=context,
                protect=tuple(request.protect),
            ),
        )

    def after_step(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Drops tokens of those sequences of a step that have reached the length for it.

        Returns:
          The sequences that cannot go on because pages have run out.
        """
        failed = []
        for sequence in sequences:
            drop = sequence.drop
            if sequence.row is None or drop is None or sequence.num_computed != drop.next_at:
                continue
            try:
                self._drop(sequence, drop)
            except OutOfPages as error:
                sequence.completion.error = f"no pages for what is left of it: {error}"
                failed.append(sequence)
        return failed

    def _drop(self, sequence: Sequence, drop: DropState) -> None:
        n, row, cache = sequence.num_computed, self._row(sequence), self._runner.cache
        snapshot = drop.snapshot() if n == drop.context else None
        if snapshot is not None:
            kept = snapshot.kept
        else:
            kept = self._compressor.choose(
                cache,
                row,
                sequence.tokens[:n],
                self.budget,
                protect=sequence.request.protect,
                since=drop.last_at,
                before=drop.kept,
            )
        if kept is None:
            drop.book(sequence, n, None)
            return
        if not self._take_pages(sequence, self._compressor.lens(kept)):
            return
        target = np.stack([table[sequence.row] for table in self._tables.pages])
        self._runner.cache = self._compressor.move(cache, kept, row, target)
        if self._compression.interval is None:  # no later choice needs the statistics
            kept = kept._replace(statistics=())
        drop.book(sequence, n, kept)
        if n == drop.context:
            self._publish(sequence, drop)

    def _take_pages(self, sequence: Sequence, lens: dict[int, int]) -> bool:
        """Exchanges a sequence's pages for those that fewer tokens need, and preempts sequences
        until there are enough.

        Returns:
          False if the sequence itself was preempted.

        Raises:
          OutOfPages: no other sequence runs, and there are still too few.
        """
        while sequence.row is not None:
            try:
                self._dropper.drop(sequence.row, sequence.num_computed, lens)
                return True
            except OutOfPages:
                if len(self._scheduler.running) == 1:
                    raise
                self._scheduler.preempt_least()
        return False

    def _publish(self, sequence: Sequence, drop: DropState) -> None:
        """Makes what is left of a context a snapshot for other sequences; if pages are lacking,
        nothing is shared."""
        key, row, dropper = drop.snapshot_key, sequence.row, self._dropper
        if dropper.snapshots is None or row is None or dropper.share(row, key):
            return
        windows = dropper.copies_for_windows(row)
        if windows is None:
            return
        self._runner.copy(
            PageCopy(g, *ids) for g, pages in windows.items() for ids in pages.items()
        )
        n, priority = sequence.num_computed, sequence.request.priority
        dropper.publish(row, n, key, drop.kept, windows, priority=priority)

    def _row(self, sequence: Sequence) -> Row:
        return Row(
            tables=np.stack([table[sequence.row] for table in self._tables.pages]),
            dropped=self._tables.dropped[:, sequence.row].copy(),
            num_tokens=np.int32(sequence.num_computed),
        )
