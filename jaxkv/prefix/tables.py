"""The page tables of running sequences: which page has which tokens of which sequence.

A sequence has one row in each layer group, in arrays from which a step takes rows. A row's life:

    open      takes an empty row
    match     fills it with the pages that the index has of its prompt
    grow      takes pages for more tokens, and evicts cached pages if too few are free
              (`grow_lacking` does it for a batch)
    publish   adds its pages to the index
    trim      releases pages before the window of a sliding group
    fork      opens a row that shares another row's first pages
    close     releases all pages that it still holds

Positions in a row are those of tokens in the group: if a group dropped tokens of a sequence
(`dropper`), the tokens that are left follow one another in its pages. The scheduler of
`jaxkv.engine` decides when a sequence does any of this.
"""

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from jaxkv.arith import ceil_div
from jaxkv.prefix.index import PrefixIndex
from jaxkv.prefix.node import TOKEN, Namespace
from jaxkv.prefix.pins import Pins
from jaxkv.prefix.pool import OutOfPages, PagePool

Rows = NDArray[np.integer]
Lengths = NDArray[np.integer]


class PageTables:
    """Rows of page ids for up to R sequences.

    Numbers of tokens are those of the whole sequence, dropped tokens included.

    Attributes:
      pools: page pool of each layer group.
      page_size: P.
      pages: in each group `[R, M]` int32, read-only; 0 where a row has no page.
      dropped: `[groups, R]` int32, read-only; how many tokens of a row's sequence a group dropped.
      covered: `[R]`, read-only; the number of tokens that a row has pages for in every group, with
        tokens that were dropped or that a window has passed.
      sliding: the groups that have a window, in which rows give pages back (`trim`).

    Example:
      >>> from jaxkv.prefix import PagePool, PageTables
      >>> tables = PageTables([PagePool(9)], page_size=4, max_sequences=2, max_pages=3)
      >>> row = tables.open()
      >>> tables.grow(row, num_tokens=6)
      >>> tables.pages[0]
      array([[1, 2, 0],
             [0, 0, 0]], dtype=int32)
      >>> tables.close(row)
      >>> tables.pools[0].num_free
      8
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
          pools: page pool of each layer group, a `SparsePool` if the group has a window.
          page_size: P, tokens per page.
          max_sequences: R.
          max_pages: M.
          windows: window of each group in tokens; None, also by default, for one that sees all.
          sink_pages: number of pages at the beginning of each group that the window does not
            pass; by default 0.
          index: index of the same pools; None shares no prefixes.
          pins: in the index; those that have expired are ended when a row needs pages.
        """
        self.pools = tuple(pools)
        self.page_size = page_size
        self.pages = tuple(np.zeros((max_sequences, max_pages), np.int32) for _ in pools)
        self.dropped = np.zeros((len(self.pools), max_sequences), np.int32)
        self.covered = [0] * max_sequences
        self._index = index
        self._pins = pins
        # `pages` and `dropped` by row, again as lists, which are faster; no pages where closed.
        self._held: list[list[list[int]] | None] = [None] * max_sequences
        self._gone = [[0] * len(self.pools) for _ in range(max_sequences)]
        self._max_pages = max_pages
        self._windows = {g: window for g, window in enumerate(windows or ()) if window is not None}
        self.sliding = tuple(self._windows)
        self._sinks = tuple(sink_pages) if sink_pages is not None else (0,) * len(self.pools)
        # By sliding group, the first page that each row may have, the sinks left out.
        self._first = {g: np.zeros(max_sequences, np.int64) for g in self._windows}
        self._closed = list(range(max_sequences - 1, -1, -1))

    @property
    def num_open(self) -> int:
        """Rows in use."""
        return len(self.covered) - len(self._closed)

    def open(self) -> int:
        """Takes an empty row.

        Raises:
          ValueError: all rows are in use.
        """
        if not self._closed:
            raise ValueError(f"all {len(self.covered)} rows are in use")
        row = self._closed.pop()
        self._held[row] = [[] for _ in self.pools]
        return row

    def match(
        self, row: int, tokens: bytes, namespace: Namespace, *, priority: int = 0
    ) -> tuple[int, tuple[int, ...]]:
        """Fills an empty row with the pages that the index has of a prompt.

        Args:
          row: an open row without pages.
          tokens: packed, without the tokens that are computed in any case.
          namespace: namespace of the sequence.
          priority: `Request.priority` of the sequence.

        Returns:
          How many tokens were found, and in each group the page to copy to the row's next page
          before any page is written; 0 for nothing to copy. See `Match`.
        """
        self.held_by(row)
        if self._index is None:
            return 0, (0,) * len(self.pools)
        match = self._index.match(tokens, namespace, priority=priority)
        self.fill(row, match.pages)
        return match.num_tokens, match.sources

    def grow(self, row: int, num_tokens: int) -> None:
        """Takes pages until a row has a slot for each token, in every group or in none.

        Raises:
          OutOfPages: a group has too few pages that are free or cached.
          ValueError: the row is too short for so many tokens.
        """
        held, P = self.held_by(row), self.page_size
        if num_tokens <= self.covered[row]:
            return
        if num_tokens > self._max_pages * P:
            raise ValueError(
                f"{num_tokens} tokens need {ceil_div(num_tokens, P)} pages; a table row has "
                f"{self._max_pages}"
            )
        gone = self._gone[row]
        counts = [ceil_div(num_tokens - gone[g], P) - len(ids) for g, ids in enumerate(held)]
        for g, count in enumerate(counts):
            if count > self.pools[g].num_free:
                self.make_free(g, count)
        for g, count in enumerate(counts):
            if count > 0:  # a group that dropped tokens may have room
                taken = self.pools[g].acquire(count)
                self._show(g, row, len(held[g]), taken)
                held[g] += taken
        self._cover(row, held)

    def grow_lacking(self, rows: Sequence[int], num_tokens: Sequence[int]) -> list[int]:
        """Gives a page to each row that lacks a slot for its next token, to all rows or to none.

        This is `grow` for the rows of a decode step at once.

        Args:
          rows: open rows.
          num_tokens: tokens of each row, the next one included.

        Returns:
          The places in `rows` that still lack a slot: none, or all that did if pages ran out.
        """
        P, covered = self.page_size, self.covered
        ends = zip(rows, num_tokens, strict=True)
        lacking = [i for i, (row, n) in enumerate(ends) if covered[row] < n]
        if not lacking:
            return []
        needs: list[list[tuple[int, list[int]]]] = [[] for _ in self.pools]  # rows, their pages
        for i in lacking:
            row, gone = rows[i], self._gone[rows[i]]
            for g, ids in enumerate(self.held_by(row)):
                if len(ids) * P + gone[g] < num_tokens[i]:
                    needs[g].append((row, ids))
        try:
            for g, need in enumerate(needs):
                if len(need) > self.pools[g].num_free:
                    self.make_free(g, len(need))
        except OutOfPages:
            return lacking
        for pool, table, need in zip(self.pools, self.pages, needs, strict=True):
            for (row, ids), page in zip(need, pool.acquire(len(need)), strict=True):
                table[row, len(ids)] = page
                ids.append(page)
        for i in lacking:
            self._cover(rows[i], self.held_by(rows[i]))
        return []

    def publish(self, row: int, tokens: bytes, namespace: Namespace, *, priority: int = 0) -> None:
        """Adds the pages of a row's first tokens (packed) to the index.

        The slots of those tokens must not be written again. The last page may have room for more
        tokens of the row.
        """
        held = self.held_by(row)
        if self._index is None or not tokens:
            return
        end = ceil_div(len(tokens), TOKEN * self.page_size)
        before = [ids[:end] for ids in held]
        after = self._index.insert(tokens, before, namespace, priority=priority)
        for g, ids in enumerate(after):
            if ids is not before[g]:
                held[g][:end] = ids
                self._show(g, row, 0, ids)

    def trim(self, rows: Rows, num_tokens: Lengths) -> None:
        """Releases the pages that the next token of each row, at position `num_tokens`, no longer
        sees."""
        for g, window in self._windows.items():
            first = np.maximum(num_tokens - window + 1, 0) // self.page_size
            for i in np.flatnonzero(first > self._first[g][rows]):
                row = int(rows[i])
                ids = self.held_by(row)[g]
                end = min(int(first[i]), len(ids))
                start = min(end, max(self._sinks[g], int(self._first[g][row])))
                self.pools[g].release(ids[start:end])
                ids[start:end] = [0] * (end - start)
                self.pages[g][row, start:end] = 0
                self._first[g][row] = end

    def can_fork(self, row: int, num_tokens: int) -> bool:
        """Whether a row has all that the token at position `num_tokens` sees."""
        return not any(self._gone[row]) and all(
            self._first[g][row] <= max(0, num_tokens - window + 1) // self.page_size
            for g, window in self._windows.items()
        )

    def fork(self, row: int, num_tokens: int) -> tuple[int, tuple[int, ...]]:
        """Opens a row that shares another row's first tokens.

        Returns:
          The new row, and in each group the page to copy to the row's next page before any page is
          written; 0 for nothing to copy.

        Raises:
          ValueError: all rows are in use.
        """
        held = self.held_by(row)
        child = self.open()
        whole, rest = divmod(num_tokens, self.page_size)
        pages = [ids[:whole] for ids in held]
        for pool, ids in zip(self.pools, pages, strict=True):
            pool.share(ids)
        self.fill(child, pages)
        for first in self._first.values():
            first[child] = min(first[row], whole)
        return child, tuple(ids[whole] if rest else 0 for ids in held)

    def close(self, row: int) -> None:
        """Releases a row and all its pages.

        Raises:
          ValueError: the row is closed.
        """
        held = self.held_by(row)
        for g, ids in enumerate(held):
            self.pools[g].release(ids)
            self.pages[g][row, : len(ids)] = 0
        for first in self._first.values():
            first[row] = 0
        if any(self._gone[row]):
            self.set_dropped(row, dict.fromkeys(range(len(held)), 0))
        self.covered[row] = 0
        self._held[row] = None
        self._closed.append(row)

    def num_stored(self, group: int, row: int, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens of a row a group has slots for."""
        return num_tokens - self._gone[row][group]

    def held_by(self, row: int) -> list[list[int]]:
        """The pages of an open row in each group.

        Raises:
          ValueError: the row is closed.
        """
        held = self._held[row]
        if held is None:
            raise ValueError(f"row {row} is closed")
        return held

    def fill(self, row: int, pages: Sequence[list[int]]) -> None:
        """Gives pages that are held for it to an empty row, 0 before a window."""
        held = self.held_by(row)
        held[:] = pages
        for g, ids in enumerate(held):
            self._show(g, row, 0, ids)
        for g, first in self._first.items():
            gone = held[g].count(0)
            first[row] = self._sinks[g] + gone if gone else 0
        self._cover(row, held)

    def set_dropped(self, row: int, counts: Mapping[int, int]) -> None:
        """Books, by group, how many tokens of an open row's sequence the group has dropped."""
        for g, count in counts.items():
            self._gone[row][g] = self.dropped[g, row] = count
        self._cover(row, self.held_by(row))

    def replace(self, row: int, group: int, pages: list[int]) -> None:
        """Puts pages that are held for a row in place of its pages of a group.

        The former pages are the caller's to release.
        """
        held = self.held_by(row)
        self.pages[group][row, : len(held[group])] = 0
        held[group] = pages
        self._show(group, row, 0, pages)
        self._cover(row, held)

    def make_free(self, group: int, num_pages: int) -> None:
        """Evicts pages of a group until so many are free; does nothing if they are.

        Raises:
          OutOfPages: too few are free or cached.
        """
        pool = self.pools[group]
        if num_pages <= pool.num_free:
            return
        if self._pins is not None:
            self._pins.expire()
        lacking = num_pages - pool.num_free
        if self._index is not None and 0 < lacking <= pool.num_cached:
            self._index.evict(group, lacking)
        if num_pages > pool.num_free:
            raise OutOfPages(
                f"{num_pages} pages asked for; of {pool.capacity}, {pool.num_free} are free and "
                f"{pool.num_cached} cached"
            )

    def expire_pins(self) -> None:
        """Ends the pins whose time is over."""
        if self._pins is not None:
            self._pins.expire()

    def holdings(self) -> list[list[list[int]]]:
        """What each open row holds, in each group; for `check_integrity`.

        Raises:
          ValueError: the arrays disagree with the lists.
        """
        for row, held in enumerate(self._held):
            for table, ids in zip(self.pages, held or [[]] * len(self.pools), strict=True):
                if table[row].tolist() != ids + [0] * (table.shape[1] - len(ids)):
                    raise ValueError(f"row {row} holds {ids}, its table differs")
            if self.dropped[:, row].tolist() != self._gone[row]:
                raise ValueError(f"row {row} dropped {self._gone[row]} tokens, the array differs")
            columns = zip(held or (), self._gone[row], strict=False)
            covered = min((len(ids) * self.page_size + gone for ids, gone in columns), default=0)
            if self.covered[row] != covered:
                raise ValueError(f"row {row} covers {covered} tokens, not {self.covered[row]}")
        return [held for held in self._held if held is not None]

    def _cover(self, row: int, held: list[list[int]]) -> None:
        """Books that a row has other pages."""
        P, gone = self.page_size, self._gone[row]
        self.covered[row] = min([len(ids) * P + gone[g] for g, ids in enumerate(held)])

    def _show(self, group: int, row: int, start: int, ids: list[int]) -> None:
        """Writes ids into a row's array, from logical page `start` on."""
        # numpy takes four times as long to read a list of integers.
        self.pages[group][row, start : start + len(ids)] = array("I", ids)
