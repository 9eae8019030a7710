"""Which cached leaf goes first when pages are needed.

A policy keeps every node of the tree in an order of its own and names a victim; the index takes
pages from the victim's tail. Not here: which pages are free to go (the index knows who holds them).
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxkv.prefix.node import Node


class EvictionPolicy(Protocol):
    """An order of eviction over the nodes of a tree."""

    def touch(self, path: Sequence[Node]) -> None:
        """A match or an insert came along `path`, topmost first; new nodes are met here."""
        ...

    def forget(self, node: Node) -> None:
        """A node is gone from the tree, and its parent may have become a leaf."""
        ...

    def victim(self) -> Node | None:
        """The node to take pages from next; None where all are deferred or there is none."""
        ...

    def defer(self, node: Node) -> None:
        """The victim can give nothing now: it is in use, or has children."""
        ...

    def resume(self) -> None:
        """The search for victims is over: deferred nodes are candidates again."""
        ...


class LRU:
    """Least recently used first; every operation O(1).

    One list of all nodes. A path is entered from its lower end, so that a node always stands behind
    those below it, and the head of the list is a leaf. Where a node in use comes to the head it
    goes to the back, and returns to its place in the order when its sequence ends.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Node, None] = OrderedDict()
        self._deferred: set[Node] = set()

    def touch(self, path: Sequence[Node]) -> None:
        """See EvictionPolicy."""
        order = self._order
        for node in reversed(path):
            order[node] = None
            order.move_to_end(node)

    def forget(self, node: Node) -> None:
        """See EvictionPolicy."""
        self._order.pop(node, None)
        self._deferred.discard(node)

    def victim(self) -> Node | None:
        """See EvictionPolicy."""
        node = next(iter(self._order), None)
        return None if node in self._deferred else node

    def defer(self, node: Node) -> None:
        """See EvictionPolicy."""
        self._order.move_to_end(node)
        self._deferred.add(node)

    def resume(self) -> None:
        """See EvictionPolicy."""
        self._deferred.clear()


class Ranked:
    """Lowest rank first, by a function of the node; O(log n).

    A heap that may hold outdated entries: a node's last entry alone counts.
    """

    def __init__(self, rank: Callable[[Node], tuple[float, ...]]):
        self._rank = rank
        self._heap: list[tuple[tuple[float, ...], int, Node]] = []
        self._entry: dict[Node, int] = {}
        self._serial = itertools.count()
        self._deferred: list[Node] = []

    def touch(self, path: Sequence[Node]) -> None:
        """See EvictionPolicy."""
        for node in path:
            self._enter(node)
        if len(self._heap) > 4 * len(self._entry) + 64:
            self._rebuild()

    def forget(self, node: Node) -> None:
        """See EvictionPolicy."""
        self._entry.pop(node, None)
        if node.parent is not None and node.parent in self._entry:
            self._enter(node.parent)

    def victim(self) -> Node | None:
        """See EvictionPolicy."""
        while self._heap:
            _, serial, node = self._heap[0]
            if self._entry.get(node) == serial and not node.children:
                return node
            heapq.heappop(self._heap)  # outdated, or an inner node: it enters again as a leaf
        return None

    def defer(self, node: Node) -> None:
        """See EvictionPolicy."""
        heapq.heappop(self._heap)
        self._deferred.append(node)

    def resume(self) -> None:
        """See EvictionPolicy."""
        for node in self._deferred:
            if node in self._entry:
                self._enter(node)
        self._deferred.clear()

    def _enter(self, node: Node) -> None:
        self._entry[node] = serial = next(self._serial)
        heapq.heappush(self._heap, (self._rank(node), serial, node))

    def _rebuild(self) -> None:
        self._heap = [entry for entry in self._heap if self._entry.get(entry[2]) == entry[1]]
        heapq.heapify(self._heap)


class LFU(Ranked):
    """Least often used first, and of equals the least recently; counts age.

    A node that is touched starts from the count at which the last one was evicted, so that fame
    of long ago does not keep a prefix for ever (LFU with dynamic ageing, HPL-98-173).
    """

    def __init__(self) -> None:
        self._floor = 0.0
        self._count: dict[Node, float] = {}
        super().__init__(lambda node: (self._known(node), node.used))

    def touch(self, path: Sequence[Node]) -> None:
        """See EvictionPolicy."""
        for node in path:
            before = self._known(node)
            if not before and node.children:  # split off: used as often as its lower part
                before = max(map(self._known, node.children.values()))
            self._count[node] = max(before, self._floor) + 1
        super().touch(path)

    def forget(self, node: Node) -> None:
        """See EvictionPolicy."""
        self._floor = max(self._floor, self._count.pop(node, 0.0))
        super().forget(node)

    def _known(self, node: Node) -> float:
        return self._count.get(node, 0.0)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "fifo": lambda: Ranked(lambda node: (node.born,)),
    "priority": lambda: Ranked(lambda node: (node.priority, node.used)),
}
