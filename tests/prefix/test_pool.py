"""The page pool against a plain record of every page, and every misuse refused whole."""

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxkv.prefix import OutOfPages, PagePool

ANY_PAGES = st.lists(st.integers(-12, 12), max_size=6)


class PoolMachine(RuleBasedStateMachine):
    """Any calls, sound or not, against `{page: [indexed, holders]}`, a page at a time."""

    @initialize(num_pages=st.integers(2, 10))
    def make(self, num_pages: int):
        self.pool = PagePool(num_pages)
        self.pages = {page: [0, 0] for page in range(1, num_pages)}

    @rule(n=st.integers(0, 12))
    def acquire(self, n: int):
        free = {page for page, state in self.pages.items() if state == [0, 0]}
        if n > len(free):
            with pytest.raises(OutOfPages, match=f"{n} pages asked for, {len(free)} of"):
                self.pool.acquire(n)
            return
        pages = self.pool.acquire(n)
        assert len(set(pages)) == n
        assert set(pages) <= free
        self.pages |= {page: [0, 1] for page in pages}

    @rule(pages=ANY_PAGES)
    def share(self, pages: list[int]):
        self.change(self.pool.share, pages, lambda indexed, held: indexed or held, (0, 1))

    @rule(pages=ANY_PAGES)
    def release(self, pages: list[int]):
        self.change(self.pool.release, pages, lambda indexed, held: held, (0, -1))

    @rule(pages=ANY_PAGES)
    def mark_indexed(self, pages: list[int]):
        self.change(
            self.pool.mark_indexed, pages, lambda indexed, held: held and not indexed, (1, 0)
        )

    @rule(pages=ANY_PAGES)
    def unmark_indexed(self, pages: list[int]):
        self.change(self.pool.unmark_indexed, pages, lambda indexed, held: indexed, (-1, 0))

    def change(self, call, pages: list[int], allowed, by: tuple[int, int]):
        after = {page: list(state) for page, state in self.pages.items()}
        for page in pages:
            if page not in after or not allowed(*after[page]):
                with pytest.raises(ValueError, match="page"):
                    call(pages)
                return
            after[page] = [after[page][0] + by[0], after[page][1] + by[1]]
        call(pages)
        self.pages = after

    @invariant()
    def pages_are_conserved(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        held = sum(holders > 0 for _, holders in self.pages.values())
        cached = sum(state == [1, 0] for state in self.pages.values())
        assert (self.pool.num_held, self.pool.num_cached) == (held, cached)
        assert self.pool.num_free + cached + held == self.pool.capacity == len(self.pages)
        assert {page: list(self.pool.state(page)) for page in self.pages} == self.pages


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    "pages, message",
    [
        pytest.param([0], "page 0 is the null page", id="null"),
        pytest.param([99], "no page 99: ids are 1 to 7", id="unknown"),
        pytest.param([-1], "no page -1", id="negative"),
        pytest.param([-7], "no page -7", id="negative, as if from the end"),
        pytest.param([6], "page 6 is released more often than it is held", id="free"),
        pytest.param([1, 2, 1], "page 1 is released more often than it is held", id="duplicate"),
        pytest.param([2, 3, 3, 3], "page 3 is released more often", id="more than shared"),
        pytest.param([1, 2, 0], "page 0 is the null page", id="null at the end"),
    ],
)
def test_a_release_that_is_partly_wrong_changes_nothing(pages, message):
    pool = PagePool(8)
    assert sorted(pool.acquire(3)) == [1, 2, 3]
    pool.share([3])
    with pytest.raises(ValueError, match=message):
        pool.release(pages)
    assert [pool.state(page)[1] for page in range(1, 8)] == [1, 1, 2, 0, 0, 0, 0]
    assert pool.num_free == 4
    pool.check_integrity()


@pytest.mark.parametrize("pages", [[1, 0], [1, 6], [1, 99]], ids=["null", "free", "unknown"])
@pytest.mark.parametrize("call", ["share", "mark_indexed", "unmark_indexed"])
def test_a_call_that_is_partly_wrong_changes_nothing(call, pages):
    pool = PagePool(8)
    pool.acquire(2)
    if call == "unmark_indexed":
        pool.mark_indexed([1, 2])
    before = [pool.state(page) for page in range(1, 8)]
    with pytest.raises(ValueError, match=f"page {pages[1]}"):
        getattr(pool, call)(pages)
    assert [pool.state(page) for page in range(1, 8)] == before
    pool.check_integrity()


def test_a_page_released_as_often_as_it_is_held_in_one_call_is_free_once():
    pool = PagePool(3)
    (page, other) = pool.acquire(2)
    pool.share([page, page])
    pool.release([page, other, page, page])
    assert pool.num_free == 2
    pool.check_integrity()
    assert sorted(pool.acquire(2)) == [1, 2]


def test_what_was_freed_last_is_handed_out_first():
    pool = PagePool(10)
    pool.acquire(9)
    pool.release([4])
    pool.release([7, 2])
    assert pool.acquire(3) == [7, 2, 4]


def test_a_double_free_is_refused():
    pool = PagePool(4)
    pages = pool.acquire(2)
    pool.release(pages)
    with pytest.raises(ValueError, match=f"page {pages[0]} is released more often"):
        pool.release(pages)


def test_a_released_page_is_cached_while_indexed_and_free_afterwards():
    pool = PagePool(4)
    pages = pool.acquire(2)
    pool.mark_indexed(pages)
    pool.release(pages)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (1, 2, 0)
    pool.share(pages[:1])
    assert (pool.num_free, pool.num_cached, pool.num_held) == (1, 1, 1)
    pool.unmark_indexed(pages)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (2, 0, 1)
    assert pool.unheld_tail([*pages, 3], 9) == 2


def test_a_pool_needs_a_page_beside_the_null_page():
    with pytest.raises(ValueError, match="N = 1"):
        PagePool(1)


def test_a_negative_number_of_pages_is_refused():
    with pytest.raises(ValueError, match="-1 pages"):
        PagePool(4).acquire(-1)


@pytest.mark.parametrize("page", [0, 4, -1])
def test_the_state_of_what_is_no_page_is_refused(page):
    with pytest.raises(ValueError, match=f"page {page}"):
        PagePool(4).state(page)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda pool: pool._free.append(1), id="a held page in the free list"),
        pytest.param(lambda pool: pool._free.pop(), id="a page in neither"),
        pytest.param(lambda pool: pool._free.append(pool._free[0]), id="a page listed twice"),
        pytest.param(lambda pool: pool._state.__setitem__(0, 1), id="the null page held"),
        pytest.param(lambda pool: pool._state.__setitem__(1, -1), id="a negative count"),
        pytest.param(lambda pool: setattr(pool, "num_cached", 1), id="a wrong counter"),
    ],
)
def test_the_integrity_check_finds_damage(damage):
    pool = PagePool(6)
    pool.acquire(2)
    pool.check_integrity()
    damage(pool)
    with pytest.raises(ValueError, match=r"free list|null page|num_cached"):
        pool.check_integrity()


@pytest.mark.parametrize("module", ["jaxkv", "jaxkv.prefix"])
def test_the_host_side_loads_no_jax(module):
    code = f"import sys, {module}; print(*[m for m in ('jax', 'jaxlib') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
