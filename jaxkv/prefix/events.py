"""The changes of an index's pages, as a stream from which the index can be rebuilt elsewhere.

Each stored page has a number that is never used again, so that a stream may be read late. A page is
announced after its parent. Snapshots are not in the stream, because what is left of a context is
not a prefix that others could extend.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxkv.prefix.node import TOKEN, Namespace, Node, unpack


@dataclass(frozen=True)
class PageStored:
    """The index has a new page.

    Attributes:
      page: number of the page in this stream.
      parent: number of the page before it in the sequence; 0 for the first page.
      namespace: namespace of the sequence.
      tokens: ids of the tokens in the page; fewer than P in the last page of a sequence.
      page_ids: physical page in each layer group; 0 where the group has lost the page.
    """

    page: int
    parent: int
    namespace: Namespace
    tokens: tuple[int, ...]
    page_ids: tuple[int, ...]


@dataclass(frozen=True)
class PageChanged:
    """A stored page has other physical pages: a sliding group lost its page or has one again.

    Attributes:
      page, page_ids: see `PageStored`.
    """

    page: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True)
class PageEvicted:
    """The index has removed a page.

    Attributes:
      page: see `PageStored`.
    """

    page: int


Event = PageStored | PageChanged | PageEvicted

# A page in the index: the namespace, all tokens up to its end, and its physical pages.
StoredPage = tuple[Namespace, tuple[int, ...], tuple[int, ...]]


def replay(events: Iterable[Event]) -> set[StoredPage]:
    """Rebuilds the pages of an index from all its events; see `PrefixIndex.stored`.

    Raises:
      ValueError: an event names a page that is not stored.
    """
    pages: dict[int, StoredPage] = {}
    for event in events:
        if isinstance(event, PageStored):
            before: tuple[int, ...] = ()
            if event.parent:
                _, before, _ = _known(pages, event.parent)
            pages[event.page] = (event.namespace, before + event.tokens, event.page_ids)
        elif isinstance(event, PageChanged):
            namespace, tokens, _ = _known(pages, event.page)
            pages[event.page] = (namespace, tokens, event.page_ids)
        else:
            _known(pages, event.page)
            del pages[event.page]
    return set(pages.values())


def _known(pages: dict[int, StoredPage], page: int) -> StoredPage:
    if page not in pages:
        raise ValueError(f"page {page} is not stored")
    return pages[page]


class EventLog:
    """Writes the stream, and numbers the pages in the nodes of the index."""

    def __init__(self, send: Callable[[Event], None], page_size: int):
        self._send = send
        self._page_size = page_size
        self._last_number = 0

    def stored(self, node: Node, tokens: bytes, num_new: int, namespace: Namespace) -> None:
        """Writes that the last `num_new` pages of a node are new.

        Args:
          node: the node.
          tokens: packed, from the root to the end of the node.
          num_new: number of pages.
          namespace: namespace of the tokens.
        """
        first = node.num_pages - num_new
        numbers = range(self._last_number + 1, self._last_number + 1 + num_new)
        self._last_number += num_new
        parent = self._number_before(node, first)
        node.numbers += numbers
        size = self._page_size * TOKEN
        columns = zip(*(ids[first:] for ids in node.pages), strict=True)
        logical = itertools.count(node.start // self._page_size + first)
        for number, page_ids, k in zip(numbers, columns, logical, strict=False):
            content = tuple(unpack(tokens[k * size : (k + 1) * size]))
            self._send(PageStored(number, parent, namespace, content, page_ids))
            parent = number

    def changed(self, node: Node, places: Iterable[int]) -> None:
        """Writes that pages of a node, by their place in it, have other page ids."""
        for place in places:
            page_ids = tuple(ids[place] for ids in node.pages)
            self._send(PageChanged(node.numbers[place], page_ids))

    def evicted(self, node: Node, num_left: int) -> None:
        """Writes that all but the first `num_left` pages of a node are gone."""
        gone = node.numbers[num_left:]
        del node.numbers[num_left:]
        for number in reversed(gone):
            self._send(PageEvicted(number))

    def _number_before(self, node: Node, place: int) -> int:
        """The number of the page before a place in a node; 0 for the first page of a sequence."""
        while not place and node.parent is not None:
            start, node = node.start, node.parent
            place = start // self._page_size - node.start // self._page_size
        return node.numbers[place - 1] if place else 0
