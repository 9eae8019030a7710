"""KeyDiff: tokens whose keys differ from the others stay (Park et al., arXiv 2504.15364)."""

import jax
import jax.numpy as jnp

from jaxkv.compress.method import LayerTokens, ScoreMethod, Seen

EPSILON = 1e-12


class KeyDiff(ScoreMethod):
    """`-cos(k_j, a)`, with `a` the mean of all keys at length 1."""

    name = "keydiff"

    def score(self, tokens: LayerTokens, seen: Seen, keep: jax.Array) -> jax.Array:
        """See `ScoreMethod.score`."""
        unit = _unit(tokens.k)  # of an empty slot 0
        anchor = _unit(unit.sum(axis=1, keepdims=True))
        return -(unit * jnp.broadcast_to(anchor, unit.shape)).sum(axis=-1)


def _unit(x: jax.Array) -> jax.Array:
    norm = jnp.sqrt((x**2).sum(axis=-1, keepdims=True))
    return x / jnp.maximum(norm, EPSILON)
