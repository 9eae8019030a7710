"""Snapshots with rows, trees, pins and eviction, in any order of operations: the accounts agree,
every slot that a row reads has the right token, and a row is shortened if it fits into the pool
with what others hold.
"""

import random
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import pytest

from jaxkv.prefix import (
    POLICIES,
    Namespace,
    OutOfPages,
    PageTables,
    Pins,
    SnapshotKey,
    TokenDropper,
    check_integrity,
    make_index,
    make_pool,
    pack,
)

P, PUBLIC = 4, Namespace()


@dataclass
class Row:
    """A sequence; for each group, the position that each slot holds."""

    row: int
    tokens: list[int]
    context: int
    num_computed: int = 0
    slots: list[list[int]] = field(default_factory=list)

    @property
    def key(self) -> SnapshotKey:
        return SnapshotKey(pack(self.tokens[: self.context]), PUBLIC, "m", self.context)


class World:
    """Two full groups that lose different numbers of tokens and one with a window, on a device
    whose slots are what a token would have computed: all tokens up to it."""

    def __init__(self, seed: int, policy: str, capacity: int):
        self.rng, self.now = random.Random(seed), 0.0
        self.windows = (None, 6, None)
        sizes = zip((capacity, 13, capacity), self.windows, strict=True)
        self.pools = [make_pool(1 + n, window) for n, window in sizes]
        self.index = make_index(
            self.pools, P, self.windows, eviction=policy, clock=lambda: self.now
        )
        self.pins = Pins(self.index)
        self.tables = PageTables(
            self.pools,
            P,
            max_sequences=4,
            max_pages=16,
            windows=self.windows,
            index=self.index,
            pins=self.pins,
        )
        self.dropper = TokenDropper(self.tables, self.index)
        self.device = [[[None] * P for _ in range(26)] for _ in self.pools]
        self.rows: list[Row] = []
        self.num_taken = self.num_refused = 0

    def left(self, group: int, row: Row) -> list[int]:
        """Which tokens of a context a group keeps: a function of the context."""
        own = random.Random(str((group, row.tokens[: row.context])))
        return sorted(own.sample(range(row.context), own.randint(1, row.context)))

    def start(self) -> None:
        if len(self.rows) == 4:
            return
        context = [7, 8, self.rng.choice((1, 2)), *range(10, 20)][: self.rng.choice((9, 13))]
        tokens = context + self.rng.choices((3, 4), k=self.rng.randint(1, 9))
        row = Row(self.tables.open(), tokens, len(context))
        found = self.dropper.match(row.row, row.key)
        if found is not None:
            assert found[0].kept == [self.left(g, row) for g in (0, 2)]
            row.num_computed, sources = row.context, found[1]
            row.slots = [self.left(0, row), list(range(row.context)), self.left(2, row)]
            self.num_taken += 1
        else:
            n, sources = self.tables.match(row.row, pack(tokens[: row.context - 1]), PUBLIC)
            row.num_computed, row.slots = n, [list(range(n)) for _ in self.pools]
        self.rows.append(row)
        try:
            self.tables.grow(row.row, row.num_computed + 1)
        except OutOfPages:
            return self.close(row)
        for g, source in enumerate(sources):
            if source:
                target = self.tables.pages[g][row.row, len(row.slots[g]) // P]
                self.device[g][target] = list(self.device[g][source])

    def compute(self, row: Row) -> None:
        """A chunk, to the end of the context at most, where some are dropped."""
        end = row.context if row.num_computed < row.context else len(row.tokens)
        n = min(end, row.num_computed + self.rng.randint(1, 6))
        try:
            self.tables.grow(row.row, n)
        except OutOfPages:
            return self.close(row)
        for g, slots in enumerate(row.slots):
            for position in range(row.num_computed, n):
                page = self.tables.pages[g][row.row, len(slots) // P]
                self.device[g][page][len(slots) % P] = tuple(row.tokens[: position + 1])
                slots.append(position)
        before, row.num_computed = row.num_computed, n
        if n <= row.context:
            self.tables.publish(row.row, pack(row.tokens[: n if n == end else n - n % P]), PUBLIC)
        self.tables.trim(np.array([row.row]), np.array([n]))
        if n == row.context and before < n:
            self.shorten(row)

    def shorten(self, row: Row) -> None:
        left = {g: self.left(g, row) for g in (0, 2)}
        held = [list(ids) for ids in self.tables._held[row.row]]
        read = {g: [self.device[g][held[g][i // P]][i % P] for i in left[g]] for g in left}
        fits = all(-(-len(left[g]) // P) <= self.num_left(g, row) for g in left)
        before = self.books()
        try:
            self.dropper.drop(row.row, row.context, {g: len(x) for g, x in left.items()})
            assert fits
        except OutOfPages:
            assert not fits and self.books() == before
            self.num_refused += 1
            return self.close(row)
        for g, values in read.items():
            row.slots[g] = list(left[g])
            for i, value in enumerate(values):
                page = self.tables.pages[g][row.row, i // P]
                self.device[g][page] = list(self.device[g][page])
                self.device[g][page][i % P] = value
        if self.dropper.share(row.row, row.key):
            return
        copies = self.dropper.copies_for_windows(row.row)
        if copies is not None:
            for g, pages in copies.items():
                for source, target in pages.items():
                    self.device[g][target] = list(self.device[g][source])
            kept = [left[0], left[2]]
            self.dropper.publish(row.row, row.context, row.key, kept, copies)

    def num_left(self, group: int, row: Row) -> int:
        """Pages that neither other rows hold nor pins that last."""
        holders = [self.tables._held[other.row] for other in self.rows if other is not row]
        holders += [held for pin, held in self.pins._held.items() if pin.expires > self.now]
        held = {page for holder in holders for page in holder[group] if page}
        return self.pools[group].capacity - len(held)

    def books(self) -> tuple:
        return deepcopy(self.tables.holdings()), self.tables.dropped.tolist(), self.index.stored()

    def pin(self) -> None:
        tokens = self.rng.choice(self.rows).tokens if self.rows else []
        with suppress(ValueError):  # so many pages may not be pinned
            self.pins.pin(pack(tokens), PUBLIC, ttl_seconds=self.rng.randint(1, 30))

    def close(self, row: Row) -> None:
        self.tables.close(row.row)
        self.rows.remove(row)

    def evict(self) -> None:
        g = self.rng.randrange(len(self.pools))
        wanted, pool = self.rng.choice((1, 3, 99)), self.pools[g]
        free, cached = pool.num_free, pool.num_cached
        freed = self.index.evict(g, wanted)
        assert pool.num_free == free + freed and freed >= min(wanted, cached)

    def check(self) -> None:
        snapshots = self.dropper.snapshots
        check_integrity(self.index, self.tables, self.pins.holdings(), snapshots)
        for row in self.rows:
            for g, window in enumerate(self.windows):
                first = 0 if window is None else max(0, row.num_computed - window + 1)
                for i, position in enumerate(row.slots[g]):
                    if position >= first:
                        value = self.device[g][self.tables.pages[g][row.row, i // P]][i % P]
                        assert value == tuple(row.tokens[: position + 1])


@pytest.mark.parametrize("capacity, least_taken, least_refused", [(24, 40, 0), (7, 40, 1)])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_random_operations_keep_accounts_and_slots_consistent(
    policy, capacity, least_taken, least_refused
):
    num_taken = num_refused = 0
    for seed in range(8):
        world = World(seed, policy, capacity)
        for _ in range(120):
            step, world.now = world.rng.random(), world.now + 1
            if step < 0.35 or not world.rows:
                world.start()
            elif step < 0.85:
                row = world.rng.choice(world.rows)
                if row.num_computed == len(row.tokens):
                    world.close(row)
                else:
                    world.compute(row)
            elif step < 0.93:
                world.close(world.rng.choice(world.rows))
            elif step < 0.97:
                world.evict()
            else:
                world.pin()
            world.check()
        world.now += 30
        world.pins.expire()
        for row in list(world.rows):
            world.close(row)
        world.index.reset()
        world.check()
        assert not list(world.dropper.snapshots) and not world.index.roots
        assert all(pool.num_free == pool.capacity for pool in world.pools)
        num_taken += world.num_taken
        num_refused += world.num_refused
    assert num_taken >= least_taken and num_refused >= least_refused


def test_a_pin_whose_time_is_over_keeps_no_row_from_being_shortened():
    world = World(0, "lru", capacity=6)
    row, other = world.tables.open(), world.tables.open()
    world.tables.grow(row, 3 * P)
    world.tables.publish(row, pack(list(range(3 * P))), PUBLIC)
    world.pins.pin(pack(list(range(3 * P))), PUBLIC, ttl_seconds=1)
    world.tables.grow(other, 3 * P)
    with pytest.raises(OutOfPages):
        world.dropper.drop(row, 3 * P, {0: P, 2: P})
    world.now = 2
    world.dropper.drop(row, 3 * P, {0: P, 2: 3 * P})
    check_integrity(world.index, world.tables)
