"""AdaKV: heads of a layer share its budget, by the scores of another method (Feng et al., arXiv
2407.11550)."""

import jax
import jax.numpy as jnp

from jaxkv.compress.method import FORCED, LayerTokens, Queries, ScoreMethod, Seen, ranks

SAFE_PART = 5  # every head has that part of the average budget, a fifth


class AdaKV(ScoreMethod):
    """The best tokens of all heads of a layer stay, whichever head they are of; each head keeps
    a SAFE_PART-th of the average budget at least."""

    by_head = True

    def __init__(self, method: ScoreMethod):
        """Makes a method of the scores of `method`."""
        self.method = method
        self.name = f"adakv_{method.name}"
        self.num_queries = method.num_queries
        self.by_layer = method.by_layer
        self.by_slot = method.by_slot
        self.query_aware = method.query_aware

    def look(self, queries: Queries, tokens: LayerTokens) -> Seen:
        """See `ScoreMethod.look`."""
        return self.method.look(queries, tokens)

    def score(self, tokens: LayerTokens, seen: Seen, keep: jax.Array) -> jax.Array:
        """See `ScoreMethod.score`."""
        return self.method.score(tokens, seen, keep)

    def choose(self, scores: jax.Array, keep: jax.Array) -> jax.Array:
        """See `ScoreMethod.choose`; the layer keeps `K * keep` tokens."""
        sure = ((ranks(scores) < keep // SAFE_PART) & (scores > -jnp.inf)) | (scores == jnp.inf)
        scores = jnp.where(sure, jnp.inf, jnp.minimum(scores, FORCED))
        K = scores.shape[0]
        return (ranks(scores.reshape(-1)) < K * keep).reshape(scores.shape)

    def budgets(
        self, num_layers: int, num_tokens: int, keep: int, num_protected: int = 0
    ) -> list[int]:
        """See `ScoreMethod.budgets`."""
        return self.method.budgets(num_layers, num_tokens, keep, num_protected)
