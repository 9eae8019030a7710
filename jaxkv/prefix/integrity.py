"""Checks that pools, index and page tables agree, by walking all of them.

This is for tests and for finding a fault; an engine does not run it.
"""

from collections import Counter
from collections.abc import Sequence

from jaxkv.arith import ceil_div
from jaxkv.prefix.index import PrefixIndex
from jaxkv.prefix.node import TOKEN, Node
from jaxkv.prefix.snapshots import Snapshot, Snapshots
from jaxkv.prefix.tables import PageTables


def check_integrity(
    index: PrefixIndex,
    tables: PageTables | None = None,
    others: Sequence[Sequence[Sequence[int]]] = (),
    snapshots: Snapshots | None = None,
) -> None:
    """Checks that all books agree.

    The trees and the snapshots must be well formed. Their pages must be those that the pools know
    as indexed, each in one place. The pages that rows hold must be those that the pools know as
    held, with the same numbers of holders. Free, cached and held pages must add up to the capacity.

    Args:
      index: the index.
      tables: the rows of its sequences; None if there are none.
      others: further holders: for each, the page ids that it holds in each group.
      snapshots: in the same pools; None if there are none.

    Raises:
      ValueError: something is wrong; the message says what.
    """
    holders = [*others, *(tables.holdings() if tables is not None else ())]
    indexed: list[Counter[int]] = [Counter() for _ in index.pools]
    for namespace, root in index.roots.items():
        if not root.children:
            raise ValueError(f"{namespace} is empty and still has a root")
    for _, node in index.nodes():
        _check_node(index, node, indexed)
    if snapshots is not None:
        for snapshot in snapshots:
            if snapshots.get(snapshot.key) is not snapshot:
                raise ValueError(f"snapshot of {snapshot.num_tokens} tokens: is not at its key")
            _check_snapshot(index, snapshot, indexed)
    for g, pool in enumerate(index.pools):
        pool.check_integrity()
        held = Counter(page for holder in holders for page in holder[g] if page)
        for page in pool.pages:
            state = (indexed[g][page], held[page])
            booked = pool.state(page)
            if state != booked:
                raise ValueError(
                    f"group {g}, page {page}: indexed and held {state} times, the pool has {booked}"
                )
        num_free = sum(1 for p in pool.pages if not indexed[g][p] and not held[p])
        num_cached = sum(1 for page in indexed[g] if not held[page])
        if (pool.num_free, pool.num_cached) != (num_free, num_cached):
            raise ValueError(f"group {g}: {num_free} pages are free and {num_cached} cached")


def _check_snapshot(index: PrefixIndex, snapshot: Snapshot, indexed: list[Counter[int]]) -> None:
    """Checks a snapshot and counts its pages in each group."""
    n = snapshot.num_tokens
    for g, (ids, length) in enumerate(zip(snapshot.pages, snapshot.lens, strict=True)):
        if not 0 <= length <= n or len(ids) != ceil_div(length, index.page_size):
            raise ValueError(f"snapshot of {n} tokens: {len(ids)} pages for {length} in group {g}")
        if 0 in ids and not index.may_lack(g):
            raise ValueError(f"snapshot of {n} tokens: lacks a page of full group {g}")
        indexed[g].update(page for page in ids if page)


def _check_node(index: PrefixIndex, node: Node, indexed: list[Counter[int]]) -> None:
    """Checks a node and its parent, and counts the node's pages in each group."""
    P, parent, where = index.page_size, node.parent, f"node at {node.start} to {node.end}"
    if parent is None or parent.children.get(node.key) is not node:
        raise ValueError(f"{where}: is not its parent's child")
    if node.end != node.start + len(node.tokens) // TOKEN:
        raise ValueError(f"{where}: has {len(node.tokens) // TOKEN} tokens")
    if node.start != parent.end or not node.tokens:
        raise ValueError(f"{where}: does not continue from {parent.end}")
    partly = node.end % P and not node.children
    num_pages = node.end // P - node.start // P + (1 if partly else 0)
    for g, ids in enumerate(node.pages):
        if len(ids) != num_pages:
            raise ValueError(f"{where}: has {len(ids)} pages in group {g}, and needs {num_pages}")
        if 0 in ids and not index.may_lack(g):
            raise ValueError(f"{where}: lacks a page of full group {g}")
        indexed[g].update(page for page in ids if page)
