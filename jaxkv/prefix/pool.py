"""Who holds which page: the books over the page ids of one layer group.

Pure host state, no arrays of K or V. A page is in one of three states, by two facts about it, how
many sequences hold it and whether the prefix index keeps it:

    free     nobody holds it, not kept     in the free list, once
    cached   nobody holds it, kept         the index may let it go
    held     somebody holds it             kept or not

Page 0 is the null page: never handed out, target of padding. A method that raises has changed
nothing. Plain Python lists: at the tens of pages of most calls they are faster than arrays.
"""

from collections.abc import Iterator, Sequence
from operator import length_hint
from typing import NoReturn

_HOLDER = 2  # a page's state is twice the number of its holders, plus
_KEPT = 1  # this, where the index keeps it


class OutOfPages(Exception):
    """A pool has fewer pages to give than were asked for; nothing was acquired."""


class PagePool:
    """The states of pages 1 .. N - 1, or of the next N - 1 behind another page.

    Freed pages are handed out again last in, first out, while their memory is likely to be warm.

    Attributes:
      capacity: pages that can be held at once, N - 1.
      pages: their ids.
      num_cached: pages in that state; with `num_free` and `num_held` they add up to `capacity`.
    """

    def __init__(self, num_pages: int, *, null: int = 0):
        """Makes a pool of N pages, the null page included; all others are free.

        Args:
          num_pages: N.
          null: id of the null page; the others follow it. Where several pools have pages of one
            array, the null page of each stands before its own.

        Raises:
          ValueError: N leaves no page beside the null page.
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
        """Pages that nobody holds and the index does not keep."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Pages that a sequence holds."""
        return self.capacity - len(self._free) - self.num_cached

    def unheld_tail(self, pages: Sequence[int], most: int) -> int:
        """How many pages at the end of `pages`, at most `most`, nobody holds."""
        state, tail = self._state, pages[max(0, len(pages) - most) :]
        if max(map(state.__getitem__, tail), default=0) < _HOLDER:
            return len(tail)
        held = (place for place, page in enumerate(reversed(tail)) if state[page] >= _HOLDER)
        return next(held)

    def is_held(self, page: int) -> bool:
        """Whether anybody holds a page; nobody holds the null page."""
        return self._state[page] >= _HOLDER

    def state(self, page: int) -> tuple[int, int]:
        """Whether the index keeps a page, 0 or 1, and how many hold it.

        Raises:
          ValueError: an id that is unknown or null.
        """
        if not self._null < page <= self._last:
            self._refuse(page, "")
        holders, kept = divmod(self._state[page], _HOLDER)
        return kept, holders

    def acquire(self, n: int) -> list[int]:
        """Takes n free pages, each with one holder.

        Raises:
          OutOfPages: fewer are free; none is taken.
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
          ValueError: an id that is unknown, null or free.
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
        """Takes a holder from each page; one without holders is cached where the index keeps it.

        Raises:
          ValueError: an id that is unknown or null, or that is listed more often than it is held.
        """
        self._check_ids(pages)
        state, rest, num_cached = self._state, iter(pages), 0
        freed: list[int] = []
        for page in rest:
            after = state[page] - _HOLDER
            if after == _KEPT:
                num_cached += 1
            elif after < _KEPT:
                if after:
                    self._undo(pages, rest, _HOLDER)
                    self._refuse(page, "is released more often than it is held")
                freed.append(page)
            state[page] = after
        self.num_cached += num_cached
        freed.reverse()
        self._free += freed

    def keep(self, pages: Sequence[int]) -> None:
        """Marks held pages as kept by the index.

        Raises:
          ValueError: an id that is unknown or null, that nobody holds, or that is kept already.
        """
        self._check_ids(pages)
        state, rest = self._state, iter(pages)
        for page in rest:
            before = state[page]
            if before < _HOLDER or before & _KEPT:
                self._undo(pages, rest, -_KEPT)
                self._refuse(page, "is kept already, or not held")
            state[page] = before + _KEPT

    def drop(self, pages: Sequence[int]) -> None:
        """Marks kept pages as kept no more; those that nobody holds are free.

        Raises:
          ValueError: an id that is unknown or null, or that is not kept.
        """
        self._check_ids(pages)
        state, rest = self._state, iter(pages)
        held: set[int] = set()
        for page in rest:
            before = state[page]
            if before == _KEPT:
                state[page] = 0
            else:
                if not before & _KEPT:
                    self._undo(pages, rest, _KEPT)
                    self._refuse(page, "is not kept")
                state[page] = before - _KEPT
                held.add(page)
        freed = [page for page in pages if page not in held] if held else list(pages)
        self.num_cached -= len(freed)
        freed.reverse()
        self._free += freed

    def check_integrity(self) -> None:
        """Raises ValueError unless counters and free list agree with the state of every page."""
        if any(self._state[: self._null + 1]) or min(self._state) < 0:
            raise ValueError("the null page is held or kept, or a count is negative")
        listed = sorted(self._free)
        free = [page for page in self.pages if not self._state[page]]
        if listed != free:
            raise ValueError(f"free list {listed} differs from the free pages {free}")
        if self.num_cached != self._state.count(_KEPT):
            raise ValueError(f"num_cached = {self.num_cached} is not the number of cached pages")

    def _check_ids(self, pages: Sequence[int]) -> None:
        """Raises ValueError where an id is no page of the pool."""
        if pages and not (min(pages) > self._null and max(pages) <= self._last):
            self._refuse(next(page for page in pages if page not in self.pages), "")

    def _undo(self, pages: Sequence[int], rest: Iterator[int], change: int) -> None:
        """Takes a change back from the pages before the one at fault, the last out of `rest`."""
        for page in pages[: len(pages) - length_hint(rest) - 1]:
            self._state[page] += change

    def _refuse(self, page: int, problem: str) -> NoReturn:
        if page == self._null:
            raise ValueError(f"page {page} is the null page")
        if page not in self.pages:
            raise ValueError(f"no page {page}: ids are {self._null + 1} to {self._last}")
        raise ValueError(f"page {page} {problem}")
