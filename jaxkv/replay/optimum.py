"""The largest number of hits that any order of eviction can reach: Belady's order, which knows the
future requests.

When slots are needed, those with the farthest next use are evicted first, and of equal ones the
deepest (L. A. Belady, IBM Systems Journal 5:2, 1966). Only a lookup is a use: tokens that a request
computes in any case, such as those of its answer, need not be kept for it.

The tokens of a prefix between two branches are always used together, so the simulation moves runs
of tokens and not single tokens. All sequences together make a fixed radix tree, cut where a prompt
or a sequence ends. The tokens that the cache holds of a run are always the first ones.

With a granularity of P tokens only whole pages are found and kept, and sequences branch at pages.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable

from jaxkv.arith import round_up
from jaxkv.prefix.node import TOKEN, common_length
from jaxkv.replay.caches import Served, check_pages

_ANYWAY = -1  # in place of the number of a request


class _Run:
    """Tokens between two cuts.

    Attributes:
      start: position of the first token.
      end: position after the last token.
      tokens: packed tokens.
      parent: the run before this one; None for the empty prefix.
      children: the runs after this one, by their first page.
      coming: future requests in order: the number of one that looks the run up, `_ANYWAY` for one
        that computes it in any case.
      resident: number of its first tokens that the cache holds.
      locked: number of the last request that used it.
    """

    __slots__ = ("children", "coming", "end", "locked", "parent", "resident", "start", "tokens")

    def __init__(self, parent: "_Run | None", start: int, tokens: bytes):
        self.parent = parent
        self.start = start
        self.end = start + len(tokens) // TOKEN
        self.tokens = tokens
        self.children: dict[bytes, _Run] = {}
        self.coming: deque[int] = deque()
        self.resident = 0
        self.locked = -1

    def path(self) -> "list[_Run]":
        """Returns the runs from the root to this one."""
        found: list[_Run] = []
        run = self
        while run.parent is not None:
            found.append(run)
            run = run.parent
        found.reverse()
        return found


class Optimum:
    """A cache that evicts in Belady's order; it knows all requests in advance."""

    def __init__(self, requests: Iterable[tuple[bytes, bytes]], capacity: int, granularity: int):
        """Reads all requests, packed prompts and answers.

        Args:
          requests: in the order in which they will be served.
          capacity: slots, rounded up to whole pages.
          granularity: tokens per page; 1 makes hits exact to the token.

        Raises:
          ReplayError: a number is out of range.
        """
        check_pages(capacity, granularity)
        self._grain = granularity
        self._free = round_up(capacity, granularity)
        self._capacity = self._free
        self._root = _Run(None, 0, b"")
        # For each request the last run looked up, the last run computed, and the tokens computed.
        self._ends: list[tuple[_Run, _Run, int]] = []
        self._serial = 0
        self._heap: list[tuple[float, int, int, _Run]] = []
        for prompt, answer in requests:
            computed = (prompt + answer)[:-TOKEN]
            looked_up = self._add(prompt[:-TOKEN])
            self._ends.append((looked_up, self._add(computed), len(computed) // TOKEN))
        for number, (looked_up, end, length) in enumerate(self._ends):
            for run in end.path() if length <= self._capacity else ():
                run.coming.append(number if run.end <= looked_up.end else _ANYWAY)
        self._next = 0

    def serve(self, prompt: bytes, answer: bytes) -> Served:
        """See PrefixCache; the request must be the next one of those given."""
        number = self._next
        self._next += 1
        looked_up, computed, length = self._ends[number]
        if length > self._capacity:
            return Served(0, 0, self._capacity - self._free, refused=True)
        matched = 0
        for run in looked_up.path():
            matched += run.resident
            if run.resident < run.end - run.start:
                break
        path = computed.path()
        # The rest of the last page is allocated while the request runs.
        tail = round_up(length, self._grain) - computed.end
        needed = tail + sum(run.end - run.start - run.resident for run in path)
        for run in path:
            run.coming.popleft()
            run.locked = number
        evicted = self._evict(needed - self._free, number) if needed > self._free else 0
        for run in path:
            self._free -= run.end - run.start - run.resident
            run.resident = run.end - run.start
            self._enter(run)
        return Served(matched, evicted, self._capacity - self._free)

    def _evict(self, num_tokens: int, number: int) -> int:
        """Frees at least `num_tokens` slots, in whole pages; returns how many."""
        freed, locked = 0, []
        while freed < num_tokens:
            entry = heapq.heappop(self._heap)
            run = entry[3]
            if not run.resident or entry[0] != -_next_use(run):
                continue
            if run.locked == number:
                locked.append(entry)
                continue
            gone = min(run.resident, round_up(num_tokens - freed, self._grain))
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
        """Returns the run that ends with the last whole page of a sequence; makes or cuts runs so
        that there is one."""
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
        """Splits a run at a position; returns the first part, the parent of the rest."""
        parent, grain = run.parent, self._grain
        assert parent is not None
        size = (at - run.start) * TOKEN
        upper = _Run(parent, run.start, run.tokens[:size])
        parent.children[run.tokens[: grain * TOKEN]] = upper
        run.parent, run.start, run.tokens = upper, at, run.tokens[size:]
        upper.children[run.tokens[: grain * TOKEN]] = run
        return upper


def _next_use(run: _Run) -> float:
    """Returns the next request that looks a run up; infinity if there is none."""
    return run.coming[0] if run.coming and run.coming[0] != _ANYWAY else math.inf
