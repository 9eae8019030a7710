"""Random scores: the baseline that every method has to beat."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxkv.compress.inputs import LayerTokens
from jaxkv.compress.method import ScoreMethod, check_integer


@dataclass(frozen=True)
class Random(ScoreMethod[None]):
    """Keeps tokens at random.

    Scores are uniform numbers that depend only on the seed, the length of the sequence, the layer,
    the head and the slot, so a sequence that is computed again keeps the same tokens.

    Attributes:
      seed: seed of the random numbers.

    Example:
      `Compression(method=Random(seed=1), budget="50%")`
    """

    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("seed", self.seed, least=0)

    def score(self, tokens: LayerTokens, statistics: None, keep: jax.Array) -> jax.Array:
        """See `ScoreMethod.score`."""
        key = jax.random.fold_in(jax.random.key(self.seed), tokens.num_tokens)
        key = jax.random.fold_in(key, tokens.layer)

        def draw(head: jax.Array, slot: jax.Array) -> jax.Array:
            return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, head), slot))

        heads = jnp.arange(tokens.k.shape[0], dtype=jnp.int32)
        return jax.vmap(jax.vmap(draw, (None, 0)), (0, None))(heads, tokens.slots)
