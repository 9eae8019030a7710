"""Allocators that give a sequence one run of slots, as servers did before pages.

    max-length   reserves the longest sequence that there may be
    buddy        reserves the power of two that holds the whole sequence, from a buddy system
    oracle       knows how long the answer will be, and reserves just that

These are the three that the vLLM paper compares itself with (arXiv 2309.06180, section 6.1: Orca
Max, Pow2, Oracle). Not here: pages (`fragmentation` takes the engine's own pool).
"""

from bisect import bisect_left, insort
from typing import Protocol


class Reserving(Protocol):
    """An allocator that takes a sequence's slots at once.

    Attributes:
      free: slots that nobody has.
    """

    free: int

    def size(self, final: int) -> int:
        """Slots that a sequence of `final` tokens in the end is given."""
        ...

    def take(self, size: int) -> int | None:
        """Takes so many slots in one run; returns its start, None where there is no such run."""
        ...

    def give(self, start: int, size: int) -> None:
        """Gives a run back."""
        ...


class FirstFit:
    """Runs of any size: the first hole that is large enough."""

    def __init__(self, capacity: int):
        self.free = capacity
        self._holes = [(0, capacity)] if capacity else []  # (start, size), by start, none adjoining

    def size(self, final: int) -> int:
        """See Reserving: the oracle's."""
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
    """The longest sequence for everyone."""

    def __init__(self, capacity: int, max_length: int):
        super().__init__(capacity)
        self._max_length = max_length

    def size(self, final: int) -> int:
        """See Reserving."""
        return self._max_length


class Buddy:
    """Powers of two, halved when taken and joined when both halves are back (Knuth, TAOCP 1, 2.5).

    A capacity that is no power of two is cut into the powers that make it up.
    """

    def __init__(self, capacity: int):
        self.free = capacity
        self._free: dict[int, list[int]] = {}  # by size: starts, in order
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
        """Where the whole power that a slot lies in begins."""
        return max(top for top in self._tops if top <= start)
