"""An attention backend of the user's own, given to the engine as an instance."""

import pytest

from jaxkv.engine import Engine, EngineConfig, Request
from pallas_kernels import Backend
from pallas_kernels.attention import reference
from tests.engine.tiny import Tiny, random_prompts, run

(PROMPT,) = random_prompts(9, seed=3)


def test_the_engine_computes_attention_with_a_backend_of_your_own(tiny: Tiny):
    traced = []

    def attend(*arguments):
        traced.append(arguments)
        return reference.ragged_paged_attention(*arguments)

    own = Backend(name="own", run=attend)
    engine = Engine(tiny.model, EngineConfig(pool_tokens=2048, token_budget=64, backend=own))
    answer = run(engine, Request(prompt=PROMPT, max_new_tokens=4))
    assert answer.tokens == tiny.greedy(PROMPT, 4)
    assert traced


def test_a_backend_that_returns_something_else_is_named(tiny: Tiny):
    def attend(*arguments):
        out, lse = reference.ragged_paged_attention(*arguments)
        return out[:1], lse

    own = Backend(name="own", run=attend)
    engine = Engine(tiny.model, EngineConfig(pool_tokens=2048, token_budget=64, backend=own))
    with pytest.raises(ValueError, match="backend own must return out and lse as"):
        run(engine, Request(prompt=PROMPT, max_new_tokens=4))
