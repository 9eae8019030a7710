"""AdaKV: the heads of a layer share its budget."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxkv.compress.inputs import LayerTokens, Queries
from jaxkv.compress.method import FORCED, ScoreMethod, check_part, part_of, ranks


@dataclass(frozen=True)
class AdaKV[Statistics](ScoreMethod[Statistics]):
    """Lets the KV heads of a layer share its budget, by the scores of another method (Feng et al.,
    arXiv 2407.11550).

    Some heads attend to few tokens, others to many; a head of the first kind needs less of the
    budget. With K heads and a budget of `keep` tokens per head, each head keeps its best
    `safeguard * keep` tokens, and the rest of the layer's `K * keep` tokens are the best of all
    heads together. Heads then keep different numbers of tokens, in pages
    of their own.

    A method whose heads all have the same scores (`TOVA`) gains nothing from it.

    Attributes:
      method: gives the scores, and the budget of each layer.
      safeguard: part of `keep` that each head keeps in any case, 0 to 1, rounded down to tokens.

    Example:
      `Compression(method=AdaKV(SnapKV(window=32), safeguard=0.3), budget="50%")`
    """

    method: ScoreMethod[Statistics]
    safeguard: float = 0.2

    def __post_init__(self) -> None:
        if not isinstance(self.method, ScoreMethod):
            raise ValueError(f"method must be a ScoreMethod, got {self.method!r}")
        check_part("safeguard", self.safeguard)

    @property
    def num_queries(self) -> int | None:
        """See `ScoreMethod.num_queries`."""
        return self.method.num_queries

    @property
    def query_aware(self) -> bool:
        """See `ScoreMethod.query_aware`."""
        return self.method.query_aware

    @property
    def uneven(self) -> bool:
        """See `ScoreMethod.uneven`."""
        return True

    def observe(self, queries: Queries, tokens: LayerTokens) -> Statistics:
        """See `ScoreMethod.observe`."""
        return self.method.observe(queries, tokens)

    def accumulate(self, total: Statistics, new: Statistics) -> Statistics:
        """See `ScoreMethod.accumulate`."""
        return self.method.accumulate(total, new)

    def score(self, tokens: LayerTokens, statistics: Statistics, keep: jax.Array) -> jax.Array:
        """See `ScoreMethod.score`."""
        return self.method.score(tokens, statistics, keep)

    def choose(self, scores: jax.Array, keep: jax.Array) -> jax.Array:
        """See `ScoreMethod.choose`; the heads keep `K * keep` tokens together."""
        own_best = (ranks(scores) < part_of(keep, self.safeguard)) & (scores > -jnp.inf)
        always = own_best | (scores == jnp.inf)
        scores = jnp.where(always, jnp.inf, jnp.minimum(scores, FORCED))
        K = scores.shape[0]
        return (ranks(scores.reshape(-1)) < K * keep).reshape(scores.shape)

    def budgets(
        self, num_layers: int, num_tokens: int, keep: int, num_protected: int = 0
    ) -> list[int]:
        """See `ScoreMethod.budgets`."""
        return self.method.budgets(num_layers, num_tokens, keep, num_protected)
