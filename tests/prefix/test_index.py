"""The radix index: what is a hit, who shares with whom, what insert adopts, and what it costs."""

import sys

import pytest

from jaxkv.prefix import Namespace, PagePool, PageTables, PrefixIndex, check_integrity, pack
from jaxkv.prefix.node import Node, Root, common_length, unpack
from tests.prefix.world import PUBLIC, SECRET, World


def numbers(n: int, start: int = 0) -> list[int]:
    return list(range(start, start + n))


@pytest.mark.parametrize("P", [1, 2, 7, 16, 64, 128])
def test_a_hit_is_exact_to_the_token_at_any_page_size(P):
    world = World(P, capacity=400)
    known = numbers(130)
    world.run(known)
    for common in (1, P - 1, P, P + 1, 63, 64, 65, 129, 130):
        found = world.index.probe(pack([*known[:common], 9999, 9998]), PUBLIC)
        assert found == common


@pytest.mark.parametrize("P, length", [(4, 15), (4, 16), (4, 17), (1, 5), (16, 16)])
def test_a_fully_cached_prompt_computes_only_its_last_token(P, length):
    world = World(P, capacity=40)
    prompt = numbers(length)
    world.run(prompt)
    assert world.run(prompt) == length - 1


@pytest.mark.parametrize("length", [7, 8, 9, 11, 12, 13], ids="length {}".format)
def test_no_page_is_lost_for_any_length_of_the_last_page(length):
    world = World(4)
    world.run(numbers(length))
    world.run(numbers(length) + numbers(length, 500))
    pool = world.pools[0]
    world.index.evict(0, pool.capacity)
    assert pool.num_free == pool.capacity
    assert not world.index.roots


@pytest.mark.parametrize(
    "one, other",
    [
        pytest.param(Namespace(salt="a"), Namespace(salt="b"), id="salts"),
        pytest.param(Namespace(salt="a"), Namespace(), id="salted and public"),
        pytest.param(Namespace(window="a"), Namespace(window="b"), id="windows"),
        pytest.param(Namespace(window="a"), Namespace(), id="windowed and full"),
        pytest.param(Namespace(kv_format="int8"), Namespace(kv_format="bf16"), id="formats"),
        pytest.param(
            Namespace(window="a", salt="-x"), Namespace(window="a-x", salt=""), id="joined"
        ),
        pytest.param(Namespace(salt="a"), Namespace(window="a"), id="salt is no window"),
    ],
)
def test_namespaces_that_differ_share_nothing(one, other):
    world = World(4)
    world.run(numbers(12), one)
    assert world.run(numbers(12), other) == 0
    assert world.run(numbers(12), one) == 11


def test_a_probe_changes_neither_order_nor_counters():
    world = World(4, capacity=6)
    world.run(numbers(8))
    world.run(numbers(8, 100))
    before = vars(world.index.counters).copy()
    for _ in range(3):
        assert world.index.probe(pack(numbers(8)), PUBLIC) == 8
    assert vars(world.index.counters) == before
    world.index.evict(0, 2)
    assert world.index.probe(pack(numbers(8)), PUBLIC) == 0  # still the older one
    assert world.index.probe(pack(numbers(8, 100)), PUBLIC) == 8


def test_a_match_without_a_sequence_holds_no_pages():
    world = World(4)
    world.run(numbers(12))
    row = world.tables.open()
    assert world.tables.match(row, pack(numbers(12)), PUBLIC)[0] == 12
    assert world.pools[0].num_held == 3
    world.tables.close(row)
    assert world.pools[0].num_held == 0
    world.check()


def test_a_match_of_a_part_of_a_node_holds_only_that_part():
    world = World(4)
    world.run(numbers(40))
    sequence = world.start(numbers(25) + [999] * 7)
    assert (sequence.num_computed, world.pools[0].num_held) == (25, 7)  # 6 shared, 1 its own
    assert world.index.evict(0, 30) == 4
    world.compute(sequence, 7)
    world.finish(sequence)
    world.check()
    assert world.pools[0].num_held == 0
    assert world.index.evict(0, 30) == 8


def test_equal_prompts_computed_together_are_stored_once():
    world = World(4)
    rows = [world.start(numbers(17)) for _ in range(4)]
    for row in rows:
        world.compute(row, 17)
    assert world.pools[0].num_held == 20
    for row in rows:
        world.publish(row, whole=True)
        world.check()
    assert world.pools[0].num_held == 4 + 4  # whole pages once, each one's own tail
    for row in list(world.rows):
        world.finish(row)
    assert (world.pools[0].num_held, world.pools[0].num_cached) == (0, 5)


def test_insert_tells_which_pages_the_caller_holds_afterwards():
    world = World(4)
    world.run(numbers(8))
    pool, index = world.pools[0], world.index
    own = pool.acquire(3)
    (now,) = index.insert(pack(numbers(12)), [own], PUBLIC)
    kept = index.match(pack(numbers(12)), PUBLIC).pages[0]
    assert now == kept
    assert now[2] == own[2]  # adopted
    assert now[:2] != own[:2]  # exchanged; the caller's own are free
    assert [pool.state(page) for page in own[:2]] == [(0, 0), (0, 0)]
    pool.release(now + kept)
    check_integrity(index)


def test_a_full_page_replaces_the_partly_filled_one():
    world = World(4)
    sequence = world.start(numbers(10))
    for end in (6, 7, 8, 10):  # published with 2, 3 and 4 tokens in its second page
        world.compute(sequence, end - sequence.num_computed)
        world.publish(sequence, whole=False)
        world.check()
    assert [node.num_pages for _, node in world.index.nodes()] == [3]
    world.finish(sequence)
    assert world.run([*numbers(7), 99]) == 7


def test_generated_tokens_are_hits_of_the_next_turn():
    world = World(4)
    sequence = world.start(numbers(9))
    world.compute(sequence, 9)
    sequence.tokens += numbers(6, 50)
    world.compute(sequence, 5)  # the last token is sampled, and not computed
    world.finish(sequence)
    assert world.run(numbers(9) + numbers(6, 50) + [1, 2]) == 14


def test_only_published_tokens_are_ever_hits():
    world = World(4)
    sequence = world.start(numbers(20))
    world.compute(sequence, 12)
    world.publish(sequence, whole=True)
    world.compute(sequence, 8)  # for example drafts that were not verified
    assert world.index.probe(pack(numbers(20)), PUBLIC) == 12
    world.abort(sequence)
    assert world.run(numbers(20)) == 12


def test_reset_is_refused_while_a_page_is_in_use_and_changes_nothing():
    world = World(4)
    world.run(numbers(8))
    sequence = world.start(numbers(12))
    stored = world.index.stored()
    with pytest.raises(ValueError, match="3 pages are in use; end all requests and pins first"):
        world.index.reset()
    assert world.index.stored() == stored
    world.abort(sequence)
    world.index.reset()
    world.check()
    assert world.run(numbers(8)) == 0


def test_counters_count_lookups_hits_and_pages_stored_and_evicted():
    world = World(4, capacity=6)
    world.run(numbers(9))
    world.run(numbers(9))
    world.run(numbers(17, 300))
    counters = world.index.counters
    assert (counters.num_matches, counters.queried_tokens, counters.hit_tokens) == (3, 32, 8)
    assert counters.hit_rate == 0.25
    in_tree = sum(node.num_pages for _, node in world.index.nodes())
    assert counters.stored_pages - counters.evicted_pages == in_tree == world.pools[0].num_cached


# What a match costs, counted and not timed.


def cost_of_a_match(num_cached: int, monkeypatch) -> tuple[int, int]:
    """Nodes that a match of 64 tokens enters, and lines of the host side that it runs."""
    pool = PagePool(num_cached * 3 + 10)
    index = PrefixIndex([pool], 16)
    tables = PageTables([pool], 16, max_sequences=1, max_pages=8, index=index)
    for i in range(num_cached):
        tokens = numbers(32) + [1000 + i] * 32
        row = tables.open()
        tables.match(row, pack(tokens), PUBLIC)
        tables.grow(row, 64)
        tables.publish(row, pack(tokens), PUBLIC)
        tables.close(row)
    row, lines, entered = tables.open(), 0, []

    def trace(frame, event, _):
        nonlocal lines
        lines += event == "line"
        return trace

    touch = index.order.policy.touch
    monkeypatch.setattr(
        index.order.policy, "touch", lambda path: (entered.extend(path), touch(path))
    )
    sys.settrace(trace)
    try:
        found, _ = tables.match(row, pack(numbers(32) + [1000 + num_cached // 2] * 32), PUBLIC)
    finally:
        sys.settrace(None)
    assert found == 64
    return len(entered), lines


def test_a_match_costs_the_same_among_any_number_of_conversations(monkeypatch):
    costs = {n: cost_of_a_match(n, monkeypatch) for n in (10, 300, 3_000)}
    assert costs[10] == costs[300] == costs[3_000]
    assert costs[10][0] == 2


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "priority"])
def test_an_eviction_visits_few_nodes_for_any_number_of_leaves(policy, monkeypatch):
    looks = {}
    for num_leaves in (50, 1_000):
        world = World(4, policy=policy, capacity=2 * num_leaves)
        tables = PageTables(world.pools, 4, max_sequences=1, max_pages=2, index=world.index)
        for i in range(num_leaves):
            row = tables.open()
            tables.grow(row, 8)
            tables.publish(row, pack(numbers(8, 10 * i)), PUBLIC)
            tables.close(row)
        calls = []
        evict_from = world.index.evict_from
        monkeypatch.setattr(
            world.index, "evict_from", lambda *a, f=evict_from, c=calls: (c.append(a), f(*a))[1]
        )
        assert world.index.evict(0, 20) == 20
        looks[num_leaves] = len(calls)
    assert looks[50] == looks[1_000] == 10


# The parts.


def test_a_hit_ends_at_the_first_other_token_and_no_hash_stands_for_it():
    """One token is another: whatever a page's others are, the hit is as long as what is before."""
    world, tokens = World(4), numbers(13)
    world.run(tokens)
    for place in range(12):
        other = [*tokens[:place], 9999, *tokens[place + 1 :]]
        assert world.index.probe(pack(other), PUBLIC) == place


@pytest.mark.parametrize("n", [0, 1, 5])
def test_packed_ids_unpack_to_themselves(n):
    ids = [0, 1, 2**31 - 1, 2**16, 7][:n]
    assert unpack(pack(ids)) == ids
    assert len(pack(ids)) == 4 * n


@pytest.mark.parametrize("run, start, end, common", [
    ([1, 2, 3], 0, 5, 3),
    ([1, 2, 9], 0, 5, 2),
    ([9], 0, 5, 0),
    ([3, 4], 2, 5, 2),
    ([3, 4, 5, 6], 2, 4, 2),
    ([3, 4, 5, 6, 7], 2, 5, 3),
])  # fmt: skip
def test_the_common_length_of_a_run_and_a_part_of_data(run, start, end, common):
    assert common_length(pack(run), pack([1, 2, 3, 4, 5]), start, end) == common


@pytest.mark.parametrize("at, own, rest", [(1, 0, 3), (3, 0, 3), (4, 1, 2), (8, 2, 1), (11, 2, 1)])
def test_a_split_leaves_a_page_with_its_last_token(at, own, rest):
    index = PrefixIndex([PagePool(9)], 4)
    root = Root(index, PUBLIC, 1)
    node = Node(index, root, 0, pack(numbers(12)), [[5, 6, 7]])
    root.children[node.key] = node
    upper = node.split(at, 4)
    assert (upper.pages[0], node.pages[0]) == ([5, 6, 7][:own], [5, 6, 7][own:])
    assert len(node.pages[0]) == rest
    assert unpack(upper.tokens) + unpack(node.tokens) == numbers(12)
    assert (upper.start, upper.end, node.start, node.end) == (0, at, at, 12)


@pytest.mark.parametrize(
    "damage, message",
    [
        pytest.param(lambda w, n: n.pages[0].pop(), "pages in group 0", id="a page lost"),
        pytest.param(lambda w, n: setattr(n, "start", 1), "tokens", id="a wrong position"),
        pytest.param(lambda w, n: n.parent.children.clear(), "still has a root", id="cut off"),
        pytest.param(
            lambda w, n: w.pools[0].share([1]), "held", id="a page that is never released"
        ),
        pytest.param(
            lambda w, n: w.pools[0].unmark_indexed([n.pages[0][0]]),
            "indexed",
            id="a page not booked",
        ),
        pytest.param(lambda w, n: n.pages[0].__setitem__(0, 0), "full group 0", id="a hole"),
        pytest.param(
            lambda w, n: w.tables.pages[0].__setitem__((0, 0), 3), "differs", id="a table changed"
        ),
    ],
)
def test_the_integrity_check_finds_damage(damage, message):
    world = World(4)
    world.run(numbers(9), SECRET)
    world.check()
    (_, node), *_ = world.index.nodes()
    damage(world, node)
    with pytest.raises(ValueError, match=message):
        check_integrity(world.index, world.tables)
