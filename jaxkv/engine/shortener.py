"""Dropping tokens of running sequences, each when its time comes.

A sequence loses tokens when its context is computed, and then after every so many tokens more where
the engine is asked to. When that is follows from its length alone, so that a sequence which had to
start again loses the same ones. Not here: which tokens (`jaxkv.compress`).
"""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from jaxkv.cache import KVCache
from jaxkv.compress import Compression
from jaxkv.compress.compressor import Compressor
from jaxkv.compress.kept import Kept, Row, num_protected
from jaxkv.engine.request import Request, RequestError
from jaxkv.engine.scheduler import PageCopy, Scheduler
from jaxkv.engine.sequence import NEVER, Sequence
from jaxkv.prefix import OutOfPages, PrefixIndex, ShortenedTables, SnapshotKey


class Shortener:
    """Drops tokens of an engine's sequences."""

    def __init__(
        self,
        compression: Compression,
        compressor: Compressor,
        scheduler: Scheduler,
        tables: ShortenedTables,
        index: PrefixIndex | None,
        copy: Callable[[KVCache, list[PageCopy]], KVCache],
    ):
        """Takes an engine's parts; `copy` copies pages in the cache, which it is donated."""
        self._compression = compression
        self._compressor = compressor
        self._scheduler = scheduler
        self._tables = tables
        self._index = index
        self._copy = copy
        self._query_aware = compression.score_method().query_aware

    def check(self, request: Request) -> None:
        """Raises RequestError where more of a request is protected than the budget keeps."""
        context = request.context or len(request.prompt)
        protected, keep = num_protected(request.protect), self._compression.budget.keep(context)
        if protected > keep:
            raise RequestError(
                f"protect has {protected} tokens; the budget {self._compression.budget} keeps "
                f"{keep} of {context}"
            )

    def prepare(self, sequence: Sequence) -> None:
        """Tells a new sequence when it loses tokens, and with whom it shares what is left: with
        those of the same context, and where queries have a say, of the same prompt."""
        request = sequence.request
        sequence.context = sequence.shorten_at = request.context or sequence.num_prompt
        sequence.interval = self._compression.interval or NEVER
        if self._index is not None:
            namespace = dataclasses.replace(
                sequence.namespace,
                method=self._compression,
                dropped_at=sequence.context,
                protect=request.protect,
            )
            n = sequence.num_prompt if self._query_aware else sequence.context
            sequence.snapshot_key = SnapshotKey(sequence.packed(n), namespace)

    def shorten(
        self, cache: KVCache, sequences: Iterable[Sequence]
    ) -> tuple[KVCache, list[Sequence]]:
        """Drops tokens of those sequences whose time has come; `cache` is donated.

        Returns:
          The new cache, and the sequences that cannot go on, for want of pages.
        """
        stuck = []
        for sequence in sequences:
            if sequence.row is not None and sequence.num_computed == sequence.shorten_at:
                try:
                    cache = self._shorten(cache, sequence)
                except OutOfPages as error:
                    sequence.completion.error = f"no pages for what is left of it: {error}"
                    stuck.append(sequence)
        return cache, stuck

    def _shorten(self, cache: KVCache, sequence: Sequence) -> KVCache:
        n, request, row = sequence.num_computed, sequence.request, self._row(sequence)
        kept = self._known(sequence) or self._compressor.choose(
            cache,
            row,
            sequence.tokens[:n],
            self._compression.budget,
            protect=request.protect,
            since=sequence.shortened_at,
            before=sequence.kept,
        )
        if kept is None:
            sequence.shortened(None)
            return cache
        if not self._scheduler.shorten(sequence, self._compressor.lens(kept)):
            return cache
        target = np.stack([table[sequence.row] for table in self._tables.pages])
        cache = self._compressor.move(cache, kept, row, target)
        if self._compression.interval is None:  # no later choice needs the statistics
            kept = kept._replace(statistics=())
        sequence.shortened(kept)
        return self._publish(cache, sequence) if n == sequence.context else cache

    def _known(self, sequence: Sequence) -> Kept | None:
        """What another sequence has kept of the same context."""
        key = sequence.snapshot_key
        if self._index is None or key is None or sequence.num_computed != sequence.context:
            return None
        snapshot = self._index.snapshots.get(key)
        return None if snapshot is None else snapshot.kept

    def _publish(self, cache: KVCache, sequence: Sequence) -> KVCache:
        """Shares what is left of a context; nothing is lost where there are no pages for it."""
        key, row, tables = sequence.snapshot_key, sequence.row, self._tables
        if key is None or row is None or tables.share_snapshot(row, key):
            return cache
        windows = tables.pages_for_windows(row)
        if windows is None:
            return cache
        copies = [PageCopy(g, *pair) for g, pages in windows.items() for pair in pages.items()]
        cache = self._copy(cache, copies)
        n, priority = sequence.num_computed, sequence.request.priority
        tables.publish_snapshot(row, n, key, sequence.kept, windows, priority=priority)
        return cache

    def _row(self, sequence: Sequence) -> Row:
        assert self._tables.dropped is not None
        return Row(
            tables=np.stack([table[sequence.row] for table in self._tables.pages]),
            dropped=self._tables.dropped[:, sequence.row].copy(),
            num_tokens=np.int32(sequence.num_computed),
        )
