"""Dropping tokens of running sequences, between two steps.

A sequence loses tokens when its context is computed and then, if the engine has an interval, each
time that so many more are there. This depends only on its length, so a sequence that starts again
after a preemption loses the same tokens. Which tokens are dropped is decided in `jaxkv.compress`.
"""

from collections.abc import Iterable

import numpy as np

from jaxkv.compress import Compression
from jaxkv.compress.kept import Row
from jaxkv.engine.drop_state import NEVER, DropState
from jaxkv.engine.runner import StepRunner
from jaxkv.engine.scheduler import Scheduler
from jaxkv.engine.sequence import Sequence
from jaxkv.engine.step_plan import PageCopy
from jaxkv.prefix import OutOfPages, PageTables, SnapshotKey, TokenDropper


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
            completion=sequence.completion,
            priority=request.priority,
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
            drop.book(n, None)
            return
        if not self._take_pages(sequence, self._compressor.lens(kept)):
            return
        target = np.stack([table[sequence.row] for table in self._tables.pages])
        self._runner.cache = self._compressor.move(cache, kept, row, target)
        if self._compression.interval is None:  # no later choice needs the statistics
            kept = kept._replace(statistics=())
        drop.book(n, kept)
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
        n = sequence.num_computed
        dropper.publish(row, n, key, drop.kept, windows, priority=drop.priority)

    def _row(self, sequence: Sequence) -> Row:
        return Row(
            tables=np.stack([table[sequence.row] for table in self._tables.pages]),
            dropped=self._tables.dropped[:, sequence.row].copy(),
            num_tokens=np.int32(sequence.num_computed),
        )
