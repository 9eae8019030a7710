"""Step shapes: few, fitting, and each compiled once over a whole run."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.cache import LayerSpec
from jaxkv.engine import Engine, EngineConfig, Request
from jaxkv.engine.shapes import (
    DETERMINISTIC_ROWS,
    MAX_BUCKETS,
    ShapeTable,
    buckets,
    halve_widest_gaps,
)
from jaxkv.engine.step_plan import StepPlan

SIZES = st.integers(1, 5000)


class Bag:
    """The least model: one layer, a hidden state is the token's embedding."""

    params = None
    layers = (LayerSpec(kv_heads=1, head_dim=8),)
    vocab_size = 11
    max_positions = 200

    def forward(self, params, cache, step, backend):
        return jax.nn.one_hot(step.tokens, self.vocab_size), cache

    def logits(self, params, hidden):
        return -hidden


def plan_of(*num_tokens: int) -> StepPlan:
    unused: Any = None  # a shape depends only on the numbers
    unused = np.zeros(len(num_tokens), np.int32)
    sequences = (unused,) * len(num_tokens)
    return StepPlan(sequences=sequences, num_tokens=num_tokens, rows=unused, lengths=unused)


@given(smallest=SIZES, extra=st.integers(0, 100000))
def test_buckets_are_few_and_ascend_to_the_largest(smallest, extra):
    sizes = buckets(smallest, smallest + extra)
    assert 1 <= len(sizes) <= MAX_BUCKETS
    assert sorted(set(sizes)) == list(sizes)
    assert sizes[-1] == smallest + extra
    assert sizes[0] == smallest


@pytest.mark.parametrize("sizes, more", [
    ((64, 128, 256, 512), (64, 128, 256, 384, 448, 512)),
    ((64, 256), (64, 160, 256)),
    ((64, 191), (64, 191)),
    ((64,), (64,)),
])  # fmt: skip
def test_spare_buckets_halve_the_widest_gaps(sizes, more):
    assert halve_widest_gaps(sizes, 64) == more


@given(max_sequences=st.integers(1, 300), budget=SIZES, data=st.data())
def test_a_plan_gets_the_smallest_shape_that_holds_it(max_sequences, budget, data):
    table = ShapeTable.plan(max_sequences, budget, deterministic=False)
    assert len(table) <= 12
    count = data.draw(st.integers(1, min(max_sequences, budget)))
    num_tokens = [1] * count
    num_tokens[-1] += data.draw(st.integers(0, budget - count))
    shape = table.fit(plan_of(*num_tokens))
    if sum(num_tokens) == count:
        assert shape.num_tokens == shape.num_sequences >= count
        assert not any(count <= size < shape.num_sequences for size in table.decode)
    else:
        assert shape.num_sequences == max_sequences
        assert shape.num_tokens >= sum(num_tokens)
        assert not any(sum(num_tokens) <= size < shape.num_tokens for size in table.mixed)


@given(max_sequences=st.integers(1, 300), budget=SIZES)
def test_a_deterministic_table_has_one_shape(max_sequences, budget):
    table = ShapeTable.plan(max_sequences, budget, deterministic=True)
    assert len(table) == 1
    assert table.most_tokens == DETERMINISTIC_ROWS
    shapes = {table.fit(plan_of(*n)) for n in ([1], [1] * min(max_sequences, 64), [64], [3, 2])}
    assert len(shapes) == 1


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_200_requests_of_random_lengths_compile_at_most_12_step_shapes(deterministic):
    engine = Engine(
        Bag(),
        EngineConfig(max_sequences=4, token_budget=100, deterministic=deterministic),
    )
    rng = np.random.default_rng(0)
    requests = [
        Request(prompt=(int(rng.integers(11)),) * int(n), max_new_tokens=int(rng.integers(1, 9)))
        for n in rng.integers(1, 190, 200)
    ]
    completions = engine.generate(requests)
    assert all(completion.finish_reason == "length" for completion in completions)
    engine.generate(requests[:20])
    compiled = engine.steps._step._cache_size()
    assert compiled == engine.metrics.step_shapes <= (1 if deterministic else 12)


def test_engines_that_share_steps_compile_each_shape_once():
    model = Bag()
    first = Engine(model, EngineConfig(max_sequences=2))
    second = Engine(model, EngineConfig(max_sequences=2, prefix_cache=False), steps=first.steps)
    answers = [
        engine.generate([Request(prompt=(1, 2, 3), max_new_tokens=3)])[0].tokens
        for engine in (first, second)
    ]
    assert answers[0] == answers[1]
    assert first.steps._step._cache_size() == 2  # the prompt's and the decode step


def test_steps_of_another_model_or_kind_are_refused():
    steps = Engine(Bag(), EngineConfig()).steps
    with pytest.raises(ValueError, match="cannot be shared"):
        Engine(Bag(), EngineConfig(), steps=steps)
    model = Bag()
    steps = Engine(model, EngineConfig()).steps
    with pytest.raises(ValueError, match="cannot be shared"):
        Engine(model, EngineConfig(deterministic=True), steps=steps)


def test_warm_up_compiles_every_shape_and_touches_nothing_else():
    engine = Engine(Bag(), EngineConfig(max_sequences=4, token_budget=100))
    running = engine.submit(Request(prompt=(1, 2, 3, 4) * 5, max_new_tokens=6))
    engine.step()
    free, before = engine.pool_states, len(running.tokens)
    engine.warm_up()
    assert engine.pool_states == free and len(running.tokens) == before
    assert engine.steps._step._cache_size() == len(engine.shapes) == engine.metrics.step_shapes
    engine.generate([Request(prompt=(7,) * n, max_new_tokens=3) for n in (1, 70, 190)])
    assert engine.steps._step._cache_size() == len(engine.shapes)
    assert running.tokens == [0, 1, 0, 1, 0, 1]
