"""Page tables: pages for every group or none, copy-on-write forks, windows, and one release."""

import chex
import numpy as np
import pytest

from jaxkv.prefix import OutOfPages, PagePool, PageTables, SparsePool, check_integrity, pack
from tests.prefix.test_index import numbers
from tests.prefix.world import PUBLIC, World

M = 6


def bare(*num_pages: int, max_sequences: int = 3) -> PageTables:
    pools = [PagePool(n) for n in num_pages]
    return PageTables(pools, 8, max_sequences=max_sequences, max_pages=M)


@pytest.mark.parametrize(
    "num_tokens, pages", [(0, 0), (1, 1), (7, 1), (8, 1), (9, 2), (16, 2), (17, 3)]
)
def test_a_page_is_taken_with_its_first_token(num_tokens, pages):
    tables = bare(9)
    row = tables.open()
    tables.grow(row, num_tokens)
    assert tables.covered[row] == pages * 8
    assert (tables.pages[0][row] > 0).sum() == pages
    assert tables.pages[0].dtype == np.int32


def test_one_short_group_keeps_every_group_as_it_was():
    tables = bare(9, 3)
    row = tables.open()
    with pytest.raises(OutOfPages, match="3 pages asked for; of 2, 2 are free and 0 cached"):
        tables.grow(row, 24)
    assert [pool.num_held for pool in tables.pools] == [0, 0]
    tables.grow(row, 16)
    assert [pool.num_held for pool in tables.pools] == [2, 2]


def test_growing_to_what_a_row_has_takes_nothing():
    tables = bare(9)
    row = tables.open()
    tables.grow(row, 20)
    tables.grow(row, 3)
    tables.grow(row, 24)
    assert tables.pools[0].num_held == 3


def test_a_batch_grows_at_once_or_not_at_all():
    tables = bare(6, 7)
    rows = [tables.open() for _ in range(3)]
    for row, length in zip(rows, (8, 3, 16), strict=True):
        tables.grow(row, length)
    before = [table.copy() for table in tables.pages]
    assert tables.grow_lacking(rows, [9, 4, 17]) == [0, 2]  # one page is left
    for table, old in zip(tables.pages, before, strict=True):
        chex.assert_trees_all_equal(table, old)
    tables.close(rows[1])
    assert tables.grow_lacking([rows[0], rows[2]], [9, 17]) == []
    assert [tables.covered[row] for row in rows] == [16, 0, 24]
    tables.holdings()  # lists and arrays agree
    assert [pool.num_held for pool in tables.pools] == [5, 5]


def test_closing_a_row_twice_is_refused_and_gives_its_pages_back_once():
    tables = bare(9)
    first, second = tables.open(), tables.open()
    tables.grow(first, 16)
    tables.close(first)
    tables.grow(second, 32)  # takes the same pages
    with pytest.raises(ValueError, match=f"row {first} is closed"):
        tables.close(first)
    assert tables.pools[0].num_held == 4
    assert not tables.pages[0][first].any()


@pytest.mark.parametrize("call", [
    lambda t: t.grow(0, 1),
    lambda t: t.match(0, b"", PUBLIC),
    lambda t: t.publish(0, b"", PUBLIC),
    lambda t: t.fork(0, 0),
], ids=["grow", "match", "publish", "fork"])  # fmt: skip
def test_a_closed_row_is_refused(call):
    with pytest.raises(ValueError, match="row 0 is closed"):
        call(bare(9))


def test_rows_run_out():
    tables = bare(9, max_sequences=2)
    assert {tables.open(), tables.open()} == {0, 1}
    with pytest.raises(ValueError, match="all 2 rows are in use"):
        tables.open()
    assert tables.num_open == 2


def test_a_sequence_longer_than_its_row_is_refused_and_takes_no_page():
    tables = bare(20)
    row = tables.open()
    with pytest.raises(ValueError, match="49 tokens need 7 pages; a table row has 6"):
        tables.grow(row, M * 8 + 1)
    assert tables.pools[0].num_held == 0


def test_without_an_index_nothing_is_found_and_nothing_is_kept():
    tables = bare(9)
    row = tables.open()
    assert tables.match(row, pack(numbers(20)), PUBLIC) == (0, (0,))
    tables.grow(row, 20)
    tables.publish(row, pack(numbers(16)), PUBLIC)
    tables.close(row)
    assert tables.pools[0].num_free == tables.pools[0].capacity


# Sharing.


def test_forks_use_the_prompts_pages_and_a_tail_each():
    world = World(4)
    first = world.start(numbers(18))
    world.compute(first, 18)
    forks = [world.fork(first) for _ in range(3)]
    assert world.pools[0].num_held == 5 + 3  # not 4 x 5
    for i, fork in enumerate(forks):
        assert fork is not None
        fork.tokens[18:] = numbers(5, 100 * i)
        assert world.compute(fork, 5)
        world.check()
    assert world.pools[0].num_held == 5 + 3 * 2
    for row in list(world.rows):
        world.finish(row)
        world.check()
    assert world.run([*numbers(18), 100, 101, 102, 9]) == 21


def test_a_preempted_sequence_finds_its_own_pages_again():
    world = World(4)
    sequence = world.start(numbers(30))
    world.compute(sequence, 22)
    world.finish(sequence)
    assert world.run(numbers(30)) == 22


@pytest.mark.parametrize("computed", [0, 3, 8, 20], ids="after {} tokens".format)
@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("windows", [(None,), (None, 6)], ids=["full", "mixed"])
def test_a_sequence_may_end_in_any_state(computed, published, windows):
    world = World(4, windows)
    world.run(numbers(9))
    cached = world.pools[0].num_cached
    sequence = world.start(numbers(9) + numbers(20, 100))
    for _ in range(computed):
        world.compute(sequence, 1)
    if published:
        world.publish(sequence, whole=True)
    world.abort(sequence)
    world.check()
    assert all(pool.num_held == 0 for pool in world.pools)
    if not published:
        assert world.pools[0].num_cached == cached


def test_a_sequence_that_may_not_read_the_cache_still_fills_it():
    world = World(4)
    world.run(numbers(12))
    row = world.tables.open()  # and no match
    world.tables.grow(row, 16)
    assert world.tables.covered[row] == 16
    world.tables.publish(row, pack(numbers(16)), PUBLIC)
    world.tables.close(row)
    check_integrity(world.index, world.tables)
    assert world.index.probe(pack(numbers(16)), PUBLIC) == 16


def test_a_sequence_that_is_never_published_also_runs():
    world = World(4, capacity=8)
    sequence = world.start(numbers(32))
    for _ in range(32):
        assert world.compute(sequence, 1)
    world.abort(sequence)
    assert not world.index.roots
    assert world.pools[0].num_free == 8


def test_a_page_in_use_is_never_allocated():
    """Under pressure: a reader of cached pages, while others take every page there is."""
    world = World(4, capacity=10)
    world.run(numbers(17))
    reader = world.start(numbers(17))
    other = world.start(numbers(60, 500))
    mine = set(world.tables.pages[0][reader.row].tolist()) - {0}
    assert len(mine) == 5
    assert world.compute(other, 20)  # the five that are left
    assert not mine & set(world.tables.pages[0][other.row].tolist())
    world.check()
    assert not world.compute(other, 8)
    world.check()


# Windows.


@pytest.mark.parametrize("window", [1, 2, 4, 5, 9, 16])
@pytest.mark.parametrize("P", [1, 4, 8])
def test_a_sliding_row_keeps_the_pages_that_its_next_token_sees(P, window):
    world = World(P, (window,), capacity=60)
    sequence = world.start(numbers(50))
    for n in range(1, 51):
        world.compute(sequence, 1)
        first = max(0, n - window + 1)  # first position that the token at n sees
        held = [k for k in range(-(-n // P)) if (k + 1) * P > first]
        there = np.flatnonzero(world.tables.pages[0][sequence.row]).tolist()
        assert there == [k for k in held if k * P < n]
        assert world.pools[0].num_held == len(there)


def test_a_row_that_is_opened_anew_slides_from_its_beginning():
    pool = SparsePool(20)
    tables = PageTables([pool], 4, max_sequences=1, max_pages=10, windows=(5,))
    for num_tokens in (40, 16):
        row = tables.open()
        tables.grow(row, num_tokens)
        tables.trim(np.array([row]), np.array([num_tokens]))
        assert pool.num_held == 1  # the next token sees four that are there
        tables.close(row)


def test_sinks_stay_while_the_window_moves_on_and_come_with_a_hit():
    world = World(4, (None, 5), sink_pages=(0, 2))
    prompt = numbers(50)
    world.run(prompt)
    row = world.start([*prompt, 7])
    held = world.tables.pages[1][row.row] != 0
    assert np.flatnonzero(held).tolist() == [0, 1, 11, 12]
    world.compute(row, 1)
    world.check()


@pytest.mark.parametrize("windows", [(5,), (None, 5), (3, None, 9)], ids=str)
def test_a_repeated_prompt_much_longer_than_the_window_is_a_hit(windows):
    world = World(4, windows)
    prompt = numbers(50)
    assert world.run(prompt) == 0
    assert world.run(prompt) == 49
    for g, window in enumerate(windows):  # and when all pages but the needed ones are gone
        if window is not None:
            most_needed = -(-window // 4) + 1
            world.index.evict(g, world.pools[g].num_cached - most_needed)
    assert world.index.probe(pack(prompt), PUBLIC) == 50
    assert world.run(prompt) == 49


@pytest.mark.parametrize("length", range(48, 56))
@pytest.mark.parametrize("window", [1, 4, 5, 6])
def test_pages_before_a_window_are_evicted_before_those_a_replay_needs(window, length):
    world = World(4, (window,))
    world.run(numbers(length))
    needed = sum((k + 1) * 4 > length - window for k in range(-(-length // 4)))
    num_behind = world.pools[0].num_cached - needed
    assert world.index.evict(0, num_behind) == num_behind > 0
    assert world.index.probe(pack(numbers(length - 1)), PUBLIC) == length - 1
    world.index.evict(0, 1)  # one that is needed: the last
    assert world.index.probe(pack(numbers(length - 1)), PUBLIC) in (0, (length - 1) // 4 * 4)
    (_, node), *_ = world.index.nodes()
    assert len(node.pages[0]) == -(-length // 4) - 1
    world.check()


def test_a_repeated_prompt_is_a_hit_after_a_long_answer():
    world = World(4, (5,))
    sequence = world.start(numbers(20))
    world.compute(sequence, 20, trim=False)
    world.publish(sequence, whole=False)
    sequence.tokens += numbers(30, 100)
    world.compute(sequence, 30)
    world.finish(sequence)
    assert world.index.probe(pack(sequence.tokens), PUBLIC) == 50
    assert world.index.evict(0, 4) == 4  # three after the prompt's end, and the answer's last
    assert world.index.probe(pack(sequence.tokens[:19]), PUBLIC) == 19
    world.check()


def test_pages_before_a_window_are_evicted_first_after_a_row_held_them():
    world = World(4, (5,))
    sequence = world.start(numbers(20))
    world.compute(sequence, 20, trim=False)
    world.publish(sequence, whole=False)
    assert world.index.evict(0, 9) == 0
    world.abort(sequence)
    assert world.index.evict(0, 3) == 3
    assert world.index.probe(pack(numbers(19)), PUBLIC) == 19


def test_pages_that_a_running_row_has_passed_are_evicted_after_all_leaves():
    world = World(4, (None, 5))
    sequence = world.start(numbers(20))
    world.compute(sequence, 20, trim=False)
    world.publish(sequence, whole=False)
    world.tables.trim(np.array([sequence.row]), np.array([20]))
    assert (world.pools[1].num_held, world.pools[1].num_cached) == (1, 4)
    assert world.index.evict(1, 9) == 4  # one of them is not before the window of position 19
    world.check()


def test_a_hit_is_shortened_to_what_every_group_can_serve():
    world = World(4, (None, 4))
    world.run(numbers(40))
    sliding = world.pools[1]
    assert world.index.evict(1, sliding.num_cached) > 0
    assert sliding.num_cached == 0
    assert world.index.probe(pack(numbers(40)), PUBLIC) == 0  # though the full group has it all
    assert world.pools[0].num_cached >= 9
    assert world.run(numbers(40)) == 0  # computes it again, and gives the tree its pages back
    assert world.index.probe(pack(numbers(40)), PUBLIC) == 40


def test_a_trimmed_parent_is_not_forked_where_its_pages_are_gone():
    world = World(4, (None, 4))
    sequence = world.start(numbers(30))
    world.compute(sequence, 30)
    assert world.tables.can_fork(sequence.row, 30)
    assert not world.tables.can_fork(sequence.row, 12)
    fork = world.fork(sequence)
    assert fork is not None
    world.abort(sequence)
    world.compute(fork, 1)
    world.check()
    assert world.tables.sliding == (1,)
