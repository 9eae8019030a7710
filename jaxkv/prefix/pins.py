"""Pins: prefixes that stay in the index for some time, in use or not, such as a system prompt.

A pin holds pages as a sequence does, so that they are not evicted. All pins together hold at most a
share of each pool, and each pin ends after its time.
"""

import math
from collections import Counter
from dataclasses import dataclass

from jaxkv.prefix.index import PrefixIndex
from jaxkv.prefix.node import TOKEN, Namespace


@dataclass(frozen=True, eq=False)
class Pin:
    """A prefix that is not evicted until the pin ends.

    Attributes:
      num_tokens: its length in tokens: as many of those asked for as were in the index.
      expires: clock at which it ends, in seconds.
    """

    num_tokens: int
    expires: float


class Pins:
    """The pins in an index; `PageTables` end expired ones when they need pages.

    Attributes:
      max_pages: how many pages of each group may be pinned.
    """

    def __init__(self, index: PrefixIndex, *, max_share: float = 0.5):
        """Makes an empty set of pins.

        Args:
          index: has the prefixes and the clock.
          max_share: share of each pool's pages that may be pinned, 0 to 1.

        Raises:
          ValueError: max_share is out of range.
        """
        if not 0 <= max_share <= 1:
            raise ValueError(f"max_share = {max_share}: a share is from 0 to 1")
        self.max_pages = tuple(int(pool.capacity * max_share) for pool in index.pools)
        self._index = index
        self._held: dict[Pin, list[list[int]]] = {}
        self._pinned: list[Counter[int]] = [Counter() for _ in index.pools]
        self._next_end = math.inf  # the earliest `expires`

    def pin(self, tokens: bytes, namespace: Namespace, *, ttl_seconds: float) -> Pin:
        """Holds the pages that the index has of a prefix.

        In a sliding group these are the pages that the token after the prefix sees. A page under
        several pins counts once for the limit.

        Args:
          tokens: packed.
          namespace: namespace of the prefix.
          ttl_seconds: how long the pin lasts.

        Raises:
          ValueError: the time is not positive, or too many pages would be pinned; nothing is.
          TypeError: the tokens are not packed (`jaxkv.prefix.pack`).
        """
        if not isinstance(tokens, bytes) or len(tokens) % TOKEN:
            raise TypeError("tokens must be packed: jaxkv.prefix.pack(ids)")
        if not ttl_seconds > 0:
            raise ValueError(f"ttl_seconds = {ttl_seconds}: a pin lasts longer than no time")
        self.expire()
        found = self._index.hold(tokens, namespace)
        held = [[page for page in ids if page] for ids in found.pages]
        for pool, ids, source in zip(self._index.pools, held, found.sources, strict=True):
            if source:
                pool.share([source])
                ids.append(source)
        for g, ids in enumerate(held):
            num_new = sum(1 for page in ids if page not in self._pinned[g])
            num_pinned = len(self._pinned[g])
            if num_pinned + num_new > self.max_pages[g]:
                self._release(held)
                raise ValueError(
                    f"the prefix needs {num_new} pages of group {g}; {num_pinned} are pinned, and "
                    f"{self.max_pages[g]} may be: unpin others, or raise max_share"
                )
        pin = Pin(found.num_tokens, self._index.clock() + ttl_seconds)
        for pinned, ids in zip(self._pinned, held, strict=True):
            pinned.update(ids)
        self._held[pin] = held
        self._next_end = min(self._next_end, pin.expires)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Ends a pin; does nothing if it has ended."""
        held = self._held.pop(pin, None)
        if held is None:
            return
        for pinned, ids in zip(self._pinned, held, strict=True):
            for page in ids:
                pinned[page] -= 1
                if not pinned[page]:
                    del pinned[page]
        self._release(held)
        self._next_end = min((pin.expires for pin in self._held), default=math.inf)

    def expire(self) -> None:
        """Ends the pins whose time is over."""
        now = self._index.clock()
        if now >= self._next_end:
            for pin in [pin for pin in self._held if pin.expires <= now]:
                self.unpin(pin)

    def num_pinned(self, group: int) -> int:
        """How many pages of a group are pinned."""
        return len(self._pinned[group])

    def holdings(self) -> list[list[list[int]]]:
        """What each pin holds, in each group; for `check_integrity`."""
        return list(self._held.values())

    def _release(self, held: list[list[int]]) -> None:
        for pool, ids in zip(self._index.pools, held, strict=True):
            pool.release(ids)
