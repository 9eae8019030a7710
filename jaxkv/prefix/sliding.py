"""What the index does for groups whose layers see a window: which of their pages are needed still.

Such a group keeps pages wherever sequences had them. The token at position m sees the pages of its
window and the sinks at the beginning, so a prefix of length m can be served where those are there.
When pages are wanted, the first to go are those behind the window of their node's end, since a
later sequence goes on from an end. Not here: which leaf goes when that is not enough (`index`).
"""

from collections import OrderedDict
from collections.abc import Sequence

from jaxkv.prefix.events import EventLog
from jaxkv.prefix.node import Node
from jaxkv.prefix.pool import PagePool


class SlidingGroups:
    """The sliding groups of an index.

    Attributes:
      windows: of each sliding group, by its number among all groups.
      sink_pages: pages at the beginning that are needed always; by the same number.
    """

    def __init__(
        self,
        pools: Sequence[PagePool],
        windows: Sequence[int | None],
        sink_pages: Sequence[int],
        page_size: int,
        log: EventLog | None,
    ):
        self.windows = {g: window for g, window in enumerate(windows) if window is not None}
        self.sink_pages = dict(enumerate(sink_pages))
        self._pools = pools
        self._page_size = page_size
        self._log = log
        # Of each group the nodes that may have pages behind their end's window.
        self._behind: dict[int, OrderedDict[Node, None]] = {g: OrderedDict() for g in self.windows}

    def not_needed(self, group: int, length: int) -> range:
        """Logical pages that the token at position `length` does not see, before its window."""
        first = max(0, length - self.windows[group] + 1) // self._page_size
        return range(min(self.sink_pages[group], first), first)

    def usable(self, pages: Sequence[list[int]], length: int) -> int:
        """The longest prefix, up to `length`, after which every group has all that it sees.

        Args:
          pages: of each group, full ones too, along the prefix.
          length: tokens.
        """
        before = -1
        while length != before:
            before = length
            for g in self.windows:
                length = self._reach(g, pages[g], length)
        return length

    def enter(self, path: Sequence[Node]) -> None:
        """A sequence's pages came along `path`."""
        for queue in self._behind.values():
            queue.update(dict.fromkeys(path))

    def forget(self, node: Node) -> None:
        """A node is gone from the tree."""
        for queue in self._behind.values():
            queue.pop(node, None)

    def evict_behind(self, group: int, num_pages: int) -> int:
        """Lets at most `num_pages` go that are behind the window of their node's end.

        Returns:
          How many went.
        """
        queue, window, freed = self._behind[group], self.windows[group], 0
        for _ in range(len(queue)):
            if freed == num_pages:
                break
            node = next(iter(queue))
            first = node.start // self._page_size
            behind = range(
                max(0, self.sink_pages[group] - first),
                max(0, (node.end - window) // self._page_size - first),
            )
            gone, held = self.let_go(node, group, behind, num_pages - freed)
            freed += gone
            if held:
                queue.move_to_end(node)
            elif freed < num_pages:
                del queue[node]
        return freed

    def let_go(self, node: Node, group: int, places: range, num_pages: int) -> tuple[int, bool]:
        """Lets at most `num_pages` of a node's pages go, of those at some places.

        Returns:
          How many went, and whether others are held.
        """
        pool, ids = self._pools[group], node.pages[group]
        there = [place for place in places if ids[place]]
        unheld = [place for place in there if not pool.is_held(ids[place])]
        gone = unheld[:num_pages]
        if gone:
            pool.drop([ids[place] for place in gone])
            self._set_pages(node, group, dict.fromkeys(gone, 0))
        return len(gone), len(unheld) < len(there)

    def take_back(self, path: Sequence[Node], group: int, pages: dict[int, int]) -> None:
        """Keeps held pages, by their logical number, in nodes that had let theirs go."""
        self._pools[group].keep(list(pages.values()))
        for node in path:
            first = node.start // self._page_size
            end = first + node.num_pages
            here = {k - first: page for k, page in pages.items() if first <= k < end}
            if here:
                self._set_pages(node, group, here)

    def _reach(self, group: int, ids: list[int], length: int) -> int:
        """The longest prefix, up to `length`, after which one group has all that it sees."""
        P = self._page_size
        while length:
            spared, end = self.not_needed(group, length), -(-length // P)
            needed = (*range(end - 1, spared.stop - 1, -1), *range(spared.start - 1, -1, -1))
            gap = next((k for k in needed if not ids[k]), None)
            if gap is None:
                return length
            while gap and not ids[gap - 1]:
                gap -= 1
            length = gap * P
        return 0

    def _set_pages(self, node: Node, group: int, changes: dict[int, int]) -> None:
        for place, page in changes.items():
            node.pages[group][place] = page
        if self._log is not None:
            self._log.changed(node, changes)
