"""The order of eviction: what can be evicted, the policy that orders it, and the loop that evicts.

Nodes of the trees and snapshots are `Evictable` entries of one `EvictionOrder`. A policy names the
next victim, and the victim's owner frees pages of it. `policies` has the policies of this package.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from jaxkv.prefix.pool import PagePool


class Evictable(Protocol):
    """An entry in the order of eviction, as a policy sees it.

    Attributes:
      owner: frees its pages.
      hits: how many matches and inserts came through it.
      priority: largest `Request.priority` of the requests that came through it.
      born, used: clock at its creation and at its last touch, in seconds.
    """

    owner: "Owner"
    hits: int
    priority: int
    born: float
    used: float

    @property
    def parent(self) -> "Evictable | None":
        """The entry above it in the tree; None if there is none."""
        ...

    @property
    def children(self) -> "Mapping[bytes, Evictable]":
        """The entries below it; only an entry without children can be evicted."""
        ...


class Owner(Protocol):
    """Frees pages of its entries."""

    def evict_from(self, entry: Evictable, group: int, num_pages: int) -> int:
        """Evicts pages of an entry.

        Args:
          entry: an entry of this owner.
          group: layer group that needs pages.
          num_pages: how many it needs; at least 1.

        Returns:
          How many pages of the group became free. It is 0 if the entry has children or its pages
          are held, and more than `num_pages` if the entry can only be evicted whole.
        """
        ...


@runtime_checkable
class EvictionPolicy(Protocol):
    """Decides which entry is evicted next: a class with these five methods.

    `EngineConfig.eviction` and `PrefixIndex` take an instance, which serves one index. A policy
    keeps every entry that it was touched with until it is told to forget it. Parameters of a policy
    belong in its constructor.

    Example:
      The most recently used entry goes first.

      >>> class MRU:
      ...     def __init__(self):
      ...         self.entries, self.deferred = {}, set()
      ...     def touch(self, path):
      ...         for entry in path:
      ...             self.entries.pop(entry, None)
      ...             self.entries[entry] = None
      ...     def forget(self, entry):
      ...         self.entries.pop(entry, None)
      ...     def victim(self):
      ...         rest = (e for e in reversed(self.entries) if e not in self.deferred)
      ...         return next(rest, None)
      ...     def defer(self, entry):
      ...         self.deferred.add(entry)
      ...     def resume(self):
      ...         self.deferred.clear()
      >>> from jaxkv.prefix import PagePool, PrefixIndex
      >>> index = PrefixIndex([PagePool(100)], page_size=16, eviction=MRU())
    """

    def touch(self, path: Sequence[Evictable]) -> None:
        """Books a match or an insert along `path`, topmost first; new entries appear here."""
        ...

    def forget(self, entry: Evictable) -> None:
        """Removes an entry that is gone; its parent may have become a leaf."""
        ...

    def victim(self) -> Evictable | None:
        """Returns the next entry to take pages from; None if all are deferred or there is none."""
        ...

    def defer(self, entry: Evictable) -> None:
        """Passes over the victim until `resume`: it is in use, or has children."""
        ...

    def resume(self) -> None:
        """Ends a search for victims: deferred entries are candidates again."""
        ...


class EvictionOrder:
    """All entries that share some pools, in the order of one policy.

    Attributes:
      policy: as given.
      forget: see `EvictionPolicy.forget`.
    """

    def __init__(
        self, policy: EvictionPolicy, pools: Sequence[PagePool], clock: Callable[[], float]
    ):
        """Makes an empty order.

        Raises:
          ValueError: the policy has entries of another index.
        """
        if policy.victim() is not None:
            raise ValueError(f"{policy!r} serves another index; each index needs its own policy")
        self.policy = policy
        self.forget = policy.forget
        self._pools = tuple(pools)
        self._clock = clock

    def touch(self, path: Sequence[Evictable], priority: int) -> None:
        """Books a match or an insert of a request along `path`, topmost first."""
        now = self._clock()
        for entry in path:
            entry.used = now
            entry.hits += 1
            if priority > entry.priority:
                entry.priority = priority
        self.policy.touch(path)

    def evict(self, group: int, num_pages: int) -> int:
        """Evicts until `num_pages` pages of a group became free or no victim can give more.

        Returns:
          How many became free.
        """
        policy, pool = self.policy, self._pools[group]
        freed, gave = 0, False
        while freed < num_pages and pool.num_cached:
            entry = policy.victim()
            if entry is not None:
                given = entry.owner.evict_from(entry, group, num_pages - freed)
                if not given:
                    policy.defer(entry)
                gave = gave or given > 0
                freed += given
            elif gave:
                policy.resume()  # an entry that was passed over for its children may have none now
                gave = False
            else:
                break
        policy.resume()
        return freed
