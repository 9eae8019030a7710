"""The prefix index where layer groups have a sliding window and lose pages.

The index keeps the pages of such a group wherever sequences had them. The token at position m sees
the pages of its window, and the sink pages at the beginning. So a prefix of length m is a hit if
those pages are there, whatever else is gone. A page that is gone is a 0 in its node.

If a sliding group needs pages, it first evicts pages that are before the window of their node's
end, because a later sequence continues from an end. Then leaves are evicted in the order of the
policy.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypedDict, Unpack

from jaxkv.arith import ceil_div
from jaxkv.prefix.events import Event
from jaxkv.prefix.eviction import Evictable, EvictionPolicy
from jaxkv.prefix.index import Match, PrefixIndex
from jaxkv.prefix.node import Namespace, Node
from jaxkv.prefix.pool import PagePool


class IndexOptions(TypedDict, total=False):
    """The options of `PrefixIndex`."""

    eviction: str | EvictionPolicy
    events: Callable[[Event], None] | None
    clock: Callable[[], float]


class SparsePool(PagePool):
    """The page pool of a sliding group: lists of pages may have 0 for pages that are gone."""

    def share(self, pages: Sequence[int]) -> None:
        """See `PagePool.share`."""
        super().share([page for page in pages if page])

    def release(self, pages: Sequence[int]) -> None:
        """See `PagePool.release`."""
        super().release([page for page in pages if page])

    def mark_indexed(self, pages: Sequence[int]) -> None:
        """See `PagePool.mark_indexed`."""
        super().mark_indexed([page for page in pages if page])

    def unmark_indexed(self, pages: Sequence[int]) -> None:
        """See `PagePool.unmark_indexed`."""
        super().unmark_indexed([page for page in pages if page])


class SlidingIndex(PrefixIndex):
    """A prefix index some of whose groups have a sliding window.

    Attributes:
      windows: by sliding group, its window in tokens.
    """

    def __init__(
        self,
        pools: Sequence[PagePool],
        page_size: int,
        windows: Sequence[int | None],
        sink_pages: Sequence[int] | None = None,
        **options: Unpack[IndexOptions],
    ):
        """Makes an empty index.

        Args:
          pools: page pool of each layer group, a `SparsePool` for a sliding one.
          page_size: P, tokens per page.
          windows: window of each group in tokens; None for a group that sees all tokens.
          sink_pages: number of pages at the beginning that every token sees, for each group; by
            default 0.
          **options: see `PrefixIndex`.
        """
        super().__init__(pools, page_size, **options)
        self.windows = {g: window for g, window in enumerate(windows) if window is not None}
        self._sink_pages = tuple(sink_pages or [0] * len(self.pools))
        # A sequence that holds a leaf's page in any group holds it in these.
        full = [g for g, window in enumerate(windows) if window is None]
        self._guarding = full or list(range(len(self.pools)))
        # By sliding group, the nodes that may have pages before the window of their end.
        self._passed: dict[int, OrderedDict[Node, None]] = {g: OrderedDict() for g in self.windows}

    def probe(self, tokens: bytes, namespace: Namespace) -> int:
        """See `PrefixIndex.probe`."""
        path, depth = self._walk(tokens, namespace)
        return self._servable(self._pages_along(path, depth), depth)

    def evict(self, group: int, num_pages: int) -> int:
        """See `PrefixIndex.evict`."""
        if group not in self.windows:
            return super().evict(group, num_pages)
        freed = self._evict_passed(group, num_pages)
        freed += self.order.evict(group, num_pages - freed)
        if freed < num_pages:
            for _, node in self.nodes():  # above pages in use, where no leaf can give a page
                every = range(node.num_pages)
                freed += self._evict_places(node, group, every, num_pages - freed)[0]
        self.counters.freed_pages += freed
        return freed

    def may_lack(self, group: int) -> bool:
        """Whether nodes may have lost pages of a group."""
        return group in self.windows

    def evict_from(self, entry: Evictable, group: int, num_pages: int) -> int:
        """Evicts the end of a leaf; see `Owner.evict_from`.

        A row that dropped tokens holds pages of sliding groups only. It keeps them when the leaf
        is removed.
        """
        assert isinstance(entry, Node)
        if entry.children:
            return 0
        count = entry.num_pages
        for g in self._guarding:
            count = self.pools[g].unheld_tail(entry.pages[g], count)
        first, is_held = entry.num_pages - count, self.pools[group].is_held
        tail = enumerate(entry.pages[group][first:], first)
        freed = [place for place, page in tail if page and not is_held(page)][-num_pages:]
        if freed:
            self._truncate(entry, freed[0])
        return len(freed)

    def _share(self, pages: list[list[int]], num_tokens: int) -> Match:
        num_tokens = self._servable(pages, num_tokens)
        for g in self.windows:
            for place in self._unseen(g, num_tokens):
                pages[g][place] = 0
        return super()._share(pages, num_tokens)

    def _store(
        self, tokens: bytes, pages: Sequence[list[int]], namespace: Namespace
    ) -> tuple[list[Node], list[list[int]]]:
        path, own = super()._store(tokens, pages, namespace)
        for queue in self._passed.values():
            queue.update(dict.fromkeys(path))
        return path, own

    def _exchange(
        self, group: int, path: list[Node], mine: list[int], theirs: list[int]
    ) -> list[int]:
        """Also gives the tree the caller's pages where it has lost its own."""
        pairs = list(zip(mine, theirs, strict=True))
        differ = [(a, b) for a, b in pairs if a and b and a != b]
        self.pools[group].share([b for _, b in differ])
        self.pools[group].release([a for a, _ in differ])
        lost = {k: a for k, (a, b) in enumerate(pairs) if a and not b}
        if lost:
            self._take_back(path, group, lost)
        return [b if a and b else a for a, b in pairs]

    def _keeps_ends(self) -> bool:
        return True  # the pages before an end are kept for a prompt that is sent again

    def _forget(self, node: Node) -> None:
        super()._forget(node)
        for queue in self._passed.values():
            queue.pop(node, None)

    def _unseen(self, group: int, length: int) -> range:
        """Logical pages before the window of the token at position `length`, sinks left out."""
        first = max(0, length - self.windows[group] + 1) // self.page_size
        return range(min(self._sink_pages[group], first), first)

    def _servable(self, pages: Sequence[list[int]], length: int) -> int:
        """The longest prefix, up to `length`, after which every group has all that it sees.

        Args:
          pages: page ids of each group along the prefix.
          length: tokens.
        """
        before = -1
        while length != before:
            before = length
            for g in self.windows:
                length = self._servable_by(g, pages[g], length)
        return length

    def _servable_by(self, group: int, pages: list[int], length: int) -> int:
        """The longest prefix, up to `length`, after which one group has all that it sees."""
        P = self.page_size
        while length:
            unseen, end = self._unseen(group, length), ceil_div(length, P)
            seen = (*range(end - 1, unseen.stop - 1, -1), *range(unseen.start - 1, -1, -1))
            gap = next((k for k in seen if not pages[k]), None)
            if gap is None:
                return length
            while gap and not pages[gap - 1]:
                gap -= 1
            length = gap * P
        return 0

    def _evict_passed(self, group: int, num_pages: int) -> int:
        """Evicts at most `num_pages` that are before the window of their node's end.

        Returns:
          How many became free.
        """
        queue, window, freed = self._passed[group], self.windows[group], 0
        for _ in range(len(queue)):
            if freed == num_pages:
                break
            node = next(iter(queue))
            first = node.start // self.page_size
            passed = range(
                max(0, self._sink_pages[group] - first),
                max(0, (node.end - window) // self.page_size - first),
            )
            gone, held = self._evict_places(node, group, passed, num_pages - freed)
            freed += gone
            if held:
                queue.move_to_end(node)
            elif freed < num_pages:
                del queue[node]
        return freed

    def _evict_places(
        self, node: Node, group: int, places: range, num_pages: int
    ) -> tuple[int, bool]:
        """Evicts at most `num_pages` of a node's pages, of those at some places.

        Returns:
          How many became free, and whether others are held.
        """
        pool, ids = self.pools[group], node.pages[group]
        there = [place for place in places if ids[place]]
        unheld = [place for place in there if not pool.is_held(ids[place])]
        gone = unheld[:num_pages]
        if gone:
            pool.unmark_indexed([ids[place] for place in gone])
            self._set_pages(node, group, dict.fromkeys(gone, 0))
        return len(gone), len(unheld) < len(there)

    def _take_back(self, path: Sequence[Node], group: int, pages: dict[int, int]) -> None:
        """Indexes held pages, by their logical number, in nodes that had lost theirs."""
        self.pools[group].mark_indexed(list(pages.values()))
        for node in path:
            first = node.start // self.page_size
            end = first + node.num_pages
            here = {k - first: page for k, page in pages.items() if first <= k < end}
            if here:
                self._set_pages(node, group, here)

    def _set_pages(self, node: Node, group: int, changes: dict[int, int]) -> None:
        for place, page in changes.items():
            node.pages[group][place] = page
        if self._log is not None:
            self._log.changed(node, changes)


def make_index(
    pools: Sequence[PagePool],
    page_size: int,
    windows: Sequence[int | None],
    sink_pages: Sequence[int] | None = None,
    **options: Unpack[IndexOptions],
) -> PrefixIndex:
    """Makes the index for groups of which some may have a window; see `SlidingIndex`."""
    if any(window is not None for window in windows):
        return SlidingIndex(pools, page_size, windows, sink_pages, **options)
    return PrefixIndex(pools, page_size, **options)


def make_pool(num_pages: int, window: int | None, *, null: int = 0) -> PagePool:
    """Makes the pool of a group with or without a window; see `PagePool`."""
    return (PagePool if window is None else SparsePool)(num_pages, null=null)
