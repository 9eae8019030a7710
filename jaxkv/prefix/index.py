"""The prefix index: which tokens have K and V in which pages, as one radix tree per namespace.

    probe     how many tokens of a prompt are cached; changes nothing
    match     the same, and the caller holds the pages
    insert    adds the pages of a sequence; where the tree has pages of the same tokens, the caller
              gets the tree's pages in exchange for its own
    evict     frees cached pages, from the tail of a leaf
    reset     frees all pages

A hit is exact to the token: whole pages are shared, and the page with the rest of the tokens can be
copied. Token ids are compared, never only a hash. The index holds no page: it marks pages as
indexed (`pool`), and those that no sequence holds may be evicted.

This is the case in which every layer group has every page. `sliding` has the index for groups that
lose pages, `snapshots` adds sequences that dropped tokens, `eviction` orders the victims, and
`tables` has the sequences.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxkv.prefix.events import Event, EventLog, StoredPage
from jaxkv.prefix.eviction import Evictable, EvictionOrder, EvictionPolicy
from jaxkv.prefix.node import TOKEN, Namespace, Node, Root, joined_pages, prefix_of
from jaxkv.prefix.policies import make_policy
from jaxkv.prefix.pool import PagePool


class Match(NamedTuple):
    """What the index has of a prompt.

    Attributes:
      num_tokens: tokens whose K and V are cached.
      pages: in each layer group the pages that are full of those tokens, held for the caller; 0
        where the group has a window and does not need the page.
      sources: in each group the page that has the rest of the tokens, which the caller copies to a
        page of its own before it writes any page; 0 if there is no rest. It is not held.
    """

    num_tokens: int
    pages: tuple[list[int], ...]
    sources: tuple[int, ...]


@dataclass
class IndexCounters:
    """What an index has done so far.

    Attributes:
      num_matches: calls of `match`.
      queried_tokens, hit_tokens: tokens of those prompts, and how many were found.
      stored_pages, evicted_pages: logical pages that were added and removed.
      freed_pages: pages that became free through `evict`, in all groups.
    """

    num_matches: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    stored_pages: int = 0
    evicted_pages: int = 0
    freed_pages: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the queried tokens that were found, 0 to 1."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    def add_match(self, queried_tokens: int, hit_tokens: int) -> None:
        """Counts a prompt."""
        self.num_matches += 1
        self.queried_tokens += queried_tokens
        self.hit_tokens += hit_tokens


class PrefixIndex:
    """Radix trees over token ids above the page pools of all layer groups.

    Attributes:
      pools: page pool of each layer group.
      page_size: P.
      clock: as given.
      roots: the tree of each namespace that has pages.
      order: the order of eviction, of nodes and of all else that has indexed pages of the pools.
      counters: what was done so far.

    Example:
      A first sequence computes 6 tokens, and a second one shares 5 of them.

      >>> from jaxkv.prefix import Namespace, PagePool, PrefixIndex, pack
      >>> pool = PagePool(num_pages=9)
      >>> index = PrefixIndex([pool], page_size=4)
      >>> public = Namespace()
      >>> pages = pool.acquire(2)  # the sequence writes its K and V there
      >>> pages
      [1, 2]
      >>> index.insert(pack([10, 11, 12, 13, 14, 15]), [pages], public)
      [[1, 2]]
      >>> pool.release(pages)  # the sequence ends, and its pages stay cached
      >>> index.probe(pack([10, 11, 12, 13, 14, 99]), public)
      5
      >>> index.match(pack([10, 11, 12, 13, 14, 99]), public)
      Match(num_tokens=5, pages=([1],), sources=(2,))
      >>> index.evict(group=0, num_pages=9)  # page 1 is held
      1
      >>> pool.release([1])
      >>> index.evict(group=0, num_pages=9)
      1
    """

    def __init__(
        self,
        pools: Sequence[PagePool],
        page_size: int,
        *,
        eviction: str | EvictionPolicy = "lru",
        events: Callable[[Event], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Makes an empty index.

        Args:
          pools: page pool of each layer group.
          page_size: P, tokens per page.
          eviction: a name in `POLICIES`, or a policy that serves no other index.
          events: called with each event as it happens; None for no events.
          clock: returns seconds.

        Raises:
          ValueError: no policy has that name, or the policy serves another index.
        """
        self.pools = tuple(pools)
        self.page_size = page_size
        self.clock = clock
        self.roots: dict[Namespace, Root] = {}
        self.order = EvictionOrder(make_policy(eviction), self.pools, clock)
        self.counters = IndexCounters()
        self._log = None if events is None else EventLog(events, page_size)

    def probe(self, tokens: bytes, namespace: Namespace) -> int:
        """Counts the tokens that a match would find; changes nothing, not even the LRU order.

        Args:
          tokens: packed.
          namespace: namespace of the sequence.
        """
        return self._walk(tokens, namespace)[1]

    def match(self, tokens: bytes, namespace: Namespace, *, priority: int = 0) -> Match:
        """Finds the longest cached prefix of a prompt and holds its pages for the caller.

        Args:
          tokens: packed, without the tokens that the caller computes in any case, such as the last
            token of a prompt.
          namespace: namespace of the sequence.
          priority: `Request.priority` of the sequence.

        Returns:
          The match; the caller must release its pages.
        """
        match = self.hold(tokens, namespace, priority=priority)
        self.counters.add_match(len(tokens) // TOKEN, match.num_tokens)
        return match

    def hold(self, tokens: bytes, namespace: Namespace, *, priority: int = 0) -> Match:
        """Does what `match` does without counting it in `counters`, as for a pin."""
        path, depth = self._walk(tokens, namespace)
        pages = self._pages_along(path, depth)
        if path and depth < path[-1].end:
            path.pop()  # the insert that follows splits this node and touches the part in use
        self.order.touch(path, priority)
        return self._share(pages, depth)

    def insert(
        self,
        tokens: bytes,
        pages: Sequence[list[int]],
        namespace: Namespace,
        *,
        priority: int = 0,
    ) -> list[list[int]]:
        """Adds the pages of a sequence's first n tokens; their slots must not be written again.

        Args:
          tokens: packed, n of them.
          pages: in each group the pages `[ceil(n / P)]`, each held by the caller.
          namespace: namespace of the sequence.
          priority: `Request.priority` of the sequence.

        Returns:
          In each group the pages that the caller holds now. Where the tree has another page of the
          same tokens, the caller holds that one and its own is released. The list is the caller's
          own where nothing was exchanged.
        """
        path, own = self._store(tokens, pages, namespace)
        self.order.touch(path, priority)
        return own

    def evict(self, group: int, num_pages: int) -> int:
        """Frees `num_pages` cached pages of a group, or as many as there are.

        Returns:
          How many became free.
        """
        freed = self.order.evict(group, num_pages)
        self.counters.freed_pages += freed
        return freed

    def reset(self) -> None:
        """Frees every page, as after a change of weights.

        Raises:
          ValueError: a sequence or a pin holds a page; nothing is changed.
        """
        num_held = sum(pool.num_held for pool in self.pools)
        if num_held:
            raise ValueError(f"{num_held} pages are in use; end all requests and pins first")
        for _, node in reversed(list(self.nodes())):  # an emptied leaf removes emptied parents
            if node.parent is not None:
                self._truncate(node, 0)
        for group, pool in enumerate(self.pools):  # pages of other entries in the order
            self.evict(group, pool.num_cached)

    def nodes(self) -> Iterator[tuple[Namespace, Node]]:
        """Iterates over all nodes, parents before their children."""
        for namespace, root in self.roots.items():
            stack = list(root.children.values())
            while stack:
                node = stack.pop()
                yield namespace, node
                stack.extend(node.children.values())

    def stored(self) -> set[StoredPage]:
        """Returns all pages of the trees; `events.replay` rebuilds the same from the events."""
        P, found = self.page_size, set()
        for namespace, node in self.nodes():
            tokens = prefix_of(node)
            columns = zip(*node.pages, strict=True)
            for logical, ids in enumerate(columns, node.start // P):
                found.add((namespace, tokens[: (logical + 1) * P], ids))
        return found

    def may_lack(self, group: int) -> bool:
        """Whether nodes may have lost pages of a group; none has here."""
        return False

    def evict_from(self, entry: Evictable, group: int, num_pages: int) -> int:
        """Evicts the end of a leaf, as far as no page is held; see `Owner.evict_from`."""
        assert isinstance(entry, Node)
        if entry.children:
            return 0
        count = min(num_pages, entry.num_pages)
        for g, ids in enumerate(entry.pages):
            count = self.pools[g].unheld_tail(ids, count)
        if count:
            self._truncate(entry, entry.num_pages - count)
        return count

    def _walk(self, tokens: bytes, namespace: Namespace) -> tuple[list[Node], int]:
        """See `Root.walk`."""
        root = self.roots.get(namespace)
        return ([], 0) if root is None else root.walk(tokens)

    def _pages_along(self, path: list[Node], depth: int) -> list[list[int]]:
        """In each group the pages of the first `depth` tokens, the last one partly filled or not,
        and those after them in the last node of `path`."""
        pages = [joined_pages(path, g) for g in range(len(self.pools))]
        if depth % self.page_size and len(pages[0]) <= depth // self.page_size:
            node = _first_child(path[-1])  # every branch below has the page
            while not node.num_pages:
                node = _first_child(node)
            for g, ids in enumerate(pages):
                ids.append(node.pages[g][0])
        return pages

    def _share(self, pages: list[list[int]], num_tokens: int) -> Match:
        """Holds the whole pages of the first tokens."""
        whole, rest = divmod(num_tokens, self.page_size)
        sources = tuple([ids[whole] if rest else 0 for ids in pages])
        for pool, ids in zip(self.pools, pages, strict=True):
            del ids[whole:]
            pool.share(ids)
        return Match(num_tokens, tuple(pages), sources)

    def _store(
        self, tokens: bytes, pages: Sequence[list[int]], namespace: Namespace
    ) -> tuple[list[Node], list[list[int]]]:
        """Inserts; returns the nodes along the tokens, and the pages that the caller holds now."""
        path, depth = self._walk(tokens, namespace)
        own = list(pages)
        cut = depth // self.page_size
        for g, ids in enumerate(pages if cut else ()):
            mine, theirs = ids[:cut], joined_pages(path, g)[:cut]
            if mine != theirs:
                own[g] = self._exchange(g, path, mine, theirs) + ids[cut:]
        if depth < len(tokens) // TOKEN:
            top = path[-1] if path else self._root(namespace)
            if depth < top.end:
                path[-1] = top = top.split(depth, self.page_size)
            leaf = self._grow(top, tokens, [ids[cut:] for ids in own])
            if self._log is not None:
                self._log.stored(leaf, tokens, len(own[0]) - cut, namespace)
            if leaf is not top:
                path.append(leaf)
        return path, own

    def _root(self, namespace: Namespace) -> Root:
        if namespace not in self.roots:
            self.roots[namespace] = Root(self, namespace, len(self.pools))
        return self.roots[namespace]

    def _exchange(
        self, group: int, path: list[Node], mine: list[int], theirs: list[int]
    ) -> list[int]:
        """Gives a caller the tree's pages, which are along `path`, for its own of the same tokens.

        Returns:
          The pages that the caller holds now.
        """
        differ = [(a, b) for a, b in zip(mine, theirs, strict=True) if a != b]
        self.pools[group].share([b for _, b in differ])
        self.pools[group].release([a for a, _ in differ])
        return theirs

    def _grow(self, top: Node, tokens: bytes, rest: list[list[int]]) -> Node:
        """Adds the tokens after `top` with their pages `rest`; returns the node that has them."""
        start = top.end
        whole = start // self.page_size - top.start // self.page_size
        if top.num_pages > whole:  # partly filled; the first page of `rest` has its tokens too
            self._remove_pages(top, whole)
        for pool, ids in zip(self.pools, rest, strict=True):
            pool.mark_indexed(ids)
        self.counters.stored_pages += len(rest[0])
        if top.children or top.parent is None or self._keeps_ends():
            leaf = Node(self, top, start, tokens[start * TOKEN :], rest)
            leaf.born = self.clock()
            top.children[leaf.key] = leaf
            return leaf
        top.tokens += tokens[start * TOKEN :]
        top.end = len(tokens) // TOKEN
        for g, ids in enumerate(rest):
            top.pages[g] += ids
        return top

    def _keeps_ends(self) -> bool:
        """Whether a sequence that goes on after a leaf gets a node of its own."""
        return False

    def _truncate(self, leaf: Node, num_pages: int) -> None:
        """Removes all but the first `num_pages` pages of a leaf, and the tokens in them.

        A leaf without tokens is removed. Its parent may then be a leaf, whose tokens after its last
        whole page were in the pages that are gone.
        """
        self._remove_pages(leaf, num_pages)
        node: Node = leaf
        end = (leaf.start // self.page_size + num_pages) * self.page_size
        while node.parent is not None and not node.children and end < node.end:
            if end > node.start:
                node.tokens, node.end = node.tokens[: (end - node.start) * TOKEN], end
                break
            parent = node.parent
            del parent.children[node.key]
            self._forget(node)
            node.parent = None
            node, end = parent, parent.end // self.page_size * self.page_size
        if isinstance(node, Root) and not node.children:
            del self.roots[node.namespace]

    def _remove_pages(self, node: Node, num_pages: int) -> None:
        """Removes all but the first `num_pages` pages of a node from the index."""
        self.counters.evicted_pages += node.num_pages - num_pages
        if self._log is not None:
            self._log.evicted(node, num_pages)
        for g, ids in enumerate(node.pages):
            self.pools[g].unmark_indexed(ids[num_pages:])
            del ids[num_pages:]

    def _forget(self, node: Node) -> None:
        """Books that a node is gone; its parent is still known."""
        self.order.forget(node)


def _first_child(node: Node) -> Node:
    return next(iter(node.children.values()))
