"""Allocators of runs against a plain list of slots."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.replay.contiguous import Buddy, FirstFit, MaxLength, Reserving

SIZES = st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60)


def make(name: str, capacity: int) -> Reserving:
    if name == "max-length":
        return MaxLength(capacity, 16)
    return Buddy(capacity) if name == "buddy" else FirstFit(capacity)


@pytest.mark.parametrize("name", ["max-length", "buddy", "oracle"])
@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(16, 130), steps=SIZES)
def test_runs_never_overlap_and_all_comes_back_in_one_piece(name, capacity, steps):
    allocator = make(name, capacity)
    owner: list[int | None] = [None] * capacity
    runs: list[tuple[int, int]] = []
    for number, (takes, final) in enumerate(steps):
        if takes or not runs:
            size = allocator.size(final)
            start = allocator.take(size)
            if start is None:
                continue
            assert size >= min(final, size)
            assert owner[start : start + size] == [None] * size
            owner[start : start + size] = [number] * size
            runs.append((start, size))
        else:
            start, size = runs.pop(final % len(runs))
            allocator.give(start, size)
            owner[start : start + size] = [None] * size
        assert allocator.free == owner.count(None)
    for start, size in runs:
        allocator.give(start, size)
    assert allocator.free == capacity
    whole = 1 << (capacity.bit_length() - 1) if name == "buddy" else capacity
    assert allocator.take(whole) is not None


@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(1, 130), steps=SIZES)
def test_the_first_fit_takes_the_lowest_run_that_is_free(capacity, steps):
    allocator, owner, runs = FirstFit(capacity), "." * capacity, []
    for takes, size in steps:
        if takes or not runs:
            start = allocator.take(size)
            assert (-1 if start is None else start) == owner.find("." * size)
            if start is not None:
                runs.append((start, size))
                owner = owner[:start] + "x" * size + owner[start + size :]
        else:
            start, size = runs.pop(size % len(runs))
            allocator.give(start, size)
            owner = owner[:start] + "." * size + owner[start + size :]


def test_a_buddy_is_a_power_of_two_at_a_multiple_of_itself():
    allocator = Buddy(100)  # 64 + 32 + 4
    assert [allocator.size(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    starts = [allocator.take(32) for _ in range(4)]
    assert starts == [64, 0, 32, None]
    assert allocator.take(4) == 96
    assert allocator.take(1) is None
