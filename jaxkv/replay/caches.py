"""Prefix caches under one interface: what a request finds, and what it leaves.

    none     nothing is kept, not even while a request runs: each token computes all before it
    request  K and V live as long as their request: nothing is found
    hash     whole pages, each known by a hash of all tokens up to its end
    page     the radix index, of which whole pages are used
    token    the radix index as it is: a hit is exact to the token

The last two are `jaxkv.prefix.PrefixIndex`, and all that keep pages have them from its `PagePool`.
Requests are served one after the other. Not here: the loop (`reuse`), the optimum (`optimum`).
"""

import heapq
import itertools
from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple, Protocol

from jaxkv.prefix import Namespace, PagePool, PageTables, PrefixIndex
from jaxkv.prefix.node import TOKEN
from jaxkv.replay.errors import ReplayError

CACHES = ("none", "request", "hash", "page", "token")
EVICTIONS = ("lru", "lfu", "fifo")
MOST_PAGES = 1 << 26


class Served(NamedTuple):
    """What came of a request.

    Attributes:
      matched: prompt tokens whose K and V were found.
      evicted: tokens' slots that were let go for it.
      held: slots that the cache has for tokens when it has ended.
      refused: it did not fit, and nothing of it was kept.
    """

    matched: int
    evicted: int
    held: int
    refused: bool = False


class PrefixCache(Protocol):
    """A cache that requests pass through."""

    def serve(self, prompt: bytes, answer: bytes) -> Served:
        """Serves a request of packed tokens; at least its last prompt token is computed, and of an
        answer's last token nothing."""
        ...


def make_cache(name: str, capacity: int, page_size: int, eviction: str) -> PrefixCache:
    """A cache of so many slots.

    Args:
      name: of `CACHES`.
      capacity: tokens, rounded up to whole pages.
      page_size: P.
      eviction: of `EVICTIONS`.

    Raises:
      ReplayError: there is no such cache or order, or a number is out of range.
    """
    if name not in CACHES:
        raise ReplayError(f"no cache {name!r}; there are {', '.join(CACHES)}")
    if eviction not in EVICTIONS:
        raise ReplayError(f"no eviction {eviction!r}; there are {', '.join(EVICTIONS)}")
    check_pages(capacity, page_size)
    if name == "hash":
        return PageHash(capacity, page_size, eviction)
    if name in ("page", "token"):
        return Radix(capacity, page_size, eviction, exact=name == "token")
    return Forgetful()


def check_pages(capacity: int, page_size: int) -> None:
    """Raises ReplayError where a pool of so many tokens, or such pages, cannot be made."""
    if not 1 <= page_size <= capacity or capacity // page_size > MOST_PAGES:
        raise ReplayError(
            f"a cache of {capacity} tokens in pages of {page_size}: must be 1 to {MOST_PAGES} pages"
        )


class Forgetful:
    """Keeps nothing beyond a request."""

    def serve(self, prompt: bytes, answer: bytes) -> Served:
        """See PrefixCache."""
        return Served(0, 0, 0)


class Radix:
    """The radix index, the page tables and the pool of the engine.

    Attributes:
      index: the index.
    """

    def __init__(self, capacity: int, page_size: int, eviction: str, *, exact: bool):
        pool = PagePool(-(-capacity // page_size) + 1)
        self._clock = 0
        self.index = PrefixIndex(
            [pool], page_size, eviction=eviction, clock=lambda: float(self._clock)
        )
        self._tables = PageTables(
            [pool], page_size, max_sequences=1, max_pages=pool.capacity, index=self.index
        )
        self._pool, self._page_size, self._exact = pool, page_size, exact
        self._namespace = Namespace()

    def serve(self, prompt: bytes, answer: bytes) -> Served:
        """See PrefixCache."""
        self._clock += 1
        counters = self.index.counters
        freed_before = counters.freed_pages
        tables, P, namespace = self._tables, self._page_size, self._namespace
        computed = (prompt + answer)[:-TOKEN]
        if -(-len(computed) // (P * TOKEN)) > self._pool.capacity:
            return Served(0, 0, self._pool.num_cached * P, refused=True)
        row = tables.open()
        matched, _ = tables.match(row, prompt[:-TOKEN], namespace)
        tables.grow(row, len(prompt) // TOKEN)
        tables.publish(row, self._whole(prompt), namespace)
        tables.grow(row, len(computed) // TOKEN)
        tables.publish(row, computed if self._exact else self._whole(computed), namespace)
        tables.close(row)
        if not self._exact:
            matched -= matched % P
        evicted = counters.freed_pages - freed_before
        return Served(matched, evicted * P, self._pool.num_cached * P)

    def _whole(self, tokens: bytes) -> bytes:
        size = self._page_size * TOKEN
        return tokens[: len(tokens) // size * size]


class PageHash:
    """Pages known by a chain of hashes, as vLLM's: no tree, and no part of a page.

    A page's key is the hash of the key before it and its tokens, so that equal keys have equal
    prefixes. A page that no request holds may be evicted; of one request the last pages go first.

    Attributes:
      pool: of the pages.
    """

    def __init__(self, capacity: int, page_size: int, eviction: str):
        self.pool = PagePool(-(-capacity // page_size) + 1)
        self._page_size = page_size
        self._pages: dict[bytes, int] = {}
        self._order: _Order = _Recent() if eviction == "lru" else _Ranked(count=eviction == "lfu")

    def serve(self, prompt: bytes, answer: bytes) -> Served:
        """See PrefixCache."""
        P, pool = self._page_size, self.pool
        computed = (prompt + answer)[:-TOKEN]
        keys = self._keys(computed)
        whole = (len(prompt) // TOKEN - 1) // P
        found = list(itertools.takewhile(self._pages.__contains__, keys[:whole]))
        needed = -(-len(computed) // (P * TOKEN)) - len(found)
        if needed > pool.capacity - len(found):
            return Served(0, 0, len(self._pages) * P, refused=True)
        held = [self._pages[key] for key in found]
        pool.share(held)
        for key in found:
            self._order.hold(key)
        evicted = max(0, needed - pool.num_free)
        for _ in range(evicted):
            pool.unmark_indexed([self._pages.pop(self._order.victim())])
        taken = pool.acquire(needed)
        for key, page in zip(keys[len(found) :], taken, strict=False):
            if key not in self._pages:  # else a later page of a prefix whose middle is gone
                self._pages[key] = page
                pool.mark_indexed([page])
        pool.release(held + taken)
        for key in reversed(keys):
            self._order.release(key)
        return Served(len(found) * P, evicted * P, len(self._pages) * P)

    def _keys(self, tokens: bytes) -> list[bytes]:
        size = self._page_size * TOKEN
        keys, key = [], b""
        for start in range(0, len(tokens) - size + 1, size):
            key = blake2b(key + tokens[start : start + size], digest_size=16).digest()
            keys.append(key)
        return keys


class _Order(Protocol):
    """An order of eviction over keys that nobody holds."""

    def hold(self, key: bytes) -> None:
        """A request uses a key: it is no candidate until it is released."""
        ...

    def release(self, key: bytes) -> None:
        """A request that used a key has ended."""
        ...

    def victim(self) -> bytes:
        """Takes the next to go out of the order."""
        ...


class _Recent:
    """Least recently released first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def hold(self, key: bytes) -> None:
        """See _Order."""
        self._keys.pop(key, None)

    def release(self, key: bytes) -> None:
        """See _Order."""
        self._keys[key] = None
        self._keys.move_to_end(key)

    def victim(self) -> bytes:
        """See _Order."""
        return self._keys.popitem(last=False)[0]


class _Ranked:
    """Least often used first, or first come first; a heap that may hold outdated entries."""

    def __init__(self, *, count: bool):
        self._count = count
        self._uses: dict[bytes, int] = {}  # of keys that are cached
        self._entry: dict[bytes, int] = {}  # of keys that nobody holds
        self._born: dict[bytes, int] = {}
        self._heap: list[tuple[int, int, bytes]] = []
        self._serial = itertools.count()

    def hold(self, key: bytes) -> None:
        """See _Order."""
        self._entry.pop(key, None)

    def release(self, key: bytes) -> None:
        """See _Order."""
        serial = next(self._serial)
        uses = self._uses[key] = self._uses.get(key, 0) + 1
        born = self._born.setdefault(key, serial)
        self._entry[key] = serial
        heapq.heappush(self._heap, (uses if self._count else born, serial, key))
        if len(self._heap) > 4 * len(self._entry) + 64:
            self._heap = [one for one in self._heap if self._entry.get(one[2]) == one[1]]
            heapq.heapify(self._heap)

    def victim(self) -> bytes:
        """See _Order."""
        while True:
            _, serial, key = heapq.heappop(self._heap)
            if self._entry.get(key) == serial:
                for known in (self._entry, self._uses, self._born):
                    del known[key]
                return key
