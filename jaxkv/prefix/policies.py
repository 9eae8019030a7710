"""The eviction policies of this package, by name.

Each keeps every entry of the `EvictionOrder` in an order of its own and names the next victim.
`eviction.EvictionPolicy` says what a policy of your own has to do.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from jaxkv.prefix.eviction import Evictable, EvictionPolicy


class LRU:
    """Least recently used first; every operation takes O(1).

    All entries are in one list. A path is added from its lower end, so that an entry always comes
    after those below it, and the head of the list is a leaf. If an entry at the head is in use, it
    moves to the end, and the sequence that uses it touches it again when it ends.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Evictable, None] = OrderedDict()
        self._deferred: set[Evictable] = set()

    def touch(self, path: Sequence[Evictable]) -> None:
        """See EvictionPolicy."""
        order = self._order
        for entry in reversed(path):
            order[entry] = None
            order.move_to_end(entry)

    def forget(self, entry: Evictable) -> None:
        """See EvictionPolicy."""
        self._order.pop(entry, None)
        self._deferred.discard(entry)

    def victim(self) -> Evictable | None:
        """See EvictionPolicy."""
        entry = next(iter(self._order), None)
        return None if entry in self._deferred else entry

    def defer(self, entry: Evictable) -> None:
        """See EvictionPolicy."""
        self._order.move_to_end(entry)
        self._deferred.add(entry)

    def resume(self) -> None:
        """See EvictionPolicy."""
        self._deferred.clear()


class Ranked:
    """Lowest rank first; every operation takes O(log n).

    The heap may have outdated items: only the last item of each entry counts.

    Args:
      rank: computes the rank of an entry.
    """

    def __init__(self, rank: Callable[[Evictable], tuple[float, ...]]):
        self._rank = rank
        self._heap: list[tuple[tuple[float, ...], int, Evictable]] = []
        self._last: dict[Evictable, int] = {}
        self._serial = itertools.count()
        self._deferred: list[Evictable] = []

    def touch(self, path: Sequence[Evictable]) -> None:
        """See EvictionPolicy."""
        for entry in path:
            self._enter(entry)
        if len(self._heap) > 4 * len(self._last) + 64:
            self._rebuild()

    def forget(self, entry: Evictable) -> None:
        """See EvictionPolicy."""
        self._last.pop(entry, None)
        if entry.parent is not None and entry.parent in self._last:
            self._enter(entry.parent)

    def victim(self) -> Evictable | None:
        """See EvictionPolicy."""
        while self._heap:
            _, serial, entry = self._heap[0]
            if self._last.get(entry) == serial and not entry.children:
                return entry
            heapq.heappop(self._heap)  # outdated, or an inner entry: it enters again as a leaf
        return None

    def defer(self, entry: Evictable) -> None:
        """See EvictionPolicy."""
        heapq.heappop(self._heap)
        self._deferred.append(entry)

    def resume(self) -> None:
        """See EvictionPolicy."""
        for entry in self._deferred:
            if entry in self._last:
                self._enter(entry)
        self._deferred.clear()

    def _enter(self, entry: Evictable) -> None:
        self._last[entry] = serial = next(self._serial)
        heapq.heappush(self._heap, (self._rank(entry), serial, entry))

    def _rebuild(self) -> None:
        self._heap = [item for item in self._heap if self._last.get(item[2]) == item[1]]
        heapq.heapify(self._heap)


class LFU(Ranked):
    """Least often used first, then least recently used; counts age.

    The count of an entry that is touched is raised to at least the count of the last victim, so
    that many uses long ago do not keep a prefix for ever (LFU with dynamic ageing, HPL-98-173).
    """

    def __init__(self) -> None:
        self._floor = 0.0
        self._count: dict[Evictable, float] = {}
        super().__init__(lambda entry: (self._known(entry), entry.used))

    def touch(self, path: Sequence[Evictable]) -> None:
        """See EvictionPolicy."""
        for entry in path:
            before = self._known(entry)
            if not before and entry.children:  # split off: used as often as its lower part
                before = max(map(self._known, entry.children.values()))
            self._count[entry] = max(before, self._floor) + 1
        super().touch(path)

    def forget(self, entry: Evictable) -> None:
        """See EvictionPolicy."""
        self._floor = max(self._floor, self._count.pop(entry, 0.0))
        super().forget(entry)

    def _known(self, entry: Evictable) -> float:
        return self._count.get(entry, 0.0)


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = MappingProxyType(
    {
        "lru": LRU,
        "lfu": LFU,
        "fifo": lambda: Ranked(lambda entry: (entry.born,)),
        "priority": lambda: Ranked(lambda entry: (entry.priority, entry.used)),
    }
)
"""Makes a policy by its name; read-only."""


def make_policy(eviction: str | EvictionPolicy) -> EvictionPolicy:
    """Makes the policy of that name; a policy is returned as it is.

    Raises:
      ValueError: no policy has that name.
    """
    if not isinstance(eviction, str):
        return eviction
    if eviction not in POLICIES:
        raise ValueError(f"eviction must be one of {tuple(POLICIES)}, got {eviction!r}")
    return POLICIES[eviction]()
