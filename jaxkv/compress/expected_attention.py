"""Expected attention: keep tokens that future queries are likely to attend to."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.compress.inputs import LayerTokens, Queries
from jaxkv.compress.method import FORCED, ScoreMethod, check_integer


class QueryMoments(NamedTuple):
    """Sums over queries before RoPE, from which their mean and covariance follow.

    Attributes:
      num_queries: float32 scalar, number of queries.
      total: `[H, D]`, sum of the queries.
      product: `[H, D, D]`, sum of their outer products.
    """

    num_queries: jax.Array
    total: jax.Array
    product: jax.Array


@dataclass(frozen=True)
class ExpectedAttention(ScoreMethod[QueryMoments]):
    """Keeps the tokens that future queries are expected to attend to (Devoto et al., arXiv
    2510.00636).

    Future queries are unknown, but their distribution is not: before RoPE it is close to a normal
    distribution with the mean `mu` and covariance `Sigma` of the queries so far. With `R` the
    average of RoPE's rotation over the next `future_positions` positions, the expected logit of
    token j has a closed form, the moment generating function of a normal distribution:

        z_j = (R mu) . k_j + k_j (R Sigma R^T) k_j / 2
        a = softmax(z)        s_j = a_j ||v_j||

    `a` is averaged over the query heads of a KV head, and the scale of the softmax is part of the
    queries. The norm of the value weighs how much a token changes the output.

    Attributes:
      sink_tokens: first tokens, which are always kept and whose queries are left out.
      future_positions: positions over which the rotation is averaged.

    Example:
      `Compression(method=ExpectedAttention(future_positions=128), budget="50%")`
    """

    sink_tokens: int = 4
    future_positions: int = 512

    def __post_init__(self) -> None:
        check_integer("sink_tokens", self.sink_tokens, least=0)
        check_integer("future_positions", self.future_positions)

    @property
    def num_queries(self) -> None:
        """See `ScoreMethod.num_queries`."""
        return None

    @property
    def query_aware(self) -> bool:
        """False: the distribution of all queries is not the question of one of them."""
        return False

    def observe(self, queries: Queries, tokens: LayerTokens) -> QueryMoments:
        """See `ScoreMethod.observe`."""
        counted = (queries.positions >= self.sink_tokens).astype(jnp.float32)
        q = tokens.turn(queries.q, -queries.positions) * counted[:, None, None]
        return QueryMoments(
            num_queries=counted.sum(),
            total=q.sum(axis=0),
            product=jnp.einsum("thc,thd->hcd", q, q, precision="highest"),
        )

    def score(self, tokens: LayerTokens, statistics: QueryMoments, keep: jax.Array) -> jax.Array:
        """See `ScoreMethod.score`."""
        sinks = tokens.slots < self.sink_tokens
        counted = tokens.live & ~sinks[None]
        z = self._expected_logits(tokens, statistics)
        weights = jax.nn.softmax(jnp.where(counted[:, None], z, -jnp.inf), axis=-1)
        weights = jnp.where(counted[:, None], weights, 0.0).mean(axis=1)
        norms = jnp.sqrt((tokens.v**2).sum(axis=-1))
        return jnp.where(sinks[None], FORCED, weights * norms)

    def _expected_logits(self, tokens: LayerTokens, moments: QueryMoments) -> jax.Array:
        """`z` of the class docstring, `[K, G, S]`."""
        count = jnp.maximum(moments.num_queries, 1.0)
        mean = moments.total / count
        covariance = moments.product / count - mean[:, :, None] * mean[:, None]
        R = self._average_rotation(tokens)
        mean = jnp.einsum("cd,hd->hc", R, mean, precision="highest")
        covariance = jnp.einsum("ac,hcd,bd->hab", R, covariance, R, precision="highest")
        (K, _, D), H = tokens.k.shape, mean.shape[0]
        G = H // K
        mean, covariance = mean.reshape(K, G, D), covariance.reshape(K, G, D, D)
        z = jnp.einsum("kgd,ksd->kgs", mean, tokens.k, precision="highest")
        return z + 0.5 * jnp.einsum(
            "ksc,kgcd,ksd->kgs", tokens.k, covariance, tokens.k, precision="highest"
        )

    def _average_rotation(self, tokens: LayerTokens) -> jax.Array:
        """`R` of the class docstring, `[D, D]`."""
        D = tokens.k.shape[-1]
        unit = jnp.broadcast_to(jnp.eye(D)[None], (self.future_positions, D, D))
        by = tokens.num_tokens + jnp.arange(self.future_positions, dtype=jnp.int32)
        return tokens.turn(unit, by).mean(axis=0).T
