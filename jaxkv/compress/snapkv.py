"""SnapKV: keep tokens that the last tokens attend to, and their neighbours."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxkv.compress.inputs import LayerTokens, Queries
from jaxkv.compress.method import FORCED, PerSlot, ScoreMethod, check_integer


@dataclass(frozen=True)
class SnapKV(ScoreMethod[PerSlot]):
    """Keeps the tokens that the last tokens of the context attend to, and their neighbours (Li et
    al., arXiv 2404.14469).

    What the end of a prompt attends to is a good guess of what the answer will attend to. The score
    of token j is its attention weight from the last `window` queries t, averaged over these queries
    and the query heads of its KV head, and then over `kernel_size` neighbouring tokens i (section
    4.2 of the paper), so that passages are kept rather than single tokens:

        w_i = mean_t softmax(q_t K^T)_i        s_j = mean(w_i for |i - j| <= kernel_size // 2)

    The last `window` tokens are always kept, or as many of them as the budget allows.

    Attributes:
      window: number of last tokens whose queries are observed.
      kernel_size: number of tokens that are averaged, odd.

    Example:
      `Compression(method=SnapKV(window=32, kernel_size=7), budget="50%")`
    """

    window: int = 64
    kernel_size: int = 5

    def __post_init__(self) -> None:
        check_integer("window", self.window)
        check_integer("kernel_size", self.kernel_size)
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, got {self.kernel_size}")

    @property
    def num_queries(self) -> int:
        """See `ScoreMethod.num_queries`."""
        return self.window

    def observe(self, queries: Queries, tokens: LayerTokens) -> PerSlot:
        """See `ScoreMethod.observe`."""
        last = queries.positions >= tokens.num_tokens - self.window
        weights = jnp.where(last[None, None, :, None], queries.attention(tokens), 0.0)
        return PerSlot(weights.sum(axis=2).mean(axis=1))

    def score(self, tokens: LayerTokens, statistics: PerSlot, keep: jax.Array) -> jax.Array:
        """See `ScoreMethod.score`."""
        recent = tokens.is_recent(self.window)
        weight = jnp.where(recent, 0.0, statistics.values)
        S, size = weight.shape[1], self.kernel_size
        padded = jnp.pad(weight, ((0, 0), (size // 2, size // 2)))
        pooled = sum((padded[:, i : i + S] for i in range(1, size)), padded[:, :S])
        return jnp.where(recent, FORCED, pooled / (size * self.window))
