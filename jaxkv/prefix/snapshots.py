"""What is left of contexts that lost tokens, kept for sequences that begin with the same ones.

    get       the snapshot of a context; changes nothing
    hold      the same, and its pages are held for the caller
    insert    a row's pages become a snapshot
    drop      a snapshot goes, whole

Which tokens stay follows from the whole context, so a snapshot cannot be cut at a token: it is an
entry of a dictionary and no part of the radix tree. As in the tree, what is compared is token ids,
the pages are marked as kept, and all stand in one order of eviction. Not here: which tokens stay
(`jaxkv.compress`), rows (`shortened`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxkv.prefix.node import Namespace, Node
from jaxkv.prefix.policies import EvictionPolicy
from jaxkv.prefix.pool import PagePool


class SnapshotKey(NamedTuple):
    """What must be equal before a sequence may go on from a snapshot.

    Attributes:
      tokens: packed: the context, or all that the choice of tokens is to be used for.
      namespace: of the sequence, with the method, `dropped_at` and `protect`.
    """

    tokens: bytes
    namespace: Namespace


class Snapshot(Node):
    """Pages of a context after some of its tokens were dropped; a leaf without a parent.

    Attributes:
      found_by: its key.
      lens: of each layer group, how many tokens are left.
      kept: what whoever made it goes on from, besides the pages.
    """

    __slots__ = ("found_by", "kept", "lens")

    def __init__(self, key: SnapshotKey, pages: list[list[int]], lens: Sequence[int], kept: Any):
        super().__init__(None, 0, key.tokens, pages)
        self.found_by, self.lens, self.kept = key, tuple(lens), kept

    @property
    def num_tokens(self) -> int:
        """Tokens of the context, dropped ones included."""
        return self.found_by.namespace.dropped_at

    @property
    def num_pages(self) -> int:
        """Logical pages of the group that has most."""
        return max(map(len, self.pages))


class Snapshots:
    """The snapshots above the pools of all layer groups."""

    def __init__(
        self,
        pools: Sequence[PagePool],
        page_size: int,
        policy: EvictionPolicy,
        clock: Callable[[], float],
    ):
        """Makes an empty set; the arguments are those of the index."""
        self._pools, self._page_size = tuple(pools), page_size
        self._policy, self._clock = policy, clock
        self._by_key: dict[SnapshotKey, Snapshot] = {}

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(list(self._by_key.values()))

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: SnapshotKey) -> Snapshot | None:
        """The snapshot of a key; None where there is none."""
        return self._by_key.get(key)

    def hold(
        self, key: SnapshotKey, *, priority: int = 0
    ) -> tuple[Snapshot, list[list[int]], tuple[int, ...]] | None:
        """Finds a snapshot and holds its whole pages.

        Returns:
          It; in each group the whole pages, 0 before a window; and in each group the page with the
          rest of the tokens, to be copied before any other page is written, 0 where there is no
          rest, not held. None where there is no such snapshot.
        """
        snapshot = self._by_key.get(key)
        if snapshot is None:
            return None
        whole, sources = [], []
        for pool, ids, length in zip(self._pools, snapshot.pages, snapshot.lens, strict=True):
            count, rest = divmod(length, self._page_size)
            whole.append(ids[:count])
            sources.append(ids[count] if rest else 0)
            pool.share([page for page in whole[-1] if page])
        self._touch(snapshot, priority)
        return snapshot, whole, tuple(sources)

    def insert(
        self,
        key: SnapshotKey,
        pages: Sequence[list[int]],
        lens: Sequence[int],
        kept: Any,
        *,
        priority: int = 0,
    ) -> Snapshot:
        """Makes a new snapshot.

        Args:
          key: of none that is there.
          pages: in each group the pages of what is left, each held by the caller and kept by
            nobody; 0 before a window.
          lens: of each group, how many tokens are left.
          kept: see `Snapshot`.
          priority: of the request.
        """
        snapshot = Snapshot(key, [list(ids) for ids in pages], lens, kept)
        for pool, ids in zip(self._pools, snapshot.pages, strict=True):
            pool.keep([page for page in ids if page])
        snapshot.born = self._clock()
        self._by_key[key] = snapshot
        self._touch(snapshot, priority)
        return snapshot

    def num_unheld(self, snapshot: Snapshot, group: int) -> int:
        """Pages of a group that would be free if a snapshot went."""
        pool = self._pools[group]
        return sum(1 for page in snapshot.pages[group] if page and not pool.is_held(page))

    def drop(self, snapshot: Snapshot) -> None:
        """Lets a snapshot go; pages that rows hold stay theirs."""
        for pool, ids in zip(self._pools, snapshot.pages, strict=True):
            pool.drop([page for page in ids if page])
        del self._by_key[snapshot.found_by]
        self._policy.forget(snapshot)

    def _touch(self, snapshot: Snapshot, priority: int) -> None:
        snapshot.used = self._clock()
        snapshot.hits += 1
        snapshot.priority = max(snapshot.priority, priority)
        self._policy.touch([snapshot])
