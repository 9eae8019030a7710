"""TOVA: keep tokens that the last token attends to."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxkv.compress.inputs import LayerTokens, Queries
from jaxkv.compress.method import FORCED, PerSlot, ScoreMethod


@dataclass(frozen=True)
class TOVA(ScoreMethod[PerSlot]):
    """Keeps the tokens that the last token attends to (Oren et al., arXiv 2401.06104).

    Token Omission Via Attention: the score of token j is its attention weight from the last query,
    averaged over all query heads of the layer, so all heads keep the same tokens. The last token
    itself is always kept. The paper drops one token per step; `Compression.interval=1` does that.

    Example:
      `Compression(method=TOVA(), budget=512, interval=1)`
    """

    @property
    def num_queries(self) -> int:
        """See `ScoreMethod.num_queries`."""
        return 1

    def observe(self, queries: Queries, tokens: LayerTokens) -> PerSlot:
        """See `ScoreMethod.observe`."""
        last = queries.positions == tokens.num_tokens - 1
        weights = jnp.where(last[None, None, :, None], queries.attention(tokens), 0.0)
        mean = weights.sum(axis=2).mean(axis=(0, 1))
        return PerSlot(jnp.broadcast_to(mean[None], tokens.k.shape[:2]))

    def score(self, tokens: LayerTokens, statistics: PerSlot, keep: jax.Array) -> jax.Array:
        """See `ScoreMethod.score`."""
        return jnp.where(tokens.is_recent(1), FORCED, statistics.values)
