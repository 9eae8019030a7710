"""Snapshots: the pages that are left of contexts that dropped tokens, for sequences that begin with
the same context.

    get       the snapshot of a context; changes nothing
    match     the same, and the caller holds its pages
    insert    makes a snapshot of a row's pages

Which tokens are kept follows from the whole context, so a snapshot cannot be cut at a token. It is
therefore an entry of a dictionary and not part of a radix tree. As in the tree, token ids are
compared, the pages are marked as indexed, and snapshots are evicted in one order with the leaves of
the trees, each as a whole. `jaxkv.compress` chooses the tokens, `dropper` has the rows.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxkv.prefix.eviction import Evictable, Owner
from jaxkv.prefix.index import Match, PrefixIndex
from jaxkv.prefix.node import Namespace


class SnapshotKey(NamedTuple):
    """What must be equal before a sequence may continue from a snapshot.

    Attributes:
      tokens: packed: the context, or all tokens that the choice of kept tokens depends on.
      namespace: namespace of the sequence.
      method: what drops tokens, with its budget and interval.
      dropped_at: length of the context in tokens, after which some were dropped.
      protect: spans `[start, end)` of tokens that are not dropped.
    """

    tokens: bytes
    namespace: Namespace
    method: Hashable
    dropped_at: int
    protect: tuple[tuple[int, int], ...] = ()


class Snapshot:
    """The pages of a context after some of its tokens were dropped; an `Evictable`.

    Attributes:
      owner: the snapshots that it belongs to.
      key: its key.
      pages: in each layer group the page ids; 0 before a window.
      lens: how many tokens are left in each group.
      kept: which tokens are left, as the method that dropped the others needs it to continue.
      hits, priority, born, used: see `Evictable`.
    """

    __slots__ = ("born", "hits", "kept", "key", "lens", "owner", "pages", "priority", "used")

    parent: None = None
    children: Mapping[bytes, Evictable] = MappingProxyType({})

    def __init__(
        self,
        owner: Owner,
        key: SnapshotKey,
        pages: list[list[int]],
        lens: Sequence[int],
        kept: Any,
        born: float,
    ):
        self.owner = owner
        self.key, self.pages, self.lens, self.kept = key, pages, tuple(lens), kept
        self.hits = self.priority = 0
        self.born = self.used = born

    @property
    def num_tokens(self) -> int:
        """Tokens of the context, dropped ones included."""
        return self.key.dropped_at

    @property
    def num_pages(self) -> int:
        """Logical pages of the group that has most."""
        return max(map(len, self.pages))


class Snapshots:
    """The snapshots that share the pools, the order of eviction and the counters of an index."""

    def __init__(self, index: PrefixIndex):
        """Makes an empty set."""
        self._index = index
        self._by_key: dict[SnapshotKey, Snapshot] = {}

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(list(self._by_key.values()))

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: SnapshotKey) -> Snapshot | None:
        """Returns the snapshot of a key, or None."""
        return self._by_key.get(key)

    def match(self, key: SnapshotKey, *, priority: int = 0) -> tuple[Snapshot, Match] | None:
        """Finds a snapshot and holds its whole pages for the caller.

        Returns:
          The snapshot and what the index has of its context: all tokens. None if there is no
          snapshot. The index counts a match that found all tokens.
        """
        found = self.hold(key, priority=priority)
        if found is not None:
            n = found[0].num_tokens
            self._index.counters.add_match(n, n)
        return found

    def hold(self, key: SnapshotKey, *, priority: int = 0) -> tuple[Snapshot, Match] | None:
        """Does what `match` does without counting it."""
        snapshot = self._by_key.get(key)
        if snapshot is None:
            return None
        pages, sources = [], []
        columns = zip(self._index.pools, snapshot.pages, snapshot.lens, strict=True)
        for pool, ids, length in columns:
            whole, rest = divmod(length, self._index.page_size)
            pages.append(ids[:whole])
            sources.append(ids[whole] if rest else 0)
            pool.share(pages[-1])
        self._index.order.touch([snapshot], priority)
        return snapshot, Match(snapshot.num_tokens, tuple(pages), tuple(sources))

    def insert(
        self,
        key: SnapshotKey,
        pages: Sequence[list[int]],
        lens: Sequence[int],
        kept: Any,
        *,
        priority: int = 0,
    ) -> None:
        """Makes a new snapshot.

        Args:
          key: a key that no snapshot has.
          pages: in each group the pages that are left, each held by the caller and not indexed; 0
            before a window.
          lens: how many tokens are left in each group.
          kept: see `Snapshot`.
          priority: `Request.priority` of the sequence.
        """
        index = self._index
        snapshot = Snapshot(self, key, [list(ids) for ids in pages], lens, kept, index.clock())
        for pool, ids in zip(index.pools, snapshot.pages, strict=True):
            pool.mark_indexed(ids)
        self._by_key[key] = snapshot
        index.order.touch([snapshot], priority)
        index.counters.stored_pages += snapshot.num_pages

    def evict_from(self, entry: Evictable, group: int, num_pages: int) -> int:
        """Evicts a snapshot as a whole; see `Owner.evict_from`. Pages that rows hold stay held."""
        assert isinstance(entry, Snapshot)
        index = self._index
        is_held = index.pools[group].is_held
        freed = sum(1 for page in entry.pages[group] if page and not is_held(page))
        if freed:
            for pool, ids in zip(index.pools, entry.pages, strict=True):
                pool.unmark_indexed(ids)
            del self._by_key[entry.key]
            index.order.forget(entry)
            index.counters.evicted_pages += entry.num_pages
        return freed
