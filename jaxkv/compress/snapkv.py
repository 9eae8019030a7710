"""SnapKV: what the last tokens attend to stays, and around it (Li et al., arXiv 2404.14469)."""

import jax
import jax.numpy as jnp

from jaxkv.compress.method import FORCED, LayerTokens, Queries, ScoreMethod, Seen

WINDOW = 64  # last tokens, whose queries are looked at
KERNEL = 5  # slots that are averaged


class SnapKV(ScoreMethod):
    """Attention weights of the last WINDOW queries on the tokens before them, averaged over the
    queries, KERNEL neighbours and the query heads of a KV head. The last WINDOW tokens stay, or as
    many as there is room for."""

    name = "snapkv"
    num_queries = WINDOW
    query_aware = True

    def look(self, queries: Queries, tokens: LayerTokens) -> Seen:
        """See `ScoreMethod.look`."""
        last = queries.positions >= tokens.num_tokens - WINDOW
        weights = jnp.where(last[None, None, :, None], queries.attention(tokens), 0.0)
        return {"weight": weights.sum(axis=2).mean(axis=1)}

    def score(self, tokens: LayerTokens, seen: Seen, keep: jax.Array) -> jax.Array:
        """See `ScoreMethod.score`."""
        recent = tokens.is_recent(WINDOW)
        weight = jnp.where(recent, 0.0, seen["weight"])
        half = KERNEL // 2
        padded = jnp.pad(weight, ((0, 0), (half, half)))
        S = weight.shape[1]
        pooled = sum((padded[:, i : i + S] for i in range(1, KERNEL)), padded[:, :S])
        return jnp.where(recent, FORCED, pooled / (KERNEL * WINDOW))
