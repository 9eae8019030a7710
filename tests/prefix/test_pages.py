"""Sequences' page tables: pages for all tokens in every group, or in none, and each page once."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxkv.prefix import OutOfPages, PagePool, SequencePages

M = 6


class PagesMachine(RuleBasedStateMachine):
    """Four sequences over two pools, against the lengths that they were grown to."""

    @initialize(sizes=st.tuples(st.integers(2, 14), st.integers(2, 14)), P=st.integers(1, 9))
    def make(self, sizes: tuple[int, int], P: int):
        self.P = P
        self.pools = [PagePool(n) for n in sizes]
        self.sequences = [SequencePages(self.pools, P, M) for _ in range(4)]
        self.pages = [0] * 4

    @rule(i=st.integers(0, 3), data=st.data())
    def grow(self, i: int, data: st.DataObject):
        num_tokens = data.draw(st.integers(0, M * self.P))
        wanted = max(self.pages[i], (num_tokens + self.P - 1) // self.P)
        n = wanted - self.pages[i]
        rows = [row.copy() for row in self.sequences[i].rows]
        assert self.sequences[i].missing(num_tokens) == n
        if any(n > pool.capacity - sum(self.pages) for pool in self.pools):
            with pytest.raises(OutOfPages, match=f"{n} pages asked for"):
                self.sequences[i].grow(num_tokens)
            assert self.sequences[i].num_pages == self.pages[i]
            np.testing.assert_array_equal(self.sequences[i].rows, rows)
            return
        self.sequences[i].grow(num_tokens)
        for row, before in zip(self.sequences[i].rows, rows, strict=True):
            np.testing.assert_array_equal(row[: self.pages[i]], before[: self.pages[i]])
        self.pages[i] = wanted

    @rule(i=st.integers(0, 3))
    def release(self, i: int):
        self.sequences[i].release()
        self.pages[i] = 0

    @invariant()
    def every_held_page_is_in_one_row_once(self):
        if not hasattr(self, "pools"):
            return
        for g, pool in enumerate(self.pools):
            pool.check_integrity()
            assert pool.num_held == sum(self.pages)
            held = []
            for sequence, n in zip(self.sequences, self.pages, strict=True):
                assert sequence.num_pages == n
                assert not sequence.rows[g][n:].any()
                held += sequence.rows[g][:n].tolist()
            assert len(set(held)) == len(held)
            assert all(pool.count(page) == 1 for page in held)


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    "num_tokens, pages", [(0, 0), (1, 1), (7, 1), (8, 1), (9, 2), (16, 2), (17, 3)]
)
def test_a_page_is_taken_with_its_first_token(num_tokens, pages):
    sequence = SequencePages([PagePool(9)], 8, M)
    sequence.grow(num_tokens)
    assert sequence.num_pages == pages
    assert sequence.rows[0].dtype == np.int32


def test_one_short_group_keeps_every_group_as_it_was():
    pools = [PagePool(9), PagePool(3)]
    sequence = SequencePages(pools, 8, M)
    with pytest.raises(OutOfPages, match="3 pages asked for, 2 free"):
        sequence.grow(24)
    assert [pool.num_held for pool in pools] == [0, 0]
    sequence.grow(16)
    assert [pool.num_held for pool in pools] == [2, 2]


def test_releasing_twice_gives_pages_back_once():
    pool = PagePool(5)
    first, second = SequencePages([pool], 8, M), SequencePages([pool], 8, M)
    first.grow(16)
    first.release()
    second.grow(32)  # takes the same pages
    first.release()
    assert pool.num_held == 4


def test_a_sequence_longer_than_its_row_is_refused_and_takes_no_page():
    pool = PagePool(20)
    sequence = SequencePages([pool], 8, M)
    with pytest.raises(ValueError, match="7 pages"):
        sequence.grow(M * 8 + 1)
    assert pool.num_held == 0
    pool.check_integrity()
