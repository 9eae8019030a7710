"""Orders of eviction: which leaf goes first, page by page from its tail."""

import pytest

from jaxkv.prefix import POLICIES, Evictable, EvictionPolicy, PagePool, PrefixIndex, pack
from tests.prefix.test_index import numbers
from tests.prefix.world import PUBLIC, World

A, B, C = numbers(8), numbers(8, 100), numbers(8, 200)


def cached(world: World) -> list[int]:
    return [world.index.probe(pack(tokens), PUBLIC) for tokens in (A, B, C)]


def filled(policy: str, priorities: tuple[int, int, int] = (0, 0, 0)) -> World:
    world = World(4, policy=policy, capacity=12)
    for tokens, priority in zip((A, B, C), priorities, strict=True):
        row = world.tables.open()
        world.tables.grow(row, 8)
        world.tables.publish(row, pack(tokens), PUBLIC, priority=priority)
        world.tables.close(row)
    return world


def use(world: World, tokens: list[int], times: int = 1) -> None:
    for _ in range(times):
        row = world.tables.open()
        world.tables.match(row, pack(tokens), PUBLIC)
        world.tables.close(row)


@pytest.mark.parametrize(
    "policy, uses, priorities, order",
    [
        ("lru", "", (0, 0, 0), "ABC"),
        ("lru", "AC", (0, 0, 0), "BAC"),
        ("fifo", "AAB", (0, 0, 0), "ABC"),
        ("lfu", "AABBBC", (0, 0, 0), "CAB"),
        ("lfu", "CBA", (0, 0, 0), "CBA"),
        ("priority", "A", (0, 0, 1), "BAC"),
        ("priority", "AB", (2, 1, 0), "CBA"),
    ],
)
def test_leaves_go_in_the_order_of_the_policy(policy, uses, priorities, order):
    world = filled(policy, priorities)
    for name in uses:
        use(world, {"A": A, "B": B, "C": C}[name])
    for i, name in enumerate(order):
        place = "ABC".index(name)
        assert cached(world)[place] == 8
        world.index.evict(0, 1)
        assert cached(world)[place] == 4  # the tail goes first, and a page at a time
        world.index.evict(0, 1)
        assert cached(world)[place] == 0
        assert sum(cached(world)) == 8 * (2 - i)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_leaf_in_use_is_passed_over_and_comes_back_into_the_order(policy):
    world = filled(policy)
    row = world.tables.open()
    world.tables.match(row, pack(A), PUBLIC)
    assert world.index.evict(0, 99) == 4
    assert cached(world) == [8, 0, 0]
    world.tables.close(row)
    assert world.index.evict(0, 99) == 2
    world.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_an_inner_node_is_evicted_after_the_nodes_below_it(policy):
    world = World(4, policy=policy)
    for ending in (50, 60, 70):
        world.run(numbers(8) + numbers(5, ending))
    assert world.index.evict(0, 6) == 6
    assert world.index.probe(pack(numbers(8)), PUBLIC) == 8
    assert world.index.evict(0, 9) == 2
    assert not world.index.roots


def test_old_hits_count_less_with_time():
    """LFU with ageing: 20 old hits count less, after some time, than two recent ones."""
    world = World(4, policy="lfu", capacity=12)
    for tokens in (A, B, C):
        world.run(tokens)
    use(world, A, 20)
    for i in range(60):
        world.run(numbers(9, 1000 * (i + 1)))
        world.run(numbers(9, 1000 * (i + 1)))
    assert cached(world) == [0, 0, 0]


def test_a_prefix_that_is_split_off_keeps_its_count():
    world = World(4, policy="lfu")
    world.run(numbers(16))
    use(world, numbers(16), 10)
    world.run(numbers(8) + numbers(4, 100))  # splits the run in two
    use(world, numbers(8), 5)
    world.run(other := numbers(9, 1000))
    use(world, other, 12)
    world.index.evict(0, 1 + 2)  # the new end and the old one, used once and 11 times
    world.index.evict(0, 1)  # and then: what was used 13 times, or 17
    assert world.index.probe(pack(numbers(8)), PUBLIC) == 8
    assert world.index.probe(pack(other), PUBLIC) == 8


def test_the_part_of_a_run_that_was_not_matched_grows_old():
    world = World(4)
    world.run(numbers(16))
    world.run(B)
    world.run(numbers(8) + numbers(4, 300))
    world.index.evict(0, 2)
    assert world.index.probe(pack(numbers(16)), PUBLIC) == 8
    assert world.index.probe(pack(B), PUBLIC) == 8


def test_a_heap_of_ranks_stays_as_small_as_the_tree():
    world = filled("priority")
    use(world, A, 5_000)
    assert len(vars(world.policy)["_heap"]) <= 4 * 3 + 64


class NewestFirst:
    """A policy that a user could write."""

    def __init__(self) -> None:
        self.entries: dict[Evictable, None] = {}
        self.deferred: dict[Evictable, None] = {}

    def touch(self, path):
        for entry in path:
            self.entries.setdefault(entry)

    def forget(self, entry: Evictable):
        self.entries.pop(entry)

    def victim(self) -> Evictable | None:
        return next((e for e in reversed(self.entries) if e not in self.deferred), None)

    def defer(self, entry: Evictable):
        self.deferred[entry] = None

    def resume(self):
        self.deferred.clear()


def test_a_custom_policy_is_used():
    policy: EvictionPolicy = NewestFirst()
    pool = PagePool(10)
    index = PrefixIndex([pool], 4, eviction=policy)
    for tokens in (A, B, C):
        own = pool.acquire(2)
        index.insert(pack(tokens), [own], PUBLIC)
        pool.release(own)
    index.evict(0, 2)
    assert [index.probe(pack(tokens), PUBLIC) for tokens in (A, B, C)] == [8, 8, 0]


def test_documents_that_do_not_all_fit_lose_their_tails_and_not_each_other():
    """Page by page: five documents of ten pages in a pool of 26 keep 26 pages, not 20."""
    world = World(4, capacity=26)
    documents = [numbers(40, 1000 * i) for i in range(5)]
    for document in documents:
        world.run(document)
    kept = [world.index.probe(pack(document), PUBLIC) for document in documents]
    assert sum(kept) == 26 * 4
    assert kept == [0, 0, 24, 40, 40]
