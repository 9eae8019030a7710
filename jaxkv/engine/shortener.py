"""Dropping tokens of running sequences, each when its time comes.

A sequence loses tokens when its context is computed, and then after every so many tokens more where
the engine is asked to. When that is follows from its length alone, so that a sequence which had to
start again loses the same ones. Not here: which tokens (`jaxkv.compress`).
"""

from collections.abc import Iterable

import numpy as np

from jaxkv.cache import KVCache
from jaxkv.compress import Compression, Compressor, Row
from jaxkv.engine.request import Request, RequestError
from jaxkv.engine.scheduler import Scheduler
from jaxkv.engine.sequence import NEVER, Sequence
from jaxkv.prefix import OutOfPages, PageTables


class Shortener:
    """Drops tokens of an engine's sequences."""

    def __init__(
        self,
        compression: Compression,
        compressor: Compressor,
        scheduler: Scheduler,
        tables: PageTables,
    ):
        """Takes an engine's parts."""
        self._compression = compression
        self._compressor = compressor
        self._scheduler = scheduler
        self._tables = tables

    def check(self, request: Request) -> None:
        """Raises RequestError where more of a request is protected than the budget keeps."""
        context = request.context or len(request.prompt)
        protected = {token for start, end in request.protect for token in range(start, end)}
        keep = self._compression.budget.keep(context)
        if len(protected) > keep:
            raise RequestError(
                f"protect has {len(protected)} tokens; the budget {self._compression.budget} keeps "
                f"{keep} of {context}"
            )

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
        n, request = sequence.num_computed, sequence.request
        keep = self._compression.budget.keep(n)
        row = self._row(sequence)
        groups = [g for layer in self._compressor.layers for g in cache.groups_of(layer)]
        if keep < n - row.dropped[groups].mean():
            kept = self._compressor.choose(
                cache,
                row,
                sequence.tokens[:n],
                keep,
                spans=request.protect,
                since=sequence.shortened_at,
                before=sequence.kept,
            )
            lens = kept.lens(cache, self._compressor.layers)
            if not self._scheduler.shorten(sequence, lens):
                return cache
            target = np.stack([table[sequence.row] for table in self._tables.pages])
            cache = self._compressor.move(cache, kept, row, target)
            if self._compression.interval is None:  # there is no later choice
                kept = kept._replace(seen=())
            sequence.kept, sequence.shortened_at = kept, n
            sequence.completion.dropped_tokens = n - float(kept.counts.mean())
        interval = self._compression.interval
        sequence.shorten_at = NEVER if interval is None else n + interval
        return cache

    def _row(self, sequence: Sequence) -> Row:
        assert self._tables.dropped is not None
        return Row(
            tables=np.stack([table[sequence.row] for table in self._tables.pages]),
            dropped=self._tables.dropped[:, sequence.row].copy(),
            num_tokens=np.int32(sequence.num_computed),
        )
