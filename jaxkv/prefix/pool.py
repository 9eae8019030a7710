"""The page pool of one layer group: which pages are free, cached or held.

The pool is host state and has no K or V. Two facts decide the state of a page: how many sequences
hold it, and whether it is indexed, that is, whether the prefix index has it.

    free     not held, not indexed    in the free list, once
    cached   not held, indexed        may be evicted
    held     held                     indexed or not

Page 0 is the null page. It is never handed out, and padding points to it. A method that raises has
changed nothing. The books are plain Python lists: most calls are about tens of pages, for which
lists are faster than arrays.
"""

from collections.abc import Iterator, Sequence
from operator import length_hint
from typing import NoReturn

_HOLDER = 2  # a page's state is twice the number of its holders, plus
_INDEXED = 1  # this, if the page is indexed


class OutOfPages(Exception):
    """A pool has too few pages to give; nothing was acquired."""


class PagePool:
    """The states of the N - 1 pages after the null page, by default pages 1 to N - 1.

    A freed page is the first to be handed out again, while its memory is likely to be in the
    processor's cache.

    Attributes:
      capacity: pages that can be held at once, N - 1.
      pages: the ids of the pool's pages, the null page left out.
      num_cached: pages that are cached; with `num_free` and `num_held` they add up to `capacity`.

    Example:
      >>> from jaxkv.prefix import PagePool
      >>> pool = PagePool(num_pages=5)
      >>> pool.acquire(2)  # a sequence takes two pages
      [1, 2]
      >>> pool.share([1])  # a second sequence holds page 1 too
      >>> pool.mark_indexed([1])  # the prefix index has page 1
      >>> pool.release([1, 2])  # the first sequence ends
      >>> pool.num_free, pool.num_cached, pool.num_held
      (3, 0, 1)
      >>> pool.release([1])  # the second sequence ends: page 1 stays cached
      >>> pool.num_free, pool.num_cached, pool.num_held
      (3, 1, 0)
      >>> pool.unmark_indexed([1])  # the index evicts it
      >>> pool.num_free
      4
    """

    def __init__(self, num_pages: int, *, null: int = 0):
        """Makes a pool of N pages, the null page included; all others are free.

        Args:
          num_pages: N.
          null: id of the null page; the other ids follow it. If several pools have pages of one
            array, each pool's null page comes before its other pages.

        Raises:
          ValueError: N leaves no page in addition to the null page.
        """
        if num_pages < 2:
            raise ValueError(f"N = {num_pages}: a pool needs the null page and at least one more")
        self.capacity = num_pages - 1
        self.pages = range(null + 1, null + num_pages)
        self._null, self._last = null, null + num_pages - 1
        self._state = [0] * (null + num_pages)
        self._free = list(reversed(self.pages))
        self.num_cached = 0

    @property
    def num_free(self) -> int:
        """Pages that are neither held nor indexed."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Pages that at least one sequence holds."""
        return self.capacity - len(self._free) - self.num_cached

    def unheld_tail(self, pages: Sequence[int], limit: int) -> int:
        """Counts the pages at the end of `pages` that are not held, up to `limit`."""
        state, tail = self._state, pages[max(0, len(pages) - limit) :]
        if max(map(state.__getitem__, tail), default=0) < _HOLDER:
            return len(tail)
        held = (place for place, page in enumerate(reversed(tail)) if state[page] >= _HOLDER)
        return next(held)

    def is_held(self, page: int) -> bool:
        """Whether a page is held; the null page never is."""
        return self._state[page] >= _HOLDER

    def state(self, page: int) -> tuple[int, int]:
        """Looks a page up.

        Returns:
          Whether it is indexed, 0 or 1, and its number of holders.

        Raises:
          ValueError: the id is unknown or null.
        """
        if not self._null < page <= self._last:
            self._refuse(page, "")
        holders, indexed = divmod(self._state[page], _HOLDER)
        return indexed, holders

    def acquire(self, n: int) -> list[int]:
        """Takes n free pages; each has one holder then.

        Raises:
          OutOfPages: fewer than n are free; none is taken.
          ValueError: n is negative.
        """
        if n < 0:
            raise ValueError(f"{n} pages asked for")
        state, free = self._state, self._free
        rest = len(free) - n
        if rest < 0:
            raise OutOfPages(f"{n} pages asked for, {len(free)} of {self.capacity} free")
        pages = free[rest:]
        del free[rest:]
        pages.reverse()
        for page in pages:
            state[page] = _HOLDER
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds a holder to each page.

        Raises:
          ValueError: an id is unknown, null or free.
        """
        self._check_ids(pages)
        state, rest, num_cached = self._state, iter(pages), 0
        for page in rest:
            before = state[page]
            if before < _HOLDER:
                if not before:
                    self._undo(pages, rest, -_HOLDER)
                    self._refuse(page, "is free")
                num_cached += 1
            state[page] = before + _HOLDER
        self.num_cached -= num_cached

    def release(self, pages: Sequence[int]) -> None:
        """Removes a holder from each page.

        A page without holders is cached if it is indexed, and free if not.

        Raises:
          ValueError: an id is unknown or null, or is listed more often than it is held.
        """
        self._check_ids(pages)
        state, rest, num_cached = self._state, iter(pages), 0
        freed: list[int] = []
        for page in rest:
            after = state[page] - _HOLDER
            if after == _INDEXED:
                num_cached += 1
            elif after < _INDEXED:
                if after:
                    self._undo(pages, rest, _HOLDER)
                    self._refuse(page, "is released more often than it is held")
                freed.append(page)
            state[page] = after
        self.num_cached += num_cached
        freed.reverse()
        self._free += freed

    def mark_indexed(self, pages: Sequence[int]) -> None:
        """Marks held pages as indexed, so that they are cached after their last release.

        Raises:
          ValueError: an id is unknown or null, or the page is not held or is indexed already.
        """
        self._check_ids(pages)
        state, rest = self._state, iter(pages)
        for page in rest:
            before = state[page]
            if before < _HOLDER or before & _INDEXED:
                self._undo(pages, rest, -_INDEXED)
                self._refuse(page, "is indexed already, or not held")
            state[page] = before + _INDEXED

    def unmark_indexed(self, pages: Sequence[int]) -> None:
        """Marks indexed pages as not indexed; those that are not held become free.

        Raises:
          ValueError: an id is unknown or null, or the page is not indexed.
        """
        self._check_ids(pages)
        state, rest = self._state, iter(pages)
        held: set[int] = set()
        for page in rest:
            before = state[page]
            if before == _INDEXED:
                state[page] = 0
            else:
                if not before & _INDEXED:
                    self._undo(pages, rest, _INDEXED)
                    self._refuse(page, "is not indexed")
                state[page] = before - _INDEXED
                held.add(page)
        freed = [page for page in pages if page not in held] if held else list(pages)
        self.num_cached -= len(freed)
        freed.reverse()
        self._free += freed

    def check_integrity(self) -> None:
        """Raises ValueError if a counter or the free list disagrees with the state of a page."""
        if any(self._state[: self._null + 1]) or min(self._state) < 0:
            raise ValueError("the null page is held or indexed, or a count is negative")
        listed = sorted(self._free)
        free = [page for page in self.pages if not self._state[page]]
        if listed != free:
            raise ValueError(f"free list {listed} differs from the free pages {free}")
        if self.num_cached != self._state.count(_INDEXED):
            raise ValueError(f"num_cached = {self.num_cached} is not the number of cached pages")

    def _check_ids(self, pages: Sequence[int]) -> None:
        """Raises ValueError if an id is not a page of the pool."""
        if pages and not (min(pages) > self._null and max(pages) <= self._last):
            self._refuse(next(page for page in pages if page not in self.pages), "")

    def _undo(self, pages: Sequence[int], rest: Iterator[int], change: int) -> None:
        """Reverts a change of the pages before the one at fault, the last one out of `rest`."""
        for page in pages[: len(pages) - length_hint(rest) - 1]:
            self._state[page] += change

    def _refuse(self, page: int, problem: str) -> NoReturn:
        if page == self._null:
            raise ValueError(f"page {page} is the null page")
        if page not in self.pages:
            raise ValueError(f"no page {page}: ids are {self._null + 1} to {self._last}")
        raise ValueError(f"page {page} {problem}")
