"""H2O: keep tokens that have received most attention, and recent ones."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxkv.compress.inputs import LayerTokens, Queries
from jaxkv.compress.method import FORCED, PerSlot, ScoreMethod, check_part, part_of


@dataclass(frozen=True)
class H2O(ScoreMethod[PerSlot]):
    """Keeps the *heavy hitters*, which have received most attention so far, and the most recent
    tokens (Zhang et al., arXiv 2306.14048).

    The score of token j is the sum of its attention weights from all queries t so far, averaged
    over the query heads of its KV head:

        s_j = sum_t softmax(q_t K^T)_j

    Recent tokens had few queries to collect weight from, so a part of the budget is reserved for
    them.

    Attributes:
      recent_part: part of the budget for the most recent tokens, 0 to 1, rounded down to tokens.

    Example:
      `Compression(method=H2O(recent_part=0.25), budget="50%")`
    """

    recent_part: float = 0.5

    def __post_init__(self) -> None:
        check_part("recent_part", self.recent_part)

    @property
    def num_queries(self) -> None:
        """See `ScoreMethod.num_queries`."""
        return None

    def observe(self, queries: Queries, tokens: LayerTokens) -> PerSlot:
        """See `ScoreMethod.observe`."""
        return PerSlot(queries.attention(tokens).sum(axis=2).mean(axis=1))

    def score(self, tokens: LayerTokens, statistics: PerSlot, keep: jax.Array) -> jax.Array:
        """See `ScoreMethod.score`."""
        recent = tokens.is_recent(part_of(keep, self.recent_part))
        return jnp.where(recent, FORCED, statistics.values)
