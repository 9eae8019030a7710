"""Knorm: tokens with small keys stay (Devoto et al., arXiv 2406.11430)."""

import jax
import jax.numpy as jnp

from jaxkv.compress.method import LayerTokens, ScoreMethod, Seen


class Knorm(ScoreMethod):
    """`-||k_j||`. RoPE keeps norms, so positions do not matter."""

    name = "knorm"

    def score(self, tokens: LayerTokens, seen: Seen, keep: jax.Array) -> jax.Array:
        """See `ScoreMethod.score`."""
        return -jnp.sqrt((tokens.k**2).sum(axis=-1))
