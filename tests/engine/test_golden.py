"""The golden rule: what else is served, in which chunks and pages, never changes a token.

And with `deterministic` never a bit of the logits.
"""

from dataclasses import replace

import chex
import numpy as np
import pytest
from flax import nnx

from jaxkv.engine import Completion, Engine, EngineConfig, Request
from jaxkv.models.config import AttentionConfig
from jaxkv.models.decoder import Decoder
from tests.engine.tiny import TINY, Tiny, decode_model, random_prompts, run

LENGTHS = (1, 7, 8, 9, 33, 64, 90, 150)
PROMPTS = random_prompts(*LENGTHS)
NEW = 10
SMALL_POOL = 256  # of 442 tokens that all sequences together need


def requests(n: int = NEW, **options) -> list[Request]:
    return [Request(prompt=prompt, max_new_tokens=n, **options) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "config, pool_tokens",
    [
        pytest.param({}, None, id="pages of 16, budget 64"),
        pytest.param(dict(page_size=64, token_budget=512), None, id="pages of 64, budget 512"),
        pytest.param({}, SMALL_POOL, id="preempted"),
        pytest.param(dict(token_budget=16), 160, id="preempted, budget 16"),
        pytest.param(dict(max_sequences=2, token_budget=20), None, id="two at a time"),
    ],
)
def test_a_batch_of_mixed_lengths_gives_the_tokens_of_a_full_recompute(
    tiny: Tiny, config, pool_tokens
):
    engine = tiny.engine(**config)
    if pool_tokens:
        engine.squeeze(pool_tokens)
    completions = engine.generate(requests())
    assert [c.tokens for c in completions] == [tiny.greedy(p, NEW) for p in PROMPTS]
    assert (engine.metrics.num_preemptions > 0) == bool(pool_tokens)
    assert engine.metrics.generated_tokens == NEW * len(PROMPTS)


def test_one_at_a_time_gives_the_tokens_of_the_batch(tiny: Tiny):
    engine = tiny.engine()
    batch = engine.generate(requests())
    assert [run(engine, request).tokens for request in requests()] == [c.tokens for c in batch]


def bits(completions: list[Completion]) -> list[np.ndarray]:
    """Logits of all tokens and log-probabilities of all prompts, as integers."""
    return [np.concatenate([*c.logits, c.prompt_logprobs]).view(np.uint32) for c in completions]


def assert_same(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for one, other in zip(got, want, strict=True):
        chex.assert_trees_all_equal(one, other)


@pytest.fixture(scope="module")
def batch_bits(tiny: Tiny) -> list[np.ndarray]:
    engine = tiny.engine(deterministic=True)
    return bits(engine.generate(requests(keep_logits=True, prompt_logprobs=True)))


@pytest.mark.parametrize(
    "config, pool_tokens",
    [
        pytest.param(dict(token_budget=16), None, id="budget 16"),
        pytest.param(dict(max_sequences=1, max_length=170), None, id="engine for one"),
        pytest.param(dict(page_size=64, token_budget=33), None, id="pages of 64, budget 33"),
        pytest.param({}, SMALL_POOL, id="preempted"),
        pytest.param(dict(token_budget=24, page_size=8), SMALL_POOL, id="pages of 8, preempted"),
    ],
)
def test_a_deterministic_engine_gives_the_same_bits(tiny: Tiny, batch_bits, config, pool_tokens):
    engine = tiny.engine(deterministic=True, **config)
    if pool_tokens:
        engine.squeeze(pool_tokens)
    got = bits(engine.generate(requests(keep_logits=True, prompt_logprobs=True)))
    assert (engine.metrics.num_preemptions > 0) == bool(pool_tokens)
    assert_same(got, batch_bits)


def test_a_request_alone_gives_the_bits_that_it_gives_in_a_batch(tiny: Tiny, batch_bits):
    engine = tiny.engine(deterministic=True)
    alone = [run(engine, r) for r in requests(keep_logits=True, prompt_logprobs=True)]
    assert_same(bits(alone), batch_bits)


@pytest.mark.slow
def test_a_deterministic_engine_gives_the_same_bits_at_real_widths():
    """XLA takes other paths through its products at other sizes: these are SmolLM2's."""
    config = replace(
        TINY,
        vocab_size=49152,
        width=576,
        mlp_width=1536,
        layers=TINY.layers,
        attention=AttentionConfig(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125),
        max_positions=1024,
        tied_embeddings=True,
    )
    model = decode_model(Decoder(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    asked = [
        Request(
            prompt=tuple(rng.integers(0, 49152, n).tolist()),
            max_new_tokens=3,
            keep_logits=True,
            prompt_logprobs=True,
        )
        for n in (64, 128, 448, 1, 17, 300)
    ]

    def answer(*, alone: bool = False, **options) -> list[np.ndarray]:
        engine = Engine(
            model, EngineConfig(deterministic=True, max_sequences=8, max_length=512, **options)
        )
        done = [run(engine, r) for r in asked] if alone else engine.generate(asked)
        assert (engine.metrics.num_preemptions > 0) == ("pool_tokens" in options)
        return bits(done)

    want = answer()
    for got in (
        answer(alone=True),
        answer(token_budget=40),
        answer(page_size=8),
        answer(page_size=64),
        answer(pool_tokens=640),
    ):
        assert_same(got, want)
