"""TOVA: what the last token attends to stays (Oren et al., arXiv 2401.06104)."""

import jax
import jax.numpy as jnp

from jaxkv.compress.method import FORCED, LayerTokens, Queries, ScoreMethod, Seen


class Tova(ScoreMethod):
    """Attention weight of the last query, averaged over all heads: all keep the same tokens, and
    the last one among them."""

    name = "tova"
    num_queries = 1
    query_aware = True
    same_tokens = True

    def look(self, queries: Queries, tokens: LayerTokens) -> Seen:
        """See `ScoreMethod.look`."""
        last = queries.positions == tokens.num_tokens - 1
        weights = jnp.where(last[None, None, :, None], queries.attention(tokens), 0.0)
        mean = weights.sum(axis=2).mean(axis=(0, 1))
        return {"weight": jnp.broadcast_to(mean[None], tokens.k.shape[:2])}

    def score(self, tokens: LayerTokens, seen: Seen, keep: jax.Array) -> jax.Array:
        """See `ScoreMethod.score`."""
        return jnp.where(tokens.is_recent(1), FORCED, seen["weight"])
