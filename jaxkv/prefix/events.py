"""What happens to the index's pages, as a stream from which the index can be rebuilt elsewhere.

A stored page is named by a number that is never used again, so that a stream may be read late.
Events come in an order in which every parent is known before its children. Snapshots are not in it:
what is left of a context is no prefix that others could extend.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxkv.prefix.node import TOKEN, Namespace, Node, unpack


@dataclass(frozen=True)
class PageStored:
    """The index keeps a further page.

    Attributes:
      page: the page's number in this stream.
      parent: number of the page before it in the sequence; 0 at the beginning of one.
      namespace: of the sequence.
      tokens: whose K and V it holds; fewer than P in the last page of a sequence.
      page_ids: physical page in each layer group; 0 where the group keeps none.
    """

    page: int
    parent: int
    namespace: Namespace
    tokens: tuple[int, ...]
    page_ids: tuple[int, ...]


@dataclass(frozen=True)
class PageChanged:
    """A stored page is kept in other physical pages than before: a sliding group let its own go,
    or took one again. Attributes as in PageStored."""

    page: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True)
class PageEvicted:
    """The index has let a page go. Attributes as in PageStored."""

    page: int


Event = PageStored | PageChanged | PageEvicted

# A page as the index knows it: the namespace, all tokens up to its end, and its physical pages.
StoredPage = tuple[Namespace, tuple[int, ...], tuple[int, ...]]


def replay(events: Iterable[Event]) -> set[StoredPage]:
    """The pages of the index that wrote `events`, from its making on; see `PrefixIndex.stored`.

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
    """Writes the stream: numbers an index's pages, in the nodes that have them."""

    def __init__(self, send: Callable[[Event], None], page_size: int):
        self._send = send
        self._page_size = page_size
        self._last_number = 0

    def stored(self, node: Node, tokens: bytes, num_new: int, namespace: Namespace) -> None:
        """The last `num_new` pages of `node`, whose prefix is `tokens` (packed), are new."""
        first = node.num_pages - num_new
        numbers = range(self._last_number + 1, self._last_number + 1 + num_new)
        self._last_number += num_new
        parent = self._number_before(node, first)
        node.numbers += numbers
        size = self._page_size * TOKEN
        columns = zip(*(ids[first:] for ids in node.pages), strict=True)
        logical = itertools.count(node.start // self._page_size + first)
        for number, page_ids, k in zip(numbers, columns, logical, strict=False):
            held = tuple(unpack(tokens[k * size : (k + 1) * size]))
            self._send(PageStored(number, parent, namespace, held, page_ids))
            parent = number

    def changed(self, node: Node, places: Iterable[int]) -> None:
        """The pages at these places of a node have other page ids."""
        for place in places:
            page_ids = tuple(ids[place] for ids in node.pages)
            self._send(PageChanged(node.numbers[place], page_ids))

    def evicted(self, node: Node, keep: int) -> None:
        """A node's pages but for the first `keep` are gone."""
        gone = node.numbers[keep:]
        del node.numbers[keep:]
        for number in reversed(gone):
            self._send(PageEvicted(number))

    def _number_before(self, node: Node, place: int) -> int:
        """Number of the page before a node's `place`-th; 0 where there is none."""
        while not place and node.parent is not None:
            start, node = node.start, node.parent
            place = start // self._page_size - node.start // self._page_size
        return node.numbers[place - 1] if place else 0
