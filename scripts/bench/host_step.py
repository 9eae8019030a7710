"""The host side of an engine's decode step, around a model that computes almost nothing."""

import random
from typing import Any

import jax

from jaxkv.attention import AttentionBackend, StepInputs
from jaxkv.cache import KVCache, LayerSpec
from jaxkv.engine import Engine, EngineConfig, Request
from jaxkv.model import LayerQueries

VOCAB = 11
LONGEST = 4_096
WARM_UP, MEASURED = 20, 120  # steps


class IdleModel:
    """A model whose hidden state is the token's embedding, and whose likeliest token is another."""

    params = None
    layers = (LayerSpec(kv_heads=1, head_dim=8),)
    vocab_size = VOCAB
    max_positions = LONGEST

    def forward(
        self, params: Any, cache: KVCache, step: StepInputs, backend: AttentionBackend
    ) -> tuple[jax.Array, KVCache]:
        """See `DecodeModel`."""
        return jax.nn.one_hot(step.tokens, VOCAB), cache

    def queries(
        self, params: Any, cache: KVCache, step: StepInputs, backend: AttentionBackend
    ) -> tuple[LayerQueries, ...]:
        """See `DecodeModel`; no compression method needs queries here."""
        return ()

    def turn(self, layer: int, x: jax.Array, by: jax.Array) -> jax.Array:
        """Returns `x` unchanged: this model has no rotation."""
        return x

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """See `DecodeModel`."""
        return -hidden


def step_seconds(page_size: int, batch: int) -> list[float]:
    """Times steps of `batch` sequences of 600 to 1,000 tokens without the jitted call."""
    rng = random.Random(8)
    config = EngineConfig(
        max_sequences=batch, token_budget=2_048, page_size=page_size, pool_tokens=batch * 1_280
    )
    engine = Engine(IdleModel(), config)
    for _ in range(batch):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(600, 1_000)))
        engine.submit(Request(prompt=prompt, max_new_tokens=WARM_UP + MEASURED + 20))
    while engine.metrics.generated_tokens < batch * WARM_UP:
        engine.step()
    seconds = []
    for _ in range(MEASURED):
        before = engine.metrics.host_seconds
        engine.step()
        seconds.append(engine.metrics.host_seconds - before)
    return seconds
