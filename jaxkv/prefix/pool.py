"""Who holds which page: reference counts over the page ids of one layer group.

Pure host state, no arrays of K or V. Page 0 is the null page: never handed out, target of padding.
"""

from collections.abc import Iterable


class OutOfPages(Exception):
    """A pool has fewer free pages than were asked for; nothing was acquired."""


class PagePool:
    """Reference-counted page ids 1 .. N - 1.

    Every page is free (count 0, in the free list once) or held (count > 0). Freed pages are handed
    out again last in, first out, while their memory is likely to be warm.
    """

    def __init__(self, num_pages: int):
        """Makes a pool of N pages, the null page included; all others are free.

        Raises:
          ValueError: N leaves no page beside the null page.
        """
        if num_pages < 2:
            raise ValueError(f"N = {num_pages}: a pool needs the null page and at least one more")
        self._counts = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def capacity(self) -> int:
        """Pages that can be held at once: N - 1."""
        return len(self._counts) - 1

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Pages with at least one holder."""
        return self.capacity - self.num_free

    def count(self, page: int) -> int:
        """Holders of a page."""
        self._check_id(page)
        return self._counts[page]

    def acquire(self, n: int) -> list[int]:
        """Takes n free pages, each with one holder.

        Raises:
          OutOfPages: fewer are free; none is taken.
          ValueError: n is negative.
        """
        if n < 0:
            raise ValueError(f"{n} pages asked for")
        if n > len(self._free):
            raise OutOfPages(f"{n} pages asked for, {len(self._free)} of {self.capacity} free")
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to each page, all or none.

        Raises:
          ValueError: an id that is unknown, null or free.
        """
        pages = list(pages)
        for page in pages:
            self._check_held(page)
        for page in pages:
            self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes a holder from each page, all or none; a page without holders is free.

        Raises:
          ValueError: an id that is unknown or null, or that is listed more often than it is held.
        """
        pages = list(pages)
        for page in pages:
            self._check_held(page)
        for index, page in enumerate(pages):
            if self._counts[page] == 0:
                self._undo(pages[:index])
                raise ValueError(f"page {page} is released more often than it is held")
            self._counts[page] -= 1
        freed = dict.fromkeys(page for page in pages if self._counts[page] == 0)
        self._free.extend(reversed(freed))

    def check_integrity(self) -> None:
        """Raises ValueError unless every page is either held or in the free list, once."""
        listed = sorted(self._free)
        unheld = [page for page in range(1, len(self._counts)) if self._counts[page] == 0]
        if listed != unheld:
            raise ValueError(f"free list {listed} differs from the pages without holders {unheld}")
        if self._counts[0] != 0 or min(self._counts) < 0:
            raise ValueError("the null page is held, or a count is negative")

    def _undo(self, released: list[int]) -> None:
        for page in released:
            self._counts[page] += 1

    def _check_id(self, page: int) -> None:
        if page == 0:
            raise ValueError("page 0 is the null page")
        if not 0 < page < len(self._counts):
            raise ValueError(f"no page {page}: ids are 1 to {self.capacity}")

    def _check_held(self, page: int) -> None:
        self._check_id(page)
        if self._counts[page] == 0:
            raise ValueError(f"page {page} is free")
