"""A sampler of the user's own inside the jitted step."""

import jax
import jax.numpy as jnp
import pytest

from jaxkv.engine import Engine, EngineConfig, Request, SamplingInputs, SamplingParams, draw
from jaxkv.errors import UsageError
from tests.engine.tiny import Tiny, random_prompts, run

(PROMPT,) = random_prompts(20, seed=3)


def without_even_tokens(logits: jax.Array, params: SamplingInputs) -> jax.Array:
    """Draws only odd tokens, with the parameters of the request."""
    is_even = jnp.arange(logits.shape[1]) % 2 == 0
    return draw(jnp.where(is_even, -jnp.inf, logits), params)


def least_likely(logits: jax.Array, params: SamplingInputs) -> jax.Array:
    """Replaces the built-in sampling."""
    return logits.argmin(axis=-1).astype(jnp.int32)


def test_a_sampler_draws_in_place_of_the_built_in_one(tiny: Tiny):
    engine = Engine(tiny.model, EngineConfig(pool_tokens=512, sampler=least_likely))
    completion = run(engine, Request(prompt=PROMPT, max_new_tokens=4, logprobs=0))
    tokens = list(PROMPT)
    for token, entry in zip(completion.tokens, completion.logprobs, strict=True):
        logits = tiny.logits(tokens)[-1]
        assert token == logits.argmin()
        logprob = logits[token] - jax.nn.logsumexp(logits)
        assert entry.logprob == pytest.approx(float(logprob), abs=1e-4)  # of the model itself
        tokens.append(token)


def test_a_sampler_may_change_logits_and_leave_the_drawing_to_the_built_in_one(tiny: Tiny):
    config = EngineConfig(pool_tokens=512, max_sequences=4, sampler=without_even_tokens)
    engine = Engine(tiny.model, config)
    hot = SamplingParams(temperature=2.0, seed=4)
    asked = [Request(prompt=PROMPT, max_new_tokens=6, sampling=hot, n=3), Request(prompt=[1, 2])]
    together = [c for first in engine.generate(asked) for c in (first, *first.samples)]
    assert all(token % 2 for completion in together for token in completion.tokens)
    assert len({tuple(completion.tokens) for completion in together[:3]}) == 3
    assert run(engine, asked[0]).tokens == together[0].tokens  # whatever else is in the batch
    assert engine.metrics.step_shapes <= len(engine.shapes)


def test_a_sampler_is_a_function_and_part_of_the_compiled_steps(tiny: Tiny):
    with pytest.raises(ValueError, match="sampler must be a function, got 'greedy'"):
        EngineConfig(sampler="greedy")
    steps = Engine(tiny.model, EngineConfig(pool_tokens=64)).steps
    with pytest.raises(ValueError, match="or sampler cannot be shared"):
        Engine(tiny.model, EngineConfig(pool_tokens=64, sampler=least_likely), steps=steps)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda logits, params: draw(logits, params)[:1],
        lambda logits, params: draw(logits, params)[:, None],
        lambda logits, params: draw(logits, params).astype(jnp.float32),
        lambda logits, params: None,
    ],
    ids=["fewer rows", "another axis", "floats", "nothing"],
)
def test_a_sampler_that_returns_something_else_is_named_and_nothing_waits(tiny: Tiny, wrong):
    config = EngineConfig(pool_tokens=64, max_sequences=2, max_length=32, sampler=wrong)
    engine = Engine(tiny.model, config)
    with pytest.raises(UsageError, match=r"the sampler must return token ids \[B\] = \[\d\] int32"):
        engine.generate([Request(prompt=PROMPT), Request(prompt=[1, 2])])
    assert not engine.has_work
