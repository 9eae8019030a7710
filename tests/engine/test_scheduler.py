"""The scheduler as host logic: budgets, order, preemption, and that every request ends."""

from array import array
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxkv.engine import Completion, FinishReason, Request
from jaxkv.engine.scheduler import AGE_GUARD, SCHEDULING, Scheduler
from jaxkv.engine.sequence import Fork, Sequence
from jaxkv.engine.step_plan import StepPlan
from jaxkv.prefix import (
    Namespace,
    PageTables,
    check_integrity,
    make_index,
    make_pool,
)

P = 4


class World:
    """A scheduler, its pools, and a model that takes no time: token 0 always follows."""

    def __init__(
        self,
        *,
        pages: tuple[int, ...] = (100,),
        windows: tuple[int | None, ...] | None = None,
        max_sequences: int = 8,
        budget: int = 16,
        index: bool = False,
        scheduling: str = "fcfs",
    ):
        windows = windows or (None,) * len(pages)
        self.pools = [make_pool(n + 1, window) for n, window in zip(pages, windows, strict=True)]
        self.longest = min(pages) * P
        self.budget = budget
        self.max_sequences = max_sequences
        self.index = make_index(self.pools, P, windows) if index else None
        self.tables = PageTables(
            self.pools,
            P,
            max_sequences=max_sequences,
            max_pages=min(pages),
            windows=windows,
            index=self.index,
        )
        self.scheduler = Scheduler(
            self.tables,
            self.index,
            max_sequences=max_sequences,
            token_budget=budget,
            scheduling=scheduling,
        )
        self.unfinished: list[Sequence] = []  # in order of arrival

    def submit(self, prompt: int | tuple[int, ...], new: int, **options: object) -> Sequence:
        tokens = (0,) * prompt if isinstance(prompt, int) else prompt
        sequence = Sequence(
            request=Request(prompt=tokens, max_new_tokens=new, **options),
            completion=Completion(0, len(tokens)),
            namespace=Namespace(),
            max_tokens=min(len(tokens) + new, self.longest),
            tokens=array("i", tokens),
        )
        self.scheduler.add(sequence)
        self.unfinished.append(sequence)
        return sequence

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.check(plan)
            self.apply(plan)
        return plan

    def check(self, plan: StepPlan) -> None:
        assert 0 < plan.total_tokens <= self.budget
        assert len(set(plan.sequences)) == len(plan.sequences) <= self.max_sequences
        for sequence, num_tokens in zip(plan.sequences, plan.num_tokens, strict=True):
            assert 0 < num_tokens <= sequence.num_uncomputed
            end = sequence.num_computed + num_tokens
            assert self.tables.covered[sequence.row] >= end
        for copy in plan.copies:
            assert self.pools[copy.group].state(copy.target) == (0, 1)

    def apply(self, plan: StepPlan) -> None:
        self.scheduler.advance(plan)
        for sequence in plan.sequences:
            if not sequence.num_uncomputed:
                _, reason = sequence.append(0)
                if reason is not None:
                    self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        sequence.completion.finish_reason = FinishReason.LENGTH
        self.scheduler.remove(sequence)
        self.unfinished.remove(sequence)

    def shares(self, plan: StepPlan | None) -> list[tuple[int, int]]:
        """Prompt length (the name of a sequence here) and tokens, a pair each."""
        assert plan is not None
        prompts = [len(sequence.request.prompt) for sequence in plan.sequences]
        return list(zip(prompts, plan.num_tokens, strict=True))

    def check_integrity(self) -> None:
        if self.index is not None:
            check_integrity(self.index, self.tables)
        for pool in self.pools:
            pool.check_integrity()
        held = [self.tables.covered[s.row] // P for s in self.scheduler.running]
        if self.index is None and not self.tables.sliding:
            assert [pool.num_held for pool in self.pools] == [sum(held)] * len(self.pools)
        assert self.tables.num_open == len(held) <= self.max_sequences
        assert all(s.num_computed == 0 for s in self.scheduler.waiting)


def test_nothing_queued_is_no_plan():
    assert World().scheduler.plan() is None


def test_a_long_prompt_is_cut_into_chunks_of_the_budget():
    world = World(budget=16)
    world.submit(37, 3)
    steps = [world.shares(world.step()) for _ in range(5)]
    assert steps == [[(37, 16)], [(37, 16)], [(37, 5)], [(37, 1)], [(37, 1)]]
    assert world.scheduler.plan() is None


def test_those_that_decode_go_first_and_prompts_take_the_rest_in_order():
    world = World(budget=16)
    world.submit(5, 9)
    world.submit(6, 9)
    assert world.shares(world.step()) == [(5, 5), (6, 6)]
    world.submit(30, 9)
    world.submit(4, 9)
    assert world.shares(world.step()) == [(5, 1), (6, 1), (30, 14)]
    assert world.shares(world.step()) == [(5, 1), (6, 1), (30, 14)]
    assert world.shares(world.step()) == [(5, 1), (6, 1), (30, 2), (4, 4)]
    assert world.shares(world.step()) == [(5, 1), (6, 1), (30, 1), (4, 1)]


def test_no_more_sequences_run_than_the_limit():
    world = World(max_sequences=2)
    for prompt in (3, 4, 5):
        world.submit(prompt, 2)
    assert world.shares(world.step()) == [(3, 3), (4, 4)]
    assert world.shares(world.step()) == [(3, 1), (4, 1)]
    assert world.shares(world.step()) == [(5, 5)]


def test_the_one_that_came_last_gives_up_its_pages_and_starts_again():
    world = World(pages=(5,), budget=32)
    _, _, third = world.submit(8, 9), world.submit(7, 9), world.submit(3, 9)
    world.step()  # takes all five pages: 2, 2 and 1
    plan = world.scheduler.plan()  # the first needs a third page
    assert world.shares(plan) == [(8, 1), (7, 1)]
    assert world.scheduler.num_preemptions == 1
    assert (third.num_computed, third.row, len(third.tokens)) == (0, None, 4)
    assert list(world.scheduler.waiting) == [third]


def test_preempted_sequences_keep_their_order():
    world = World(pages=(6,))
    sequences = [world.submit(n, 30) for n in (8, 7, 6, 3)]
    for _ in range(8):
        world.step()
        arrived = [*world.scheduler.running, *world.scheduler.waiting]
        assert arrived == [s for s in sequences if s in world.unfinished]
    assert world.scheduler.num_preemptions >= 2


def test_a_first_request_that_does_not_fit_delays_the_later_ones():
    world = World(pages=(5,))
    world.submit(8, 9)
    world.step()
    world.submit(16, 4)
    world.submit(1, 4)
    assert world.shares(world.step()) == [(8, 1)]


@pytest.mark.parametrize("state", ["waiting", "running", "preempted", "removed"])
def test_a_sequence_is_removed_from_any_state_and_gives_its_pages_back(state):
    world = World(pages=(5,))
    other, sequence = world.submit(8, 9), world.submit(12, 9)
    if state != "waiting":
        world.step()
    if state == "preempted":
        while sequence in world.scheduler.running:
            world.step()
    if state == "removed":
        world.scheduler.remove(sequence)
    world.scheduler.remove(sequence)
    assert sequence not in [*world.scheduler.running, *world.scheduler.waiting]
    assert sequence.row is None
    assert world.scheduler.running == ([] if state == "waiting" else [other])
    world.check_integrity()


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of any length come and go; what is left at the end must end in bounded steps."""

    @initialize(
        pages=st.lists(st.integers(2, 12), min_size=1, max_size=2).map(tuple),
        max_sequences=st.integers(1, 5),
        budget=st.integers(1, 20),
        index=st.booleans(),
        window=st.sampled_from([None, 3, 9]),
        scheduling=st.sampled_from(SCHEDULING),
    )
    def make(self, pages: tuple[int, ...], window: int | None, **options: Any):
        windows = (None, window)[: len(pages)]
        self.world = World(pages=pages, windows=windows, **options)

    @rule(data=st.data(), new=st.integers(1, 20), priority=st.integers(0, 2))
    def submit(self, data: st.DataObject, new: int, priority: int):
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=self.world.longest))
        self.world.submit(tuple(prompt), new, priority=priority)

    @rule(n=st.integers(1, 4))
    def step(self, n: int):
        for _ in range(n):
            had_work = bool(self.world.unfinished)
            assert (self.world.step() is not None) == had_work
            self.pages_are_conserved()

    @precondition(lambda self: self.world.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject):
        self.world.remove(data.draw(st.sampled_from(self.world.unfinished)))

    @invariant()
    def pages_are_conserved(self):
        if hasattr(self, "world"):
            self.world.check_integrity()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        # The first in line computes something in every step but those in which others take the
        # whole budget, and they advance then; each preemption costs at most its length again.
        total = sum(sequence.max_tokens for sequence in self.world.unfinished)
        bound = (total + 1) * (len(self.world.unfinished) + 1)
        for _ in range(bound):
            if not self.world.unfinished:
                break
            assert self.world.step() is not None
            self.pages_are_conserved()
        assert not self.world.unfinished
        assert self.world.scheduler.plan() is None
        assert all(pool.num_held == 0 for pool in self.world.pools)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)


def tokens(*runs: tuple[int, int]) -> tuple[int, ...]:
    """Runs of (token, length)."""
    return tuple(token for token, length in runs for _ in range(length))


def finish(world: World) -> None:
    while world.unfinished:
        assert world.step() is not None


def test_the_longest_cached_prefix_goes_first():
    world = World(index=True, scheduling="lpm", max_sequences=1, budget=64)
    world.submit(tokens((1, 20)), 1)
    finish(world)
    world.submit(tokens((2, 9)), 1)
    world.submit(tokens((1, 6), (3, 4)), 1)
    world.submit(tokens((1, 12), (3, 4)), 1)
    first = [world.shares(world.step())[0] for _ in range(3)]
    assert first == [(16, 4), (10, 4), (9, 9)]  # all but the 12 and the 6 cached tokens


def test_who_was_overtaken_often_goes_before_all_who_would_overtake_it():
    world = World(index=True, scheduling="lpm", max_sequences=1, budget=64)
    world.submit(tokens((1, 20)), 1)
    finish(world)
    unlucky = world.submit(tokens((2, 9)), 1)
    admitted = 0
    while unlucky in world.unfinished:
        world.submit(tokens((1, 12), (3, 2)), 1)
        world.step()
        admitted += 1
    assert admitted == AGE_GUARD + 1


@pytest.mark.parametrize("scheduling", SCHEDULING)
def test_priorities_count_where_they_are_asked_for(scheduling):
    world = World(scheduling=scheduling, max_sequences=1, budget=64)
    for prompt, priority in ((5, 0), (6, 2), (7, 1), (8, 2)):
        world.submit(prompt, 1, priority=priority)
    order = [world.shares(world.step())[0][0] for _ in range(4)]
    assert order == ([6, 8, 7, 5] if scheduling == "priority" else [5, 6, 7, 8])


def test_a_low_priority_is_preempted_before_a_late_arrival():
    world = World(pages=(5,), scheduling="priority")
    world.submit(8, 9, priority=1)
    low, late = world.submit(7, 9, priority=0), world.submit(3, 9, priority=1)
    world.step()  # takes all five pages: 2, 1 and 2
    while not world.scheduler.num_preemptions:
        world.step()
    assert low.row is None and late.row is not None


def test_who_shares_an_uncomputed_prefix_waits_until_it_is_cached():
    world = World(index=True, max_sequences=4, budget=16)
    world.submit(tokens((1, 24), (2, 3)), 3)
    world.submit(tokens((1, 24), (3, 4)), 3)
    world.submit(tokens((4, 2)), 3)
    assert world.shares(world.step()) == [(27, 16)]
    assert world.shares(world.step()) == [(27, 11), (2, 2)]
    assert world.shares(world.step()) == [(27, 1), (2, 1), (28, 4)]


def test_a_fork_takes_the_pages_of_its_origin_and_copies_one():
    world = World(max_sequences=4, budget=16)
    origin = world.submit(tokens((1, 10)), 8)
    world.step()
    child = world.submit(tuple(origin.tokens), 8)
    child.fork = Fork(origin, 10)
    plan = world.step()
    assert plan is not None and world.shares(plan) == [(10, 1), (11, 1)]
    rows = world.tables.pages[0][[origin.row, child.row]]
    assert (rows[0, :2] == rows[1, :2]).all() and rows[0, 2] != rows[1, 2]
    ((group, source, target),) = [(c.group, c.source, c.target) for c in plan.copies]
    assert (group, source, target) == (0, *rows[:, 2])


def test_a_page_that_a_plan_copies_to_is_no_source_in_the_same_plan():
    world = World(index=True, max_sequences=4, budget=16)
    world.submit(tokens((1, 6)), 1)
    finish(world)
    origin = world.submit(tokens((1, 6)), 8)  # begins with a copy of the cached page
    child = world.submit(tokens((1, 6)), 8)
    child.fork = Fork(origin, 5)
    plan = world.step()
    assert plan is not None and plan.sequences == (origin,) and len(plan.copies) == 1
    plan = world.step()
    assert plan is not None and plan.sequences == (origin, child)
    assert plan.copies[0].source == world.tables.pages[0][origin.row, 1]
