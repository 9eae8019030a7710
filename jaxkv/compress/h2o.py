"""H2O: tokens that got most attention, and recent ones, stay (Zhang et al., arXiv 2306.14048)."""

import jax
import jax.numpy as jnp

from jaxkv.compress.method import FORCED, LayerTokens, Queries, ScoreMethod, Seen


class H2O(ScoreMethod):
    """Attention weight that a token got from all queries so far, averaged over the query heads of
    its KV head. Half of the budget is for the most recent tokens."""

    name = "h2o"
    num_queries = None
    query_aware = True
    by_slot = ("weight",)

    def look(self, queries: Queries, tokens: LayerTokens) -> Seen:
        """See `ScoreMethod.look`."""
        return {"weight": queries.attention(tokens).sum(axis=2).mean(axis=1)}

    def score(self, tokens: LayerTokens, seen: Seen, keep: jax.Array) -> jax.Array:
        """See `ScoreMethod.score`."""
        return jnp.where(tokens.is_recent(keep // 2), FORCED, seen["weight"])
