"""Page tables of sequences that lose tokens: a layer group may have fewer of a sequence's tokens
than there are.

What is left of them stands in the group's pages one after the other, so a group's row is as long as
its own tokens need, and the next token goes behind them. Not here: which tokens go
(`jaxkv.compress`), nor their K and V, which are moved on the device.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxkv.prefix.pool import OutOfPages
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

        Pages that others hold or the index keeps are not among the new ones, and stay as they are.
        Those that were the row's alone may be: the caller reads all old pages before it writes.

        Args:
          row: an open row.
          num_tokens: that it has.
          lens: by group, how many of them are to be left in it.

        Raises:
          OutOfPages: a group has too few pages that are free or cached; nothing is changed.
        """
        held = self._held_by(row)
        for g, length in lens.items():
            pool, count = self.pools[g], -(-length // self.page_size)
            own = sum(1 for page in held[g] if pool.state(page)[1] == 1)
            if count > pool.num_free + pool.num_cached + own:
                raise OutOfPages(f"{count} pages asked for in place of {len(held[g])} shared ones")
        for g, length in lens.items():
            pool, count = self.pools[g], -(-length // self.page_size)
            self.pages[g][row, : len(held[g])] = 0
            pool.release(held[g])
            if count > pool.num_free:
                self._make_free(g, count)
            held[g] = pool.acquire(count)
            self._show(g, row, 0, held[g])
            self._dropped[g, row] = num_tokens - length

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
