"""Defines a score method, drops half of a prompt's tokens with it, and compares it with others.

Run `python examples/own_score_method.py`. The model is small and random, so nothing is downloaded
and the distances mean nothing.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxkv.cache import choose_formats
from jaxkv.compress import FORCED, Compression, LayerTokens, ScoreMethod, SnapKV
from jaxkv.engine import Engine, EngineConfig, Request
from jaxkv.eval import Setting, measure
from jaxkv.models.config import AttentionConfig, LayerConfig, ModelConfig, RopeConfig
from jaxkv.models.weights import random_model


@dataclass(frozen=True)
class LongValues(ScoreMethod[None]):
    """Keeps the `recent` last tokens, and those with the longest value vectors."""

    recent: int = 16

    def score(self, tokens: LayerTokens, statistics: None, keep: jax.Array) -> jax.Array:
        return jnp.where(tokens.is_recent(self.recent), FORCED, jnp.linalg.norm(tokens.v, axis=-1))


config = ModelConfig(
    family="llama",
    layers=(LayerConfig(window=None, rope=RopeConfig(theta=10_000.0)),) * 2,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25),
    vocab_size=256,
    width=64,
    mlp_width=128,
    max_positions=512,
    rms_eps=1e-5,
)
model = random_model(config, seed=0)
prompt = tuple(b"A method gives each token a score; the tokens with the best scores are kept. " * 2)

for method in (LongValues(recent=8), SnapKV(window=16), "knorm"):
    half = Compression(method=method, budget="50%")
    engine = Engine(model, EngineConfig(compression=half, pool_tokens=1024))
    (completion,) = engine.generate([Request(prompt=prompt, max_new_tokens=4)])
    print(f"{half}: {completion.dropped_tokens:.0f} of {len(prompt)} tokens dropped", end=", ")
    setting = Setting(formats=choose_formats("f32", model.layers), compression=half)
    quality = measure(model, prompt, {"half": setting}, page_size=16, context=128)["half"]
    print(f"{quality.nbytes} bytes, KL {quality.kl_mean:.3f}")
