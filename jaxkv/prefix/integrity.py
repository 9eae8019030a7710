"""What must hold of pools, index and page tables together, found by walking all of them.

For tests and for finding a fault; nothing here runs while an engine does.
"""

from collections import Counter
from collections.abc import Sequence

from jaxkv.prefix.index import PrefixIndex
from jaxkv.prefix.node import TOKEN, Node
from jaxkv.prefix.snapshots import Snapshot
from jaxkv.prefix.tables import PageTables


def check_integrity(
    index: PrefixIndex,
    tables: PageTables | None = None,
    others: Sequence[Sequence[Sequence[int]]] = (),
) -> None:
    """Checks that everybody's books agree.

    The tree and the snapshots are well formed; the pages that they have are those that the pools
    know as kept, each in one place; the pages that rows hold are those that the pools know as held,
    as often; free, cached and held pages add up to the capacity.

    Args:
      index: the index.
      tables: the rows of its sequences; None where there are none.
      others: further holders: for each, the page ids that it holds in each group.

    Raises:
      ValueError: naming what is wrong.
    """
    holders = [*others, *(tables.holdings() if tables is not None else ())]
    kept: list[Counter[int]] = [Counter() for _ in index.pools]
    for namespace, root in index.roots.items():
        if not root.children:
            raise ValueError(f"{namespace} is empty and still has a root")
    for _, node in index.nodes():
        _check_node(index, node, kept)
    for snapshot in index.snapshots:
        _check_snapshot(index, snapshot, kept)
    for g, pool in enumerate(index.pools):
        pool.check_integrity()
        held = Counter(page for holder in holders for page in holder[g] if page)
        for page in pool.pages:
            state = (kept[g][page], held[page])
            booked = pool.state(page)
            if state != booked:
                raise ValueError(
                    f"group {g}, page {page}: kept and held {state} times, the pool says {booked}"
                )
        num_free = sum(1 for p in pool.pages if not kept[g][p] and not held[p])
        num_cached = sum(1 for page in kept[g] if not held[page])
        if (pool.num_free, pool.num_cached) != (num_free, num_cached):
            raise ValueError(f"group {g}: {num_free} pages are free and {num_cached} cached")


def _check_snapshot(index: PrefixIndex, snapshot: Snapshot, kept: list[Counter[int]]) -> None:
    """Checks a snapshot by itself, and counts its pages in each group."""
    n = snapshot.num_tokens
    if index.snapshots.get(snapshot.found_by) is not snapshot:
        raise ValueError(f"snapshot of {n} tokens: is not where its key leads")
    for g, (ids, length) in enumerate(zip(snapshot.pages, snapshot.lens, strict=True)):
        if not 0 <= length <= n or len(ids) != -(-length // index.page_size):
            raise ValueError(f"snapshot of {n} tokens: {len(ids)} pages for {length} in group {g}")
        if index.windows[g] is None and 0 in ids:
            raise ValueError(f"snapshot of {n} tokens: lacks a page of full group {g}")
        kept[g].update(page for page in ids if page)


def _check_node(index: PrefixIndex, node: Node, kept: list[Counter[int]]) -> None:
    """Checks a node against its parent, and counts its pages in each group."""
    P, parent, where = index.page_size, node.parent, f"node at {node.start} to {node.end}"
    if parent is None or parent.children.get(node.key) is not node:
        raise ValueError(f"{where}: parent and child do not know each other")
    if node.end != node.start + len(node.tokens) // TOKEN:
        raise ValueError(f"{where}: has {len(node.tokens) // TOKEN} tokens")
    if node.start != parent.end or not node.tokens:
        raise ValueError(f"{where}: does not go on from {parent.end}")
    partly = node.end % P and not node.children
    num_pages = node.end // P - node.start // P + (1 if partly else 0)
    for g, ids in enumerate(node.pages):
        if len(ids) != num_pages:
            raise ValueError(f"{where}: has {len(ids)} pages in group {g}, and needs {num_pages}")
        if index.windows[g] is None and 0 in ids:
            raise ValueError(f"{where}: lacks a page of full group {g}")
        kept[g].update(page for page in ids if page)
