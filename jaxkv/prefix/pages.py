"""The pages that one sequence holds, as the table rows that a step is given.

A sequence holds, in every layer group, pages for all its tokens so far. Not here: the pools' own
counts (`pool`), nor when a sequence grows or gives up its pages (the scheduler).
"""

from collections.abc import Sequence

import numpy as np

from jaxkv.prefix.pool import OutOfPages, PagePool


class SequencePages:
    """Page tables of one sequence, one row a layer group.

    Attributes:
      rows: for each group `[M]` int32; entries past `num_pages` are the null page.
      num_pages: pages held in each group.
    """

    def __init__(self, pools: Sequence[PagePool], page_size: int, max_pages: int):
        self._pools = pools
        self._page_size = page_size
        self.rows = [np.zeros(max_pages, np.int32) for _ in pools]
        self.num_pages = 0

    def missing(self, num_tokens: int) -> int:
        """Pages to acquire, in each group, before `num_tokens` tokens have a slot."""
        return max(0, -(-num_tokens // self._page_size) - self.num_pages)

    def grow(self, num_tokens: int) -> None:
        """Acquires pages until `num_tokens` tokens have a slot, in every group or in none.

        Raises:
          OutOfPages: a group has too few free pages.
          ValueError: the rows are too short for so many tokens.
        """
        n = self.missing(num_tokens)
        if any(self.num_pages + n > len(row) for row in self.rows):
            raise ValueError(
                f"{num_tokens} tokens need {self.num_pages + n} pages; a table row has "
                f"{min(len(row) for row in self.rows)}"
            )
        if any(pool.num_free < n for pool in self._pools):
            raise OutOfPages(f"{n} pages asked for, {min(p.num_free for p in self._pools)} free")
        for pool, row in zip(self._pools, self.rows, strict=True):
            row[self.num_pages : self.num_pages + n] = pool.acquire(n)
        self.num_pages += n

    def release(self) -> None:
        """Gives all pages back; calling it again does nothing."""
        for pool, row in zip(self._pools, self.rows, strict=True):
            pool.release(row[: self.num_pages].tolist())
            row[:] = 0
        self.num_pages = 0
