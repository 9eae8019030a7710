"""Prefix caches with one interface: what a request finds in them and what it leaves there.

    none     nothing is kept, not even while a request runs: each step computes all tokens again
    request  K and V live as long as their request, so that nothing is found
    hash     whole pages, each identified by a hash of all tokens up to its end
    page     the radix index, but only whole pages are used
    token    the radix index as it is: a hit is exact to the token

The last two use `jaxkv.prefix.PrefixIndex`, and the last three take their pages from
`jaxkv.prefix.PagePool`. Requests are served one after the other.
"""

import heapq
import itertools
from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple, Protocol

from jaxkv.arith import ceil_div
from jaxkv.prefix import Namespace, PagePool, PageTables, PrefixIndex
from jaxkv.prefix.node import TOKEN
from jaxkv.replay.errors import ReplayError

CACHES = ("none", "request", "hash", "page", "token")
EVICTIONS = ("lru", "lfu", "fifo")
MOST_PAGES = 1 << 26


class Served(NamedTuple):
    """What happened to a request.

    Attributes:
      matched: number of prompt tokens whose K and V were found.
      evicted: number of slots that were evicted for the request.
      held: number of slots that the cache holds after the request.
      refused: whether the request did not fit; then nothing of it is kept.
    """

    matched: int
    evicted: int
    held: int
    refused: bool = False


class PrefixCache(Protocol):
    """A cache that requests pass through."""

    def serve(self, prompt: bytes, answer: bytes) -> Served:
        """Serves a request of packed tokens. The last prompt token is always computed, and the last
        token of the answer never."""
        ...


def make_cache(name: str, capacity: int, page_size: int, eviction: str) -> PrefixCache:
    """Makes a cache.

    Args:
      name: a name from `CACHES`.
      capacity: tokens that it holds, rounded up to whole pages.
      page_size: P, tokens per page.
      eviction: a name from `EVICTIONS`.

    Raises:
      ReplayError: there is no such cache or eviction, or a number is out of range.
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
    """Raises ReplayError if a pool of `capacity` tokens in such pages cannot be made."""
    if not 1 <= page_size <= capacity or capacity // page_size > MOST_PAGES:
        raise ReplayError(
            f"a cache of {capacity} tokens in pages of {page_size}: must be 1 to {MOST_PAGES} pages"
        )


class Forgetful:
    """Keeps nothing after a request."""

    def serve(self, prompt: bytes, answer: bytes) -> Served:
        """See PrefixCache."""
        return Served(0, 0, 0)


class Radix:
    """The radix index, the page tables and the page pool of the engine.

    Attributes:
      index: the radix index.
    """

    def __init__(self, capacity: int, page_size: int, eviction: str, *, exact: bool):
        pool = PagePool(ceil_div(capacity, page_size) + 1)
        self._clock = 0
        self.index = PrefixIndex(
            [pool], page_size, eviction=eviction, clock=lambda: float(self._clock)
        )
        self._tables = PageTables(
            [pool], page_size, max_sequences=1, max_pages=pool.capacity, index=self.index
        )
        self._pool, self._page_size, self._exact = pool, page_size, exact

    def serve(self, prompt: bytes, answer: bytes) -> Served:
        """See PrefixCache."""
        self._clock += 1
        counters = self.index.counters
        freed_before = counters.freed_pages
        tables, P, namespace = self._tables, self._page_size, Namespace()
        computed = (prompt + answer)[:-TOKEN]
        if ceil_div(len(computed), P * TOKEN) > self._pool.capacity:
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
    """Whole pages that are identified by a chain of hashes, as in vLLM, without a tree.

    The key of a page is the hash of its tokens and of the key before it, so equal keys mean equal
    prefixes. A page that no request holds may be evicted; the last pages of a request go first.

    Attributes:
      pool: the page pool.
    """

    def __init__(self, capacity: int, page_size: int, eviction: str):
        self.pool = PagePool(ceil_div(capacity, page_size) + 1)
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
        needed = ceil_div(len(computed), P * TOKEN) - len(found)
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
            # It may be known: a later page of a prefix whose middle was evicted.
            if key not in self._pages:
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
    """The order in which keys that no request holds are evicted."""

    def hold(self, key: bytes) -> None:
        """A request uses a key; it is not evicted before it is released."""
        ...

    def release(self, key: bytes) -> None:
        """A request that used a key has ended."""
        ...

    def victim(self) -> bytes:
        """Removes the next key to evict from the order, and returns it."""
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
    """Least often used first, or oldest first; the heap may hold outdated entries."""

    def __init__(self, *, count: bool):
        self._count = count
        self._uses: dict[bytes, int] = {}  # keys that are cached
        self._entry: dict[bytes, int] = {}  # keys that no request holds
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
