"""The most that any order of eviction could find: Belady's, which knows what will be asked.

When slots are needed, those go whose next use is farthest, and of equals the deepest (L. A. Belady,
IBM Systems Journal 5:2, 1966). Slots of one prefix share their fate from one branching to the next,
so that runs of tokens are moved and not tokens: all sequences together make a fixed radix tree,
cut wherever a prompt or a sequence ends, and of each run a beginning is there.

At a granularity of P tokens only whole pages are found and kept, and sequences branch at pages.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable

from jaxkv.prefix.node import TOKEN, common_length
from jaxkv.replay.caches import Served, check_pages


class _Run:
    """Tokens between two cuts.

    Attributes:
      start, end: positions.
      tokens: packed.
      parent: the run before it; None for the empty prefix.
      children: by their first page.
      uses: requests that look it up, and are still to come.
      resident: tokens that are there, from its start.
      locked: the last request that computes with it.
    """

    __slots__ = ("children", "end", "locked", "parent", "resident", "start", "tokens", "uses")

    def __init__(self, parent: "_Run | None", start: int, tokens: bytes):
        self.parent = parent
        self.start = start
        self.end = start + len(tokens) // TOKEN
        self.tokens = tokens
        self.children: dict[bytes, _Run] = {}
        self.uses: deque[int] = deque()
        self.resident = 0
        self.locked = -1

    def path(self) -> "list[_Run]":
        """The runs up to this one's end."""
        found: list[_Run] = []
        run = self
        while run.parent is not None:
            found.append(run)
            run = run.parent
        found.reverse()
        return found


class Optimum:
    """A cache that evicts as Belady, over requests that are known beforehand."""

    def __init__(self, requests: Iterable[tuple[bytes, bytes]], capacity: int, granularity: int):
        """Reads all requests, packed prompts and answers.

        Args:
          requests: in the order in which they will be served.
          capacity: slots, rounded up to whole pages.
          granularity: tokens; 1 is exact.

        Raises:
          ReplayError: a number is out of range.
        """
        check_pages(capacity, granularity)
        self._grain = granularity
        self._free = -(-capacity // granularity) * granularity
        self._capacity = self._free
        self._root = _Run(None, 0, b"")
        self._ends: list[tuple[_Run, _Run, int]] = []  # of what is looked up, of what is computed
        self._serial = 0
        self._heap: list[tuple[float, int, int, _Run]] = []
        for prompt, answer in requests:
            computed = (prompt + answer)[:-TOKEN]
            looked_up = self._add(prompt[:-TOKEN])
            self._ends.append((looked_up, self._add(computed), len(computed) // TOKEN))
        for number, (looked_up, _, _) in enumerate(self._ends):
            for run in looked_up.path():
                run.uses.append(number)
        self._next = 0

    def serve(self, prompt: bytes, answer: bytes) -> Served:
        """Serves the next request; see PrefixCache. It must be the next one of those given."""
        number = self._next
        self._next += 1
        looked_up, computed, length = self._ends[number]
        matched = 0
        for run in looked_up.path():
            matched += run.resident
            if run.resident < run.end - run.start:
                break
        path = computed.path()
        for run in looked_up.path():
            run.uses.popleft()
            self._enter(run)
        if length > self._capacity:
            return Served(0, 0, self._capacity - self._free, refused=True)
        # Slots of a last page that is not full are taken while the request runs.
        tail = -(-length // self._grain) * self._grain - computed.end
        needed = tail + sum(run.end - run.start - run.resident for run in path)
        for run in path:
            run.locked = number
        evicted = self._evict(needed - self._free, number) if needed > self._free else 0
        for run in path:
            self._free -= run.end - run.start - run.resident
            run.resident = run.end - run.start
            self._enter(run)
        return Served(matched, evicted, self._capacity - self._free)

    def _evict(self, num_tokens: int, number: int) -> int:
        """Frees at least so many slots, whole pages at a time."""
        freed, locked = 0, []
        while freed < num_tokens:
            entry = heapq.heappop(self._heap)
            run = entry[3]
            if not run.resident or entry[0] != -_next_use(run):
                continue
            if run.locked == number:
                locked.append(entry)
                continue
            gone = min(run.resident, -(-(num_tokens - freed) // self._grain) * self._grain)
            run.resident -= gone
            freed += gone
            if run.resident:
                heapq.heappush(self._heap, entry)
        for entry in locked:
            heapq.heappush(self._heap, entry)
        self._free += freed
        return freed

    def _enter(self, run: _Run) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (-_next_use(run), -run.end, self._serial, run))

    def _add(self, tokens: bytes) -> _Run:
        """The run at whose end a sequence's last whole page ends, made or cut where it is not."""
        grain, run = self._grain, self._root
        end = len(tokens) // TOKEN // grain * grain
        while run.end < end:
            at = run.end
            key = tokens[at * TOKEN : (at + grain) * TOKEN]
            child = run.children.get(key)
            if child is None:
                child = _Run(run, at, tokens[at * TOKEN : end * TOKEN])
                run.children[key] = child
                return child
            same = common_length(child.tokens, tokens, at, end) // grain * grain
            run = child if at + same == child.end else self._cut(child, at + same)
        return run

    def _cut(self, run: _Run, at: int) -> _Run:
        """Makes the tokens before a position a run of their own, above the rest."""
        parent, grain = run.parent, self._grain
        assert parent is not None
        size = (at - run.start) * TOKEN
        upper = _Run(parent, run.start, run.tokens[:size])
        parent.children[run.tokens[: grain * TOKEN]] = upper
        run.parent, run.start, run.tokens = upper, at, run.tokens[size:]
        upper.children[run.tokens[: grain * TOKEN]] = run
        return upper


def _next_use(run: _Run) -> float:
    return run.uses[0] if run.uses else math.inf
