"""The prefix index: which tokens have K and V in which pages, as a radix tree for each namespace.

    probe     how many tokens of a prompt are here; changes nothing
    match     the same, and the pages are held for the caller
    insert    a sequence's pages become known; where the tree has them already, the caller gets
              the tree's pages for its own
    evict     cached pages become free, a page at a time from the tail of a leaf

A hit is token-exact: whole pages are shared, and of one more page the matching part is there to be
copied. What is compared is token ids, never a hash. The index itself holds no page: it marks pages
as kept (`pool`), and those that no sequence holds may be evicted.

A hit is as long as every layer group can serve. Not here: what sliding groups keep (`sliding`),
what is left of contexts that lost tokens (`snapshots`), which leaf is evicted first (`policies`),
sequences (`tables`).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxkv.prefix.events import Event, EventLog, StoredPage
from jaxkv.prefix.node import (
    TOKEN,
    Namespace,
    Node,
    Root,
    common_length,
    prefix_of,
)
from jaxkv.prefix.policies import LRU, EvictionPolicy
from jaxkv.prefix.pool import PagePool
from jaxkv.prefix.sliding import SlidingGroups
from jaxkv.prefix.snapshots import Snapshot, SnapshotKey, Snapshots


class Match(NamedTuple):
    """What the index has of a prompt.

    Attributes:
      num_tokens: tokens whose K and V are here.
      pages: in each group the pages of the whole pages among them, held for the caller; 0 before
        a sliding group's window.
      sources: in each group the page that holds the rest of the tokens, to be copied before any
        other page is written; 0 where there is no rest. Not held.
    """

    num_tokens: int
    pages: tuple[list[int], ...]
    sources: tuple[int, ...]


@dataclass
class IndexCounters:
    """What an index has done so far, in tokens and pages.

    Attributes:
      num_matches: prompts looked up by `match`.
      queried_tokens, hit_tokens: their tokens, and those found.
      stored_pages, evicted_pages: logical pages that came and went.
    """

    num_matches: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    stored_pages: int = 0
    evicted_pages: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the looked-up tokens that were found."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


class PrefixIndex:
    """Radix trees over token ids, one a namespace, above the pools of all layer groups.

    Attributes:
      pools, page_size, windows, sink_pages: as given.
      clock: as given.
      roots: the tree of each namespace that has pages.
      snapshots: of contexts that lost tokens; no tree has them.
      counters: what was done so far.
    """

    def __init__(
        self,
        pools: Sequence[PagePool],
        page_size: int,
        windows: Sequence[int | None] | None = None,
        sink_pages: Sequence[int] | None = None,
        *,
        policy: EvictionPolicy | None = None,
        events: Callable[[Event], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Makes an empty index.

        Args:
          pools: of each layer group.
          page_size: P.
          windows: of each group; None for a group that sees all. By default all do.
          sink_pages: of each group, pages at the beginning that its window does not move past; by
            default none.
          policy: order of eviction; LRU by default.
          events: called with each event as it happens.
          clock: seconds.
        """
        self.pools = tuple(pools)
        self.page_size = page_size
        self.windows = tuple(windows) if windows is not None else (None,) * len(self.pools)
        self.roots: dict[Namespace, Root] = {}
        self.counters = IndexCounters()
        self._policy = policy or LRU()
        self._log = None if events is None else EventLog(events, page_size)
        self.sink_pages = tuple(sink_pages) if sink_pages is not None else (0,) * len(self.pools)
        self._sliding = SlidingGroups(
            self.pools, self.windows, self.sink_pages, page_size, self._log
        )
        self._slides = bool(self._sliding.windows)
        # Whoever holds a leaf's page in any group holds it in these.
        full = [g for g, window in enumerate(self.windows) if window is None]
        self._guarding = full or list(range(len(self.pools)))
        self.clock = clock
        self.snapshots = Snapshots(self.pools, page_size, self._policy, clock)

    def probe(self, tokens: bytes, namespace: Namespace) -> int:
        """How many of `tokens` (packed) a match would find; changes nothing, LRU order included."""
        path, depth = self._walk(namespace, tokens)
        return self._usable(path, depth)[0] if self._slides else depth

    def match(self, tokens: bytes, namespace: Namespace, *, priority: int = 0) -> Match:
        """Finds the longest prefix of `tokens` (packed) that is here, and holds its pages.

        The caller leaves out of `tokens` what it wants to compute in any case, as the last token
        of a prompt. Whoever got a Match must release its pages.
        """
        found = self.hold(tokens, namespace, priority=priority)
        counters = self.counters
        counters.num_matches += 1
        counters.queried_tokens += len(tokens) // TOKEN
        counters.hit_tokens += found.num_tokens
        return found

    def hold(self, tokens: bytes, namespace: Namespace, *, priority: int = 0) -> Match:
        """The same for what is no prompt: it does not count in `counters`."""
        path, depth = self._walk(namespace, tokens)
        num_tokens, joined = self._usable(path, depth)
        if path and depth < path[-1].end:
            path.pop()  # the insert that follows splits it, and touches what is in use
        self._touch(path, priority)
        whole, rest = divmod(num_tokens, self.page_size)
        sources = tuple([ids[whole] if rest else 0 for ids in joined])
        for g, ids in enumerate(joined):
            del ids[whole:]
            if self.windows[g] is None:
                self.pools[g].share(ids)
            else:
                for place in self._sliding.not_needed(g, num_tokens):
                    ids[place] = 0
                self.pools[g].share([page for page in ids if page])
        return Match(num_tokens, tuple(joined), sources)

    def insert(
        self,
        tokens: bytes,
        pages: Sequence[list[int]],
        namespace: Namespace,
        *,
        priority: int = 0,
    ) -> list[list[int]]:
        """Makes the pages of a sequence's first tokens known.

        Args:
          tokens: packed; n of them.
          pages: in each group the pages `[ceil(n / P)]`, each held by the caller; 0 where a
            sliding group has let one go.
          namespace: of the sequence.
          priority: of its request.

        Returns:
          The pages that the caller holds now: where the tree has another page of the same tokens,
          that one is held, and the caller's own is released. A group's own list where none was.
        """
        path, depth = self._walk(namespace, tokens)
        own = list(pages)
        cut = depth // self.page_size
        if cut:
            self._exchange(path, own, cut)
        if depth < len(tokens) // TOKEN:
            top = path[-1] if path else self._root(namespace)
            if depth < top.end:
                path[-1] = top = top.split(depth, self.page_size)
            leaf = self._grow(top, tokens, [ids[cut:] for ids in own])
            if self._log is not None:
                self._log.stored(leaf, tokens, len(own[0]) - cut, namespace)
            if leaf is not top:
                path.append(leaf)
        self._touch(path, priority)
        if self._slides:
            self._sliding.enter(path)
        return own

    def hold_snapshot(
        self, key: SnapshotKey, *, priority: int = 0
    ) -> tuple[Snapshot, list[list[int]], tuple[int, ...]] | None:
        """`Snapshots.hold`, counted as a match that found all where it finds anything."""
        found = self.snapshots.hold(key, priority=priority)
        if found is not None:
            self.counters.num_matches += 1
            self.counters.queried_tokens += found[0].num_tokens
            self.counters.hit_tokens += found[0].num_tokens
        return found

    def insert_snapshot(
        self,
        key: SnapshotKey,
        pages: Sequence[list[int]],
        lens: Sequence[int],
        kept: Any,
        *,
        priority: int = 0,
    ) -> None:
        """See `Snapshots.insert`."""
        snapshot = self.snapshots.insert(key, pages, lens, kept, priority=priority)
        self.counters.stored_pages += snapshot.num_pages

    def evict(self, group: int, num_pages: int) -> int:
        """Lets cached pages of a group go until `num_pages` of them are free, or none is cached.

        Returns:
          How many became free.
        """
        pool, freed = self.pools[group], 0
        if self.windows[group] is not None:
            freed = self._sliding.evict_behind(group, num_pages)
        gave = False
        while freed < num_pages and pool.num_cached:
            node = self._policy.victim()
            if node is None:
                if not gave:
                    break
                self._policy.resume()  # who was passed over for its children may have none by now
                gave = False
                continue
            given = self._evict_from(node, group, num_pages - freed)
            if given:
                gave = True
            else:
                self._policy.defer(node)
            freed += given
        self._policy.resume()
        if freed < num_pages and self.windows[group] is not None:
            for _, node in self.nodes():  # above pages in use, where no leaf can give
                every = range(node.num_pages)
                freed += self._sliding.let_go(node, group, every, num_pages - freed)[0]
        return freed

    def reset(self) -> None:
        """Lets every page go, as after a change of weights.

        Raises:
          ValueError: a page is held by a sequence or a pin; nothing is changed.
        """
        num_held = sum(pool.num_held for pool in self.pools)
        if num_held:
            raise ValueError(f"{num_held} pages are in use; end all requests and pins first")
        for _, node in reversed(list(self.nodes())):  # a leaf takes with it what it alone covered
            if node.parent is not None:
                self._truncate(node, 0)
        for snapshot in self.snapshots:
            self._drop_snapshot(snapshot)

    def nodes(self) -> Iterator[tuple[Namespace, Node]]:
        """All nodes, those above before those below."""
        for namespace, root in self.roots.items():
            stack = list(root.children.values())
            while stack:
                node = stack.pop()
                yield namespace, node
                stack.extend(node.children.values())

    def stored(self) -> set[StoredPage]:
        """All pages that are kept; what `events.replay` rebuilds."""
        P, found = self.page_size, set()
        for namespace, node in self.nodes():
            tokens = prefix_of(node)
            columns = zip(*node.pages, strict=True)
            for logical, ids in enumerate(columns, node.start // P):
                found.add((namespace, tokens[: (logical + 1) * P], ids))
        return found

    def _walk(self, namespace: Namespace, tokens: bytes) -> tuple[list[Node], int]:
        """The nodes along the longest prefix of `tokens` that is here, and its length."""
        path: list[Node] = []
        at, end = 0, len(tokens)
        node: Node | None = self.roots.get(namespace)
        while node is not None and at < end:
            node = node.children.get(tokens[at : at + TOKEN])
            if node is not None:
                path.append(node)
                if not tokens.startswith(node.tokens, at):
                    depth = at // TOKEN
                    return path, depth + common_length(node.tokens, tokens, depth, end // TOKEN)
                at += len(node.tokens)
        return path, at // TOKEN

    def _usable(self, path: list[Node], depth: int) -> tuple[int, list[list[int]]]:
        """How much of a prefix every group can serve, and in each group the pages along it.

        Those are the whole pages, and where tokens are left over the page that holds them.
        """
        joined = [_joined(path, g) for g in range(len(self.pools))]
        if depth % self.page_size and len(joined[0]) <= depth // self.page_size:
            node = _first_child(path[-1])  # every branch below has the page
            while not node.num_pages:
                node = _first_child(node)
            for g, ids in enumerate(joined):
                ids.append(node.pages[g][0])
        return self._sliding.usable(joined, depth) if self._slides else depth, joined

    def _touch(self, path: list[Node], priority: int) -> None:
        now = self.clock()
        for node in path:
            node.used = now
            node.hits += 1
            if priority > node.priority:
                node.priority = priority
        self._policy.touch(path)

    def _root(self, namespace: Namespace) -> Root:
        if namespace not in self.roots:
            self.roots[namespace] = Root(namespace, len(self.pools))
        return self.roots[namespace]

    def _exchange(self, path: list[Node], own: list[list[int]], cut: int) -> None:
        """Gives a caller the tree's pages for its own of the same tokens, its first `cut` pages,
        and the tree the caller's where a sliding group has none."""
        for g, pool in enumerate(self.pools):
            mine, theirs = own[g][:cut], _joined(path, g)[:cut]
            if mine == theirs:
                continue
            pairs = list(zip(mine, theirs, strict=True))
            taken = [(a, b) for a, b in pairs if a and b and a != b]
            pool.share([b for _, b in taken])
            pool.release([a for a, _ in taken])
            lost = {k: a for k, (a, b) in enumerate(pairs) if a and not b}
            if lost:
                self._sliding.take_back(path, g, lost)
            own[g] = [b if a and b else a for a, b in pairs] + own[g][cut:]

    def _grow(self, top: Node, tokens: bytes, rest: list[list[int]]) -> Node:
        """Adds the tokens after `top` with their pages `rest`; returns the node that has them."""
        start = top.end
        whole = start // self.page_size - top.start // self.page_size
        if top.num_pages > whole:  # partly filled; the first of `rest` has its tokens too
            self._drop_pages(top, whole)
        for g, pool in enumerate(self.pools):
            pool.keep([page for page in rest[g] if page] if self._slides else rest[g])
        self.counters.stored_pages += len(rest[0])
        if top.children or top.parent is None or self._slides:
            # Where a window slides, an end stays an end: the pages behind it are kept for a replay.
            leaf = Node(top, start, tokens[start * TOKEN :], rest)
            leaf.born = self.clock()
            top.children[leaf.key] = leaf
            return leaf
        top.tokens += tokens[start * TOKEN :]
        top.end = len(tokens) // TOKEN
        for g, ids in enumerate(rest):
            top.pages[g] += ids
        return top

    def _drop_pages(self, node: Node, keep: int) -> None:
        """Lets go of a node's pages but for the first `keep`."""
        self.counters.evicted_pages += node.num_pages - keep
        if self._log is not None:
            self._log.evicted(node, keep)
        for g, ids in enumerate(node.pages):
            gone = ids[keep:]
            self.pools[g].drop([page for page in gone if page] if self._slides else gone)
            del ids[keep:]

    def _truncate(self, leaf: Node, keep: int) -> None:
        """Lets go of a leaf's pages but for the first `keep`, and of the tokens in them.

        A leaf without tokens goes; its parent may be a leaf then, and what that one has after its
        last whole page stood in the pages that went.
        """
        self._drop_pages(leaf, keep)
        node: Node = leaf
        end = (leaf.start // self.page_size + keep) * self.page_size
        while node.parent is not None and not node.children and end < node.end:
            if end > node.start:
                node.tokens, node.end = node.tokens[: (end - node.start) * TOKEN], end
                break
            parent = node.parent
            del parent.children[node.key]
            self._policy.forget(node)
            self._sliding.forget(node)
            node.parent = None
            node, end = parent, parent.end // self.page_size * self.page_size
        if isinstance(node, Root) and not node.children:
            del self.roots[node.namespace]

    def _drop_snapshot(self, snapshot: Snapshot) -> None:
        self.counters.evicted_pages += snapshot.num_pages
        self.snapshots.drop(snapshot)

    def _evict_from(self, node: Node, group: int, num_pages: int) -> int:
        """Lets pages of a victim go, of a snapshot all.

        Returns:
          How many of the group became free.
        """
        if isinstance(node, Snapshot):
            freed = self.snapshots.num_unheld(node, group)
            if freed:
                self._drop_snapshot(node)
            return freed
        return 0 if node.children else self._evict_tail(node, group, num_pages)

    def _evict_tail(self, leaf: Node, group: int, num_pages: int) -> int:
        """Truncates a leaf until `num_pages` of a group are free, or what is left is held.

        A row that lost tokens holds pages of windows alone, and keeps them when the leaf goes.
        """
        most = leaf.num_pages if self._slides else min(num_pages, leaf.num_pages)
        for g in self._guarding:
            most = self.pools[g].unheld_tail(leaf.pages[g], most)
            if not most:
                return 0
        freed = most
        if self._slides:
            tail = leaf.pages[group][-most:]
            is_held = self.pools[group].is_held
            there = [i for i, page in enumerate(tail) if page and not is_held(page)][-num_pages:]
            if not there:
                return 0
            freed, most = len(there), most - there[0]
        self._truncate(leaf, leaf.num_pages - most)
        return freed


def _joined(path: list[Node], group: int) -> list[int]:
    """The pages along a path."""
    joined: list[int] = []
    for node in path:
        joined += node.pages[group]
    return joined


def _first_child(node: Node) -> Node:
    return next(iter(node.children.values()))
