"""Page tables of sequences that lose tokens: a layer group may have fewer of a sequence's tokens
than there are.

What is left of them stands in the group's pages one after the other, so a group's row is as long as
its own tokens need, and the next token goes behind them. Not here: which tokens go
(`jaxkv.compress`), nor their K and V, which are moved and copied on the device.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.prefix.pool import OutOfPages
from jaxkv.prefix.snapshots import Snapshot, SnapshotKey
from jaxkv.prefix.tables import PageTables


class ShortenedTables(PageTables):
    """Page tables whose rows can be shortened.

    Numbers of tokens in calls are those of the whole sequence, dropped ones included.

    Attributes:
      dropped: `[groups, R]` int32, tokens that each row's groups no longer have; to be read.
    """

    def __init__(self, *args, **options):
        """See `PageTables`."""
        super().__init__(*args, **options)
        self._dropped = np.zeros((len(self.pools), len(self.num_pages)), np.int32)
        self.dropped = self._dropped

    def shorten(self, row: int, num_tokens: int, lens: Mapping[int, int]) -> None:
        """Lets go of a row's pages in some groups and gives it others, enough for fewer tokens.

        Pages that others hold or the index goes on keeping are not among the new ones, and stay as
        they are. The row's others may be: the caller reads all old pages before it writes.

        Args:
          row: an open row.
          num_tokens: that it has.
          lens: by group, how many of them are to be left in it.

        Raises:
          OutOfPages: a group has too few pages that are free or cached; nothing is changed.
        """
        held, P = self._held_by(row), self.page_size
        counts = {g: -(-length // P) for g, length in lens.items()}
        if self._pins is not None:
            self._pins.expire()
        for g, count in counts.items():
            pool = self.pools[g]
            own = sum(1 for page in held[g] if pool.state(page)[1] == 1)
            if count > pool.num_free + pool.num_cached + own:
                raise OutOfPages(f"{count} pages asked for in place of {len(held[g])} shared ones")
        for g in counts:  # of all first: a leaf stays while any group's pages of it are held
            self.pages[g][row, : len(held[g])] = 0
            self.pools[g].release(held[g])
            held[g] = []
        for g, count in counts.items():
            if count > self.pools[g].num_free:
                self._make_free(g, count)
            held[g] = self.pools[g].acquire(count)
            self._show(g, row, 0, held[g])
            self._dropped[g, row] = num_tokens - lens[g]

    def take_snapshot(
        self, row: int, key: SnapshotKey, *, priority: int = 0
    ) -> tuple[Snapshot, tuple[int, ...]] | None:
        """Fills an empty row with what the index has of a context that lost tokens.

        Returns:
          The snapshot, and in each group the page to copy onto the row's next one, before any page
          is written; 0 for nothing to copy. None where there is no such snapshot.
        """
        found = None
        if self._index is not None:
            found = self._index.hold_snapshot(key, priority=priority)
        if found is None:
            return None
        snapshot, pages, sources = found
        self._fill(row, pages)
        self._dropped[:, row] = [snapshot.num_tokens - length for length in snapshot.lens]
        self.num_pages[row] = max(map(len, pages))
        return snapshot, sources

    def share_snapshot(self, row: int, key: SnapshotKey) -> bool:
        """Gives a row that lost tokens the whole pages of the snapshot of the same ones, where
        there is one, for its own; returns whether there is.

        Pages of windows stay its own: the tree may keep them.
        """
        found = None if self._index is None else self._index.snapshots.hold(key)
        if found is None:
            return False
        held = self._held_by(row)
        for g, ids in enumerate(found[1]):
            pool = self.pools[g]
            if g in self._windows:
                pool.release([page for page in ids if page])
                continue
            pool.release(held[g][: len(ids)])
            held[g][: len(ids)] = ids
            self._show(g, row, 0, ids)
        return True

    def pages_for_windows(self, row: int) -> dict[int, dict[int, int]] | None:
        """Takes pages for copies of what a row holds in sliding groups: the tree keeps the row's
        own, and no page is kept twice.

        Returns:
          By group and page of the row, the page to copy it to, held by the caller. None where there
          are too few.
        """
        held, taken = self._held_by(row), {}
        try:
            for g in self._windows:
                own = [page for page in held[g] if page]
                if len(own) > self.pools[g].num_free:
                    self._make_free(g, len(own))
                taken[g] = dict(zip(own, self.pools[g].acquire(len(own)), strict=True))
        except OutOfPages:
            for g, copies in taken.items():
                self.pools[g].release(list(copies.values()))
            return None
        return taken

    def publish_snapshot(
        self,
        row: int,
        num_tokens: int,
        key: SnapshotKey,
        kept: Any,
        copies: Mapping[int, Mapping[int, int]],
        *,
        priority: int = 0,
    ) -> None:
        """Makes what is left of a row known to the index.

        Args:
          row: an open row that has just lost tokens.
          num_tokens: that it has, dropped ones included.
          key: of no snapshot that is there.
          kept: see `Snapshot`.
          copies: what `pages_for_windows` returned, copied; it is held no more.
          priority: of the row's request.
        """
        assert self._index is not None
        pages = [
            [copies[g].get(page, 0) for page in ids] if g in copies else ids
            for g, ids in enumerate(self._held_by(row))
        ]
        lens = (num_tokens - self._dropped[:, row]).tolist()
        self._index.insert_snapshot(key, pages, lens, kept, priority=priority)
        for g, own in copies.items():
            self.pools[g].release(list(own.values()))

    def grow(self, row: int, num_tokens: int) -> None:
        """See `PageTables.grow`."""
        held, P = self._held_by(row), self.page_size
        if -(-num_tokens // P) > self._max_pages:
            raise ValueError(
                f"{num_tokens} tokens need {-(-num_tokens // P)} pages; a table row has "
                f"{self._max_pages}"
            )
        dropped = self._dropped[:, row].tolist()
        lacking = [
            max(0, -(-(num_tokens - gone) // P) - len(ids))
            for ids, gone in zip(held, dropped, strict=True)
        ]
        for g, count in enumerate(lacking):
            if count > self.pools[g].num_free:
                self._make_free(g, count)
        for g, count in enumerate(lacking):
            if count:
                taken = self.pools[g].acquire(count)
                self._show(g, row, len(held[g]), taken)
                held[g] += taken
        self.num_pages[row] = max(map(len, held))

    def grow_lacking(self, rows: Sequence[int], num_tokens: Sequence[int]) -> list[int]:
        """See `PageTables.grow_lacking`; rows before one that finds no page have theirs."""
        for place, (row, n) in enumerate(zip(rows, num_tokens, strict=True)):
            try:
                self.grow(row, n)
            except OutOfPages:
                return list(range(place, len(rows)))
        return []

    def can_fork(self, row: int, num_tokens: int) -> bool:
        """See `PageTables.can_fork`; a row that lost tokens cannot be shared."""
        return not self._dropped[:, row].any() and super().can_fork(row, num_tokens)

    def close(self, row: int) -> None:
        """See `PageTables.close`."""
        super().close(row)
        self._dropped[:, row] = 0

    def holdings(self) -> list[list[list[int]]]:
        """See `PageTables.holdings`."""
        for row, held in enumerate(self._held):
            for table, ids in zip(self.pages, held or [[]] * len(self.pools), strict=True):
                if table[row].tolist() != ids + [0] * (table.shape[1] - len(ids)):
                    raise ValueError(f"row {row} holds {ids}, its table differs")
        return [held for held in self._held if held is not None]
