"""Rows of sequences that drop tokens, and the snapshots in which they share what is left.

A layer group may have fewer tokens of a sequence than the sequence has. The tokens that are left
follow one another in the group's pages, so that a group's row is as long as its own tokens need,
and the next token is written after them. `jaxkv.compress` chooses the tokens, and moves and copies
K and V on the device.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.arith import ceil_div
from jaxkv.prefix.index import PrefixIndex
from jaxkv.prefix.pool import OutOfPages
from jaxkv.prefix.snapshots import Snapshot, SnapshotKey, Snapshots
from jaxkv.prefix.tables import PageTables


class TokenDropper:
    """What page tables do only for sequences that drop tokens.

    Attributes:
      snapshots: the snapshots of such sequences; None if nothing is shared.
    """

    def __init__(self, tables: PageTables, index: PrefixIndex | None):
        """Takes the tables and the index of the same pools; None shares nothing."""
        self._tables = tables
        self.snapshots = None if index is None else Snapshots(index)

    def drop(self, row: int, num_tokens: int, lens: Mapping[int, int]) -> None:
        """Releases a row's pages in some groups and takes others, enough for the tokens left.

        Pages that others hold or that stay indexed are not among the new ones, and keep their
        content. The row's other pages may be: the caller reads all old pages before it writes.

        Args:
          row: an open row.
          num_tokens: tokens of the row's sequence, dropped ones included.
          lens: by group, how many tokens are to be left in it.

        Raises:
          OutOfPages: a group has too few pages that are free or cached; nothing is changed.
        """
        tables = self._tables
        counts = {g: ceil_div(length, tables.page_size) for g, length in lens.items()}
        for g, count in counts.items():
            self._check_room(row, g, count)
        for g in counts:  # all groups first: a leaf stays while any group's pages of it are held
            held = list(tables.held_by(row)[g])
            tables.replace(row, g, [])
            tables.pools[g].release(held)
        for g, count in counts.items():
            tables.make_free(g, count)
            tables.replace(row, g, tables.pools[g].acquire(count))
        tables.set_dropped(row, {g: num_tokens - length for g, length in lens.items()})

    def get(self, key: SnapshotKey) -> Snapshot | None:
        """Returns the snapshot of a context, or None; changes nothing."""
        return None if self.snapshots is None else self.snapshots.get(key)

    def match(
        self, row: int, key: SnapshotKey, *, priority: int = 0
    ) -> tuple[Snapshot, tuple[int, ...]] | None:
        """Fills an empty row with the snapshot of a context.

        Returns:
          The snapshot, and in each group the page to copy to the row's next page before any page is
          written; 0 for nothing to copy. None if there is no snapshot.
        """
        found = None if self.snapshots is None else self.snapshots.match(key, priority=priority)
        if found is None:
            return None
        snapshot, match = found
        dropped = [match.num_tokens - length for length in snapshot.lens]
        self._tables.set_dropped(row, dict(enumerate(dropped)))
        self._tables.fill(row, match.pages)
        return snapshot, match.sources

    def share(self, row: int, key: SnapshotKey) -> bool:
        """Exchanges the pages of a row that dropped tokens for those of the same snapshot.

        The whole pages of groups without a window are exchanged. The row keeps its pages of sliding
        groups, which the tree may have.

        Returns:
          Whether there is such a snapshot.
        """
        found = None if self.snapshots is None else self.snapshots.hold(key)
        if found is None:
            return False
        tables = self._tables
        held = tables.held_by(row)
        for g, ids in enumerate(found[1].pages):
            if g in tables.sliding:
                tables.pools[g].release(ids)
            else:
                tables.pools[g].release(held[g][: len(ids)])
                tables.replace(row, g, ids + held[g][len(ids) :])
        return True

    def copies_for_windows(self, row: int) -> dict[int, dict[int, int]] | None:
        """Takes pages for copies of a row's pages in sliding groups.

        A snapshot needs copies, because the tree has the row's own pages and a page is indexed only
        once.

        Returns:
          By group and page of the row, the page to copy it to, held by the caller. None if there
          are too few pages.
        """
        tables, copies = self._tables, {}
        try:
            for g in tables.sliding:
                own = [page for page in tables.held_by(row)[g] if page]
                tables.make_free(g, len(own))
                copies[g] = dict(zip(own, tables.pools[g].acquire(len(own)), strict=True))
        except OutOfPages:
            self._release(copies)
            return None
        return copies

    def publish(
        self,
        row: int,
        num_tokens: int,
        key: SnapshotKey,
        kept: Any,
        copies: Mapping[int, Mapping[int, int]],
        *,
        priority: int = 0,
    ) -> None:
        """Makes a snapshot of what is left of a row.

        Args:
          row: an open row that has just dropped tokens.
          num_tokens: tokens of its sequence, dropped ones included.
          key: a key that no snapshot has.
          kept: see `Snapshot`.
          copies: what `copies_for_windows` returned, after the copying; it is released.
          priority: `Request.priority` of the row's sequence.
        """
        assert self.snapshots is not None
        pages = [
            [copies[g].get(page, 0) for page in ids] if g in copies else ids
            for g, ids in enumerate(self._tables.held_by(row))
        ]
        lens = (num_tokens - self._tables.dropped[:, row]).tolist()
        self.snapshots.insert(key, pages, lens, kept, priority=priority)
        self._release(copies)

    def _check_room(self, row: int, group: int, count: int) -> None:
        """Raises OutOfPages if a row cannot have `count` pages in place of those of a group."""
        self._tables.expire_pins()
        pool, held = self._tables.pools[group], self._tables.held_by(row)[group]
        own = sum(1 for page in held if pool.state(page)[1] == 1)
        if count > pool.num_free + pool.num_cached + own:
            raise OutOfPages(f"{count} pages asked for in place of {len(held)} shared ones")

    def _release(self, copies: Mapping[int, Mapping[int, int]]) -> None:
        for g, pages in copies.items():
            self._tables.pools[g].release(list(pages.values()))
