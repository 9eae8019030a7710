"""KeyDiff: keep tokens whose keys differ from the others."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxkv.compress.inputs import LayerTokens
from jaxkv.compress.method import ScoreMethod

EPSILON = 1e-12


@dataclass(frozen=True)
class KeyDiff(ScoreMethod[None]):
    """Keeps the tokens whose keys point away from the average key (Park et al., arXiv 2504.15364).

    Similar keys are redundant: attention hardly tells their tokens apart. The score is minus the
    cosine with the *anchor* a, the mean of all keys after each is scaled to length 1:

        a = mean_i k_i / ||k_i||        s_j = -cos(k_j, a)

    No query is needed.

    Example:
      `Compression(method=KeyDiff(), budget="50%")`
    """

    def score(self, tokens: LayerTokens, statistics: None, keep: jax.Array) -> jax.Array:
        """See `ScoreMethod.score`."""
        unit = _unit(tokens.k)  # 0 in slots without a token
        anchor = _unit(unit.sum(axis=1, keepdims=True))
        return -(unit * jnp.broadcast_to(anchor, unit.shape)).sum(axis=-1)


def _unit(x: jax.Array) -> jax.Array:
    norm = jnp.sqrt((x**2).sum(axis=-1, keepdims=True))
    return x / jnp.maximum(norm, EPSILON)
