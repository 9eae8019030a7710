"""Where the sequences of a simulated service have their slots: in one run each, or in pages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxkv.arith import ceil_div
from jaxkv.prefix import PagePool
from jaxkv.replay.contiguous import Buddy, FirstFit, MaxLength, Reserving
from jaxkv.replay.errors import NothingFits, ReplayError

ALLOCATORS = ("max-length", "buddy", "oracle", "paged")
MOST_PAGES = 1 << 26


class Store(Protocol):
    """Allocates the slots of sequences."""

    def fits(self, final: int) -> bool:
        """Returns whether a sequence that ends with `final` tokens can be served at all."""
        ...

    def admit(self, length: int, final: int, running: int) -> "Slots | None":
        """Allocates the first slots of a sequence; returns None if there is no room."""
        ...

    def grow(self, growing: "Sequence[Slots]") -> bool:
        """Allocates more slots for all of the sequences, or for none; returns whether it did."""
        ...

    def release(self, slots: "Slots") -> None:
        """Frees the slots of a sequence."""
        ...

    def external(self, length: int, final: int) -> int:
        """Returns the free slots that would be enough for a waiting sequence if they were in one
        piece; 0 if they would not be enough."""
        ...


@dataclass(slots=True)
class Slots:
    """The slots of a sequence: their number, and the run or the pages that they are in."""

    count: int
    start: int = 0
    pages: list[int] = field(default_factory=list)


class Contiguous:
    """One run per sequence."""

    def __init__(self, allocator: Reserving, longest: int):
        self._allocator = allocator
        self._longest = longest

    def fits(self, final: int) -> bool:
        """See Store."""
        return final <= self._longest

    def admit(self, length: int, final: int, running: int) -> Slots | None:
        """See Store."""
        size = self._allocator.size(final)
        start = self._allocator.take(size)
        return None if start is None else Slots(size, start)

    def grow(self, growing: Sequence[Slots]) -> bool:
        """See Store."""
        raise AssertionError("a run has room for the whole sequence")

    def release(self, slots: Slots) -> None:
        """See Store."""
        self._allocator.give(slots.start, slots.count)

    def external(self, length: int, final: int) -> int:
        """See Store."""
        free = self._allocator.free
        return free if free >= self._allocator.size(final) else 0


class Paged:
    """Pages of the pool of the engine."""

    def __init__(self, capacity: int, page_size: int):
        self._pool = PagePool(capacity // page_size + 1)
        self._page_size = page_size

    def fits(self, final: int) -> bool:
        """See Store."""
        return ceil_div(final, self._page_size) <= self._pool.capacity

    def admit(self, length: int, final: int, running: int) -> Slots | None:
        """See Store."""
        needed = ceil_div(length, self._page_size)
        if needed + running > self._pool.num_free:  # one page per running sequence stays free
            return None
        return Slots(needed * self._page_size, pages=self._pool.acquire(needed))

    def grow(self, growing: Sequence[Slots]) -> bool:
        """See Store."""
        if self._pool.num_free < len(growing):
            return False
        for slots, page in zip(growing, self._pool.acquire(len(growing)), strict=True):
            slots.pages.append(page)
            slots.count += self._page_size
        return True

    def release(self, slots: Slots) -> None:
        """See Store."""
        self._pool.release(slots.pages)

    def external(self, length: int, final: int) -> int:
        """See Store."""
        return 0


def make_store(name: str, capacity: int, page_size: int, max_length: int) -> Store:
    """Makes an empty store.

    Args:
      name: a name from `ALLOCATORS`.
      capacity: number of slots.
      page_size: P of the allocator `paged`.
      max_length: slots that `max-length` reserves for each sequence.

    Raises:
      ReplayError: there is no such allocator, or a number is out of range.
      NothingFits: a page is larger than the whole store.
    """
    if not 1 <= page_size <= capacity or capacity // page_size > MOST_PAGES:
        raise (NothingFits if page_size > capacity else ReplayError)(
            f"{capacity} slots in pages of {page_size}: must be 1 to {MOST_PAGES} pages"
        )
    if name == "paged":
        return Paged(capacity, page_size)
    if name == "oracle":
        return Contiguous(FirstFit(capacity), capacity)
    if name == "buddy":
        return Contiguous(Buddy(capacity), 1 << (capacity.bit_length() - 1))
    if name == "max-length":
        longest = max_length if max_length <= capacity else 0
        return Contiguous(MaxLength(capacity, max_length), longest)
    raise ReplayError(f"no allocator {name!r}; there are {', '.join(ALLOCATORS)}")
