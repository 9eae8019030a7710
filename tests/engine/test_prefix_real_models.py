"""The golden rule with a prefix index, on real models."""

from itertools import count

import chex
import numpy as np
import pytest

from jaxkv.engine import Engine, EngineConfig, Request
from jaxkv.engine.step import StepFunctions
from jaxkv.models.loading import load_model
from tests.engine.disturbances import Disturb, logit_bits, preempt_at


@pytest.mark.parametrize(
    ("name", "page_size", "kv_format"),
    [
        pytest.param("gemma3", 16, "f32", marks=pytest.mark.slow),
        pytest.param("smollm2", 64, "f32", marks=pytest.mark.slow),
        pytest.param("smollm2", 32, "kivi2_r32_s1", marks=pytest.mark.slow),
        pytest.param("smollm2", 8, "f32", marks=pytest.mark.slow),
        pytest.param("gemma3", 128, "f32", marks=pytest.mark.slow),
        pytest.param("smollm2", 16, "fp8_e4m3", marks=pytest.mark.slow),
        pytest.param("gemma3", 16, "int4", marks=pytest.mark.slow),
        pytest.param("gemma3", 32, "kivi2_r32_s1,window=int8,-1=kivi4", marks=pytest.mark.slow),
    ],
)
def test_a_real_model_answers_from_its_cache_with_the_same_bits(
    request, name, page_size, kv_format
):
    """Conversations longer than the window, where there is one, with pages that come and go."""
    model = load_model(str(request.getfixturevalue(f"{name}_path"))).model
    rng = np.random.default_rng(5)
    length = max(130, *(18 + (layer.window or 0) for layer in model.layers))
    system = tuple(rng.integers(100, 20_000, length).tolist())
    users = [tuple(rng.integers(100, 20_000, n).tolist()) for n in (7, 40, 13, 25)]

    def answers(
        steps: StepFunctions | None, disturb: Disturb | None
    ) -> tuple[Engine, list[np.ndarray]]:
        engine = Engine(
            model,
            EngineConfig(
                deterministic=True,
                max_sequences=2,
                max_length=768,
                page_size=page_size,
                kv_format=kv_format,
                prefix_cache=steps is not None,
            ),
            steps=steps,
        )
        histories, bits, steps = [system] * 2, [], count()
        for turn in (users[:2], users[2:]):
            histories = [h + user for h, user in zip(histories, turn, strict=True)]
            done = [
                engine.submit(Request(prompt=h, max_new_tokens=4, keep_logits=True))
                for h in histories
            ]
            while engine.has_work:
                if disturb:
                    disturb(engine, next(steps))
                engine.step()
            bits += logit_bits(done)
            histories = [h + tuple(c.tokens) for h, c in zip(histories, done, strict=True)]
        return engine, bits

    plain, want = answers(None, None)
    engine, got = answers(plain.steps, preempt_at(11))
    for one, other in zip(got, want, strict=True):
        chex.assert_trees_all_equal(one, other)
    assert engine.metrics.cached_tokens > 2 * len(system)
