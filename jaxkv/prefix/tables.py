"""The page tables of running sequences: which page holds which tokens of which sequence.

One row a sequence in each layer group, in arrays that a step can take rows of. A row's life:

    open      an empty row
    match     its first pages are those that the index has of its prompt
    grow      pages for more tokens; cached ones are evicted where the free ones run out
              (`grow_lacking` for a batch)
    publish   its pages become known to the index
    trim      a sliding group's pages behind the window go back
    close     everything goes back; the one release point of a sequence

Not here: when a sequence does any of this (`jaxkv.engine`).
"""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxkv.prefix.index import PrefixIndex
from jaxkv.prefix.node import TOKEN, Namespace
from jaxkv.prefix.pins import Pins
from jaxkv.prefix.pool import OutOfPages, PagePool

Rows = NDArray[np.integer]
Lengths = NDArray[np.integer]


class PageTables:
    """Rows of page ids for up to R sequences.

    Attributes:
      pools: of each layer group.
      pages: in each group `[R, M]` int32, to be read; 0 where a row holds no page.
      num_pages: `[R]`, logical pages up to a row's last; earlier ones of a sliding group may be
        gone.
      dropped: None: rows lose no tokens but behind windows. See `ShortenedTables`.
    """

    def __init__(
        self,
        pools: Sequence[PagePool],
        page_size: int,
        *,
        max_sequences: int,
        max_pages: int,
        windows: Sequence[int | None] | None = None,
        sink_pages: Sequence[int] | None = None,
        index: PrefixIndex | None = None,
        pins: Pins | None = None,
    ):
        """Makes R = `max_sequences` closed rows of M = `max_pages` entries.

        Args:
          pools: of each layer group.
          page_size: P.
          max_sequences: R.
          max_pages: M.
          windows: of each group; None for a group that sees all. By default all do.
          sink_pages: of each group, pages at the beginning that are kept whatever the window; by
            default none.
          index: shares the pools; None shares no prefixes.
          pins: in the index; those that have expired give way to growth.
        """
        self.pools = tuple(pools)
        self.page_size = page_size
        self.pages = tuple(np.zeros((max_sequences, max_pages), np.int32) for _ in pools)
        self.num_pages = np.zeros(max_sequences, np.int64)
        self.dropped: NDArray[np.int32] | None = None
        self._max_pages = max_pages
        self._index = index
        self._pins = pins
        # What each row holds once more, as lists, in which the books are kept; None where closed.
        self._held: list[list[list[int]] | None] = [None] * max_sequences
        self._windows = {g: window for g, window in enumerate(windows or ()) if window is not None}
        self._sinks = tuple(sink_pages) if sink_pages is not None else (0,) * len(self.pools)
        # Of each row the first page that may be there, the sinks left out.
        self._first = {g: np.zeros(max_sequences, np.int64) for g in self._windows}
        self._closed = list(range(max_sequences - 1, -1, -1))

    @property
    def num_open(self) -> int:
        """Rows in use."""
        return len(self.num_pages) - len(self._closed)

    def open(self) -> int:
        """Takes an empty row.

        Raises:
          ValueError: all rows are in use.
        """
        if not self._closed:
            raise ValueError(f"all {len(self.num_pages)} rows are in use")
        row = self._closed.pop()
        self._held[row] = [[] for _ in self.pools]
        return row

    def match(
        self, row: int, tokens: bytes, namespace: Namespace, *, priority: int = 0
    ) -> tuple[int, tuple[int, ...]]:
        """Fills an empty row with what the index has of a prompt.

        Args:
          row: an open row without pages.
          tokens: packed; without those that are to be computed in any case.
          namespace: of the sequence.
          priority: of its request.

        Returns:
          How many tokens are there, and in each group the page to copy onto the row's next one,
          before any page is written; 0 for nothing to copy. See `Match`.
        """
        held = self._held_by(row)
        if self._index is None:
            return 0, (0,) * len(self.pools)
        match = self._index.match(tokens, namespace, priority=priority)
        self._fill(row, match.pages)
        self.num_pages[row] = len(held[0])
        return match.num_tokens, match.sources

    def grow_lacking(self, rows: Sequence[int], num_tokens: Sequence[int]) -> list[int]:
        """Gives a page to each row that lacks a slot for its next token, to all or to none.

        A decode step's way: at once what `grow` does row by row.

        Args:
          rows: open rows.
          num_tokens: of each row, its tokens, the next one included.

        Returns:
          Places in `rows` that lack a slot still: none of them, or all where pages run out.
        """
        P, held = self.page_size, [self._held[row] or self._held_by(row) for row in rows]
        places = zip(held, num_tokens, strict=True)
        lacking = [i for i, (groups, n) in enumerate(places) if len(groups[0]) * P < n]
        try:
            for g, pool in enumerate(self.pools):
                if len(lacking) > pool.num_free:
                    self._make_free(g, len(lacking))
        except OutOfPages:
            return lacking
        for g, pool in enumerate(self.pools):
            table = self.pages[g]
            for i, page in zip(lacking, pool.acquire(len(lacking)), strict=True):
                ids = held[i][g]
                table[rows[i], len(ids)] = page
                ids.append(page)
        for i in lacking:
            self.num_pages[rows[i]] += 1
        return []

    def grow(self, row: int, num_tokens: int) -> None:
        """Takes pages until a row has a slot for each of its tokens, in every group or in none.

        Raises:
          OutOfPages: a group has too few pages that are free or cached.
          ValueError: the row is too short for so many tokens.
        """
        held = self._held_by(row)
        before, after = len(held[0]), -(-num_tokens // self.page_size)
        num_new = after - before
        if num_new <= 0:
            return
        if after > self._max_pages:
            raise ValueError(
                f"{num_tokens} tokens need {after} pages; a table row has {self._max_pages}"
            )
        for g, pool in enumerate(self.pools):
            if num_new > pool.num_free:
                self._make_free(g, num_new)
        for g, ids in enumerate(held):
            taken = self.pools[g].acquire(num_new)
            self._show(g, row, before, taken)
            ids += taken
        self.num_pages[row] = after

    def publish(self, row: int, tokens: bytes, namespace: Namespace, *, priority: int = 0) -> None:
        """Makes the pages of a row's first tokens (packed) known to the index.

        Their slots are not written again. The last page may have room for more tokens of the row.
        """
        held = self._held_by(row)
        if self._index is None or not tokens:
            return
        end = -(-len(tokens) // (TOKEN * self.page_size))
        before = [ids[:end] for ids in held]
        after = self._index.insert(tokens, before, namespace, priority=priority)
        for g, ids in enumerate(after):
            if ids is not before[g]:
                held[g][:end] = ids
                self._show(g, row, 0, ids)

    def trim(self, rows: Rows, num_tokens: Lengths) -> None:
        """Gives back what the next token of each row, at position `num_tokens`, no longer sees."""
        for g, window in self._windows.items():
            first = np.maximum(num_tokens - window + 1, 0) // self.page_size
            first = np.minimum(first, self.num_pages[rows])
            for i in np.flatnonzero(first > self._first[g][rows]):
                row, end = int(rows[i]), int(first[i])
                start = min(end, max(self._sinks[g], int(self._first[g][row])))
                ids = self._held_by(row)[g]
                self.pools[g].release(ids[start:end])
                ids[start:end] = [0] * (end - start)
                self.pages[g][row, start:end] = 0
                self._first[g][row] = end

    def num_stored(self, group: int, row: int | None, num_tokens: int) -> int:
        """How many of a row's tokens a group has slots for: all that it has not dropped."""
        return num_tokens if self.dropped is None else num_tokens - int(self.dropped[group, row])

    @property
    def slides(self) -> bool:
        """Some group has a window, so that rows give pages back (`trim`)."""
        return bool(self._windows)

    def can_fork(self, row: int, num_tokens: int) -> bool:
        """Whether a row has all that the token at position `num_tokens` sees."""
        return all(
            self._first[g][row] <= max(0, num_tokens - window + 1) // self.page_size
            for g, window in self._windows.items()
        )

    def fork(self, row: int, num_tokens: int) -> tuple[int, tuple[int, ...]]:
        """Opens a row that shares another one's first tokens.

        Returns:
          The new row, and in each group the page to copy onto the row's next one, before any page
          is written; 0 for nothing to copy.

        Raises:
          ValueError: all rows are in use.
        """
        held = self._held_by(row)
        child = self.open()
        whole, rest = divmod(num_tokens, self.page_size)
        copied = self._held_by(child)
        for g, (pool, table) in enumerate(zip(self.pools, self.pages, strict=True)):
            copied[g] += held[g][:whole]
            table[child, :whole] = table[row, :whole]
            pool.share([page for page in copied[g] if page])
        for first in self._first.values():
            first[child] = min(first[row], whole)
        self.num_pages[child] = whole
        return child, tuple(ids[whole] if rest else 0 for ids in held)

    def close(self, row: int) -> None:
        """Gives a row and all its pages back.

        Raises:
          ValueError: the row is closed.
        """
        held = self._held_by(row)
        for g, ids in enumerate(held):
            self.pools[g].release([page for page in ids if page] if self._windows else ids)
            self.pages[g][row, : len(ids)] = 0
        for first in self._first.values():
            first[row] = 0
        self.num_pages[row] = 0
        self._held[row] = None
        self._closed.append(row)

    def holdings(self) -> list[list[list[int]]]:
        """What each open row holds, in each group; for `check_integrity`.

        Raises:
          ValueError: the arrays say otherwise.
        """
        for row, held in enumerate(self._held):
            for table, ids in zip(self.pages, held or [[]] * len(self.pools), strict=True):
                if table[row].tolist() != ids + [0] * (table.shape[1] - len(ids)):
                    raise ValueError(f"row {row} holds {ids}, its table differs")
                if self.num_pages[row] != len(ids):
                    raise ValueError(f"row {row} has {len(ids)} pages, not {self.num_pages[row]}")
        return [held for held in self._held if held is not None]

    def _fill(self, row: int, pages: Sequence[list[int]]) -> None:
        """Makes pages that are held for it those of an empty row."""
        held = self._held_by(row)
        held[:] = pages
        for g, ids in enumerate(held):
            self._show(g, row, 0, ids)
        for g in self._windows:
            gone = held[g].count(0)
            self._first[g][row] = self._sinks[g] + gone if gone else 0

    def _show(self, group: int, row: int, start: int, ids: list[int]) -> None:
        """Writes ids into a row's array, from logical page `start` on."""
        # numpy takes four times as long to read a list of integers.
        self.pages[group][row, start : start + len(ids)] = array("I", ids)

    def _make_free(self, group: int, num_pages: int) -> None:
        """Lets expired pins go and evicts until so many pages of a group are free."""
        pool = self.pools[group]
        if self._pins is not None:
            self._pins.expire()
        short = num_pages - pool.num_free
        if self._index is not None and 0 < short <= pool.num_cached:
            self._index.evict(group, short)
        if num_pages > pool.num_free:
            raise OutOfPages(
                f"{num_pages} pages asked for; of {pool.capacity}, {pool.num_free} are free and "
                f"{pool.num_cached} cached"
            )

    def _held_by(self, row: int) -> list[list[int]]:
        held = self._held[row]
        if held is None:
            raise ValueError(f"row {row} is closed")
        return held
