"""Allocators that give a sequence one contiguous run of slots, as servers did before pages.

    max-length   reserves the longest possible sequence
    buddy        reserves the power of two that holds the whole sequence, from a buddy system
    oracle       knows the length of the answer, and reserves exactly that

These are the three that the vLLM paper compares itself with (arXiv 2309.06180, section 6.1: Orca
Max, Pow2, Oracle).
"""

from bisect import bisect_left, insort
from typing import Protocol


class Reserving(Protocol):
    """An allocator that reserves all slots of a sequence at once.

    Attributes:
      free: number of free slots.
    """

    free: int

    def size(self, final: int) -> int:
        """Returns the slots to reserve for a sequence that ends with `final` tokens."""
        ...

    def take(self, size: int) -> int | None:
        """Allocates one run of slots and returns its start; None if there is no such run."""
        ...

    def give(self, start: int, size: int) -> None:
        """Frees a run."""
        ...


class FirstFit:
    """Runs of any size: the first hole that is large enough."""

    def __init__(self, capacity: int):
        self.free = capacity
        # Pairs of start and size, in order of start; no two adjoin.
        self._holes = [(0, capacity)] if capacity else []

    def size(self, final: int) -> int:
        """See Reserving; this is the oracle."""
        return final

    def take(self, size: int) -> int | None:
        """See Reserving."""
        for i, (start, room) in enumerate(self._holes):
            if room >= size:
                self._holes[i : i + 1] = [(start + size, room - size)] if room > size else []
                self.free -= size
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """See Reserving."""
        holes = self._holes
        self.free += size
        i = bisect_left(holes, (start,))
        if i < len(holes) and start + size == holes[i][0]:
            size += holes.pop(i)[1]
        if i and sum(holes[i - 1]) == start:
            i -= 1
            start, size = holes[i][0], holes.pop(i)[1] + size
        holes.insert(i, (start, size))


class MaxLength(FirstFit):
    """Reserves the longest possible sequence for every sequence."""

    def __init__(self, capacity: int, max_length: int):
        super().__init__(capacity)
        self._max_length = max_length

    def size(self, final: int) -> int:
        """See Reserving."""
        return self._max_length


class Buddy:
    """Powers of two, halved to allocate and joined when both halves are free (Knuth, TAOCP 1, 2.5).

    A capacity that is not a power of two is split into powers of two.
    """

    def __init__(self, capacity: int):
        self.free = capacity
        self._free: dict[int, list[int]] = {}  # by size: starts in order
        start = 0
        for bit in reversed(range(capacity.bit_length())):
            if capacity >> bit & 1:
                self._free[1 << bit] = [start]
                start += 1 << bit
        self._tops = {one[0]: size for size, one in self._free.items()}

    def size(self, final: int) -> int:
        """See Reserving."""
        return 1 << (final - 1).bit_length()

    def take(self, size: int) -> int | None:
        """See Reserving."""
        enough = [one for one, starts in self._free.items() if one >= size and starts]
        if not enough:
            return None
        found = min(enough)
        start = self._free[found].pop(0)
        while found > size:
            found //= 2
            insort(self._free.setdefault(found, []), start + found)
        self.free -= size
        return start

    def give(self, start: int, size: int) -> None:
        """See Reserving."""
        self.free += size
        while self._tops.get(start) != size:
            top = self._top(start)
            buddy = top + ((start - top) ^ size)
            starts = self._free.setdefault(size, [])
            i = bisect_left(starts, buddy)
            if i == len(starts) or starts[i] != buddy:
                break
            starts.pop(i)
            start, size = min(start, buddy), size * 2
        insort(self._free.setdefault(size, []), start)

    def _top(self, start: int) -> int:
        """Returns the start of the largest block that a slot lies in."""
        return max(top for top in self._tops if top <= start)
