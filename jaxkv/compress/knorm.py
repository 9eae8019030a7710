"""Knorm: keep tokens with short keys."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxkv.compress.inputs import LayerTokens
from jaxkv.compress.method import ScoreMethod


@dataclass(frozen=True)
class Knorm(ScoreMethod[None]):
    """Keeps the tokens whose keys are shortest (Devoto et al., arXiv 2406.11430).

    The authors observed that keys of small L2 norm get high attention in most heads of trained
    models. The score of token j is

        s_j = -||k_j||

    RoPE does not change norms, so positions do not matter. No query is needed: this is the cheapest
    method.

    Example:
      `Compression(method=Knorm(), budget="50%")`
    """

    def score(self, tokens: LayerTokens, statistics: None, keep: jax.Array) -> jax.Array:
        """See `ScoreMethod.score`."""
        return -jnp.sqrt((tokens.k**2).sum(axis=-1))
