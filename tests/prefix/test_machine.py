"""Index, tables, pins and policies together, moved at random; and a long soak."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxkv.prefix import POLICIES
from jaxkv.prefix.events import replay
from tests.prefix.world import PUBLIC, SECRET, Row, World

WINDOWS = [(None,), (None, None), (5,), (1,), (None, 7), (3, None), (2, 9), (16, None, 4)]
SINKS = st.sampled_from([None, (1, 1, 1), (0, 2, 1)])  # pages, of each group that there is
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
NAMESPACES = st.sampled_from([PUBLIC, SECRET])
PLACES = st.integers(0, 99)


class HostMachine(RuleBasedStateMachine):
    """Sequences start, run, fork, publish and end in any order, while pages are evicted."""

    @initialize(
        P=st.sampled_from([1, 2, 3, 4, 7]),
        windows=st.sampled_from(WINDOWS),
        policy=st.sampled_from(sorted(POLICIES)),
        capacity=st.sampled_from([6, 14, 40]),
        sinks=SINKS,
    )
    def make(self, P: int, windows: tuple[int | None, ...], policy: str, capacity: int, sinks):
        sink_pages = sinks and sinks[: len(windows)]
        self.world = World(P, windows, policy, capacity, sink_pages=sink_pages)
        self.seen: list[list[int]] = [[]]

    def row(self, place: int) -> Row:
        return self.world.rows[place % len(self.world.rows)]

    def has_rows(self) -> bool:
        return bool(self.world.rows)

    def has_room(self) -> bool:
        return len(self.world.rows) < 5

    @precondition(has_room)
    @rule(before=PLACES, kept=PLACES, rest=TOKENS, namespace=NAMESPACES)
    def start(self, before: int, kept: int, rest: list[int], namespace):
        known = self.seen[before % len(self.seen)]
        tokens = known[: kept % (len(known) + 1)] + rest
        probed = self.world.longest_stored(tokens[:-1], namespace)
        sequence = self.world.try_start(tokens, namespace)
        if sequence is not None:
            sliding = any(self.world.windows)
            assert sequence.num_computed <= probed
            assert sliding or sequence.num_computed == probed

    @precondition(has_rows)
    @rule(place=PLACES, num_tokens=st.integers(1, 9), more=TOKENS, trim=st.booleans())
    def compute(self, place: int, num_tokens: int, more: list[int], trim: bool):
        sequence = self.row(place)
        if sequence.num_computed == len(sequence.tokens):
            sequence.tokens += more
        self.world.compute(sequence, num_tokens, trim=trim)

    @precondition(has_rows)
    @rule(place=PLACES, whole=st.booleans())
    def publish(self, place: int, whole: bool):
        self.world.publish(self.row(place), whole=whole)

    @precondition(lambda self: self.has_rows() and self.has_room())
    @rule(place=PLACES)
    def fork(self, place: int):
        self.world.fork(self.row(place))

    @precondition(has_rows)
    @rule(place=PLACES)
    def finish(self, place: int):
        sequence = self.row(place)
        self.seen.append(sequence.tokens[: sequence.num_computed])
        self.world.finish(sequence)

    @precondition(has_rows)
    @rule(place=PLACES)
    def abort(self, place: int):
        self.world.abort(self.row(place))

    @rule(group=PLACES, num_pages=st.integers(0, 9))
    def evict(self, group: int, num_pages: int):
        group %= len(self.world.pools)
        pool = self.world.pools[group]
        free, cached = pool.num_free, pool.num_cached
        freed = self.world.index.evict(group, num_pages)
        assert freed == pool.num_free - free == min(num_pages, cached)

    @rule(before=PLACES, namespace=NAMESPACES, ttl=st.sampled_from([0.01, 1, 1e9]))
    def pin(self, before: int, namespace, ttl: float):
        self.world.pin(self.seen[before % len(self.seen)], namespace, ttl)

    @precondition(lambda self: self.world.pinned)
    @rule(place=PLACES)
    def unpin(self, place: int):
        pin, _, _ = self.world.pinned[place % len(self.world.pinned)]
        self.world.pins.unpin(pin)

    @invariant()
    def all_is_right(self):
        if hasattr(self, "world"):
            self.world.check()
            assert replay(self.world.events) == self.world.index.stored()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.end()
            assert replay(self.world.events) == set()


TestHost = HostMachine.TestCase
TestHost.settings = settings(max_examples=90, stateful_step_count=40, deadline=None)


def soak(world: World, rng: random.Random, num_operations: int) -> None:
    """Runs random operations, and checks everything at intervals."""
    seen: list[list[int]] = [[]]
    for operation in range(num_operations):
        kind, row = rng.random(), rng.choice(world.rows) if world.rows else None
        if kind < 0.3 and len(world.rows) < 5:
            known = rng.choice(seen)
            rest = [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
            world.try_start(
                known[: rng.randrange(len(known) + 1)] + rest, rng.choice([PUBLIC, SECRET])
            )
        elif kind < 0.65 and row is not None:
            if row.num_computed == len(row.tokens):
                row.tokens.append(rng.randrange(3))
            world.compute(row, rng.randrange(1, 9))
        elif kind < 0.75 and row is not None:
            world.publish(row, whole=rng.random() < 0.5)
        elif kind < 0.8 and row is not None and len(world.rows) < 5:
            world.fork(row)
        elif kind < 0.82:
            world.index.evict(rng.randrange(len(world.pools)), rng.randrange(6))
        elif kind < 0.84:
            world.pin(rng.choice(seen), PUBLIC, rng.choice([0.05, 5.0]))
            world.pinned = world.pinned[-20:]
        elif kind < 0.86 and world.pinned:
            world.pins.unpin(world.pinned.pop()[0])
        elif row is not None:
            seen = [*seen[-30:], row.tokens[: row.num_computed]]
            (world.finish if kind < 0.97 else world.abort)(row)
        if operation % 500 == 0:
            world.check()
            assert replay(world.events) == world.index.stored()


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(
    ("windows", "sink_pages"),
    [((None,), None), ((None, 7), None), ((None, 7), (0, 2))],
    ids=["full", "mixed", "sinks"],
)
def test_random_operations_leak_nothing(windows, sink_pages, policy):
    """Twelve of them: 300,000."""
    rng = random.Random(f"{windows}{policy}")
    world = World(3, windows, policy, capacity=40, sink_pages=sink_pages)
    for _ in range(5):
        soak(world, rng, 5_000)
        for sequence in list(world.rows):
            world.finish(sequence)
        world.now += 100  # pins end
        world.pins.expire()
        assert sum(pool.num_held for pool in world.pools) == 0
        world.end()
        assert replay(world.events) == set()
        world.events.clear()
        world.pinned.clear()
        assert len(getattr(world.policy, "_heap", ())) <= 64 + 4 * 40  # outdated entries
