"""Expected attention: what queries to come are likely to attend to stays (Devoto et al., arXiv
2510.00636)."""

import jax
import jax.numpy as jnp

from jaxkv.compress.method import FORCED, LayerTokens, Queries, ScoreMethod, Seen

SINKS = 4  # first tokens, which stay, and whose queries are left out
NUM_FUTURE = 512  # positions over which a query to come is averaged


class ExpectedAttention(ScoreMethod):
    """Queries before RoPE are taken as normal, with the mean `mu` and covariance `Sigma` of the
    context's; with `R` RoPE's average rotation over the next NUM_FUTURE positions,

        z_j = (R mu) . k_j + k_j (R Sigma R^T) k_j / 2        a = softmax(z)

    is a token's expected weight (the softmax's scale is in the queries), averaged over the query
    heads of a KV head; its score is `a_j ||v_j||`.
    """

    name = "expected_attention"
    num_queries = None

    def look(self, queries: Queries, tokens: LayerTokens) -> Seen:
        """See `ScoreMethod.look`."""
        counted = (queries.positions >= SINKS).astype(jnp.float32)
        q = tokens.turn(queries.q, -queries.positions) * counted[:, None, None]
        return {
            "count": counted.sum(),
            "sum": q.sum(axis=0),
            "product": jnp.einsum("thc,thd->hcd", q, q, precision="highest"),
        }

    def score(self, tokens: LayerTokens, seen: Seen, keep: jax.Array) -> jax.Array:
        """See `ScoreMethod.score`."""
        count = jnp.maximum(seen["count"], 1.0)
        mean = seen["sum"] / count
        covariance = seen["product"] / count - mean[:, :, None] * mean[:, None]
        R = self._average_rotation(tokens)
        mean = jnp.einsum("cd,hd->hc", R, mean, precision="highest")
        covariance = jnp.einsum("ac,hcd,bd->hab", R, covariance, R, precision="highest")
        (K, _, D), H = tokens.k.shape, mean.shape[0]
        G = H // K
        mean, covariance = mean.reshape(K, G, D), covariance.reshape(K, G, D, D)
        z = jnp.einsum("kgd,ksd->kgs", mean, tokens.k, precision="highest")
        z += 0.5 * jnp.einsum(
            "ksc,kgcd,ksd->kgs", tokens.k, covariance, tokens.k, precision="highest"
        )
        sinks = tokens.slots < SINKS
        counted = tokens.live & ~sinks[None]
        weights = jax.nn.softmax(jnp.where(counted[:, None], z, -jnp.inf), axis=-1)
        weights = jnp.where(counted[:, None], weights, 0.0).mean(axis=1)
        norms = jnp.sqrt((tokens.v**2).sum(axis=-1))
        return jnp.where(sinks[None], FORCED, weights * norms)

    def _average_rotation(self, tokens: LayerTokens) -> jax.Array:
        """`[D, D]`: what RoPE at the next positions does to a vector on average."""
        D = tokens.k.shape[-1]
        unit = jnp.broadcast_to(jnp.eye(D)[None], (NUM_FUTURE, D, D))
        by = tokens.num_tokens + jnp.arange(NUM_FUTURE, dtype=jnp.int32)
        return tokens.turn(unit, by).mean(axis=0).T
