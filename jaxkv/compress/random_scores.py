"""Random: any tokens stay. The baseline that a method has to beat."""

import jax
import jax.numpy as jnp

from jaxkv.compress.method import LayerTokens, ScoreMethod, Seen


class Random(ScoreMethod):
    """Uniform numbers, drawn by seed, number of tokens, layer, head and slot alone."""

    name = "random"

    def __init__(self, seed: int = 0):
        self.seed = seed

    def score(self, tokens: LayerTokens, seen: Seen, keep: jax.Array) -> jax.Array:
        """See `ScoreMethod.score`."""
        key = jax.random.fold_in(jax.random.key(self.seed), tokens.num_tokens)
        key = jax.random.fold_in(key, tokens.layer)

        def draw(head: jax.Array, slot: jax.Array) -> jax.Array:
            return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, head), slot))

        heads = jnp.arange(tokens.k.shape[0], dtype=jnp.int32)
        return jax.vmap(jax.vmap(draw, (None, 0)), (0, None))(heads, tokens.slots)
