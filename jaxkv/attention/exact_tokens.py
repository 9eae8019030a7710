"""A layer whose pages of codes are written when they are full (KIVI).

New tokens are written to bfloat16 pages in a group of their own. A page that a step fills is
written once more as codes. Recent tokens, and the first pages where the format keeps them, are read
from the bfloat16 pages, all others as codes. Which pages a key is read from depends only on its
position and the query's, so that a prefix gives the same output whether it was computed in this
step or found in the cache.
"""

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp

from jaxkv.attention.layer import Queries, paged_attention
from jaxkv.attention.step import StepInputs
from jaxkv.cache import KVCache, seal, write
from jaxkv.cache.formats import Exact
from pallas_kernels import KeyPart, merge_partials
from pallas_kernels.attention.ragged import owner
from pallas_kernels.codes import finite


@dataclass(frozen=True)
class ExactTokensLayer:
    """Writes and reads a layer with pages of codes and bfloat16 pages.

    Attributes:
      codes: index of the layer, and of its pages of codes in `KVCache.layers`.
      exact: index of its bfloat16 pages.
      kept: which tokens are read from them.
    """

    codes: int
    exact: int
    kept: Exact

    def write(self, cache: KVCache, k: jax.Array, v: jax.Array, step: StepInputs) -> KVCache:
        """See `LayerAttention`."""
        (target,), (source,) = cache.groups_of(self.codes), cache.groups_of(self.exact)
        # The bfloat16 values are finite, like the codes that they become.
        slots = step.slots(source, cache.page_size)
        cache = write(cache, self.exact, finite(k), finite(v), slots)
        (exact, codes), count = filled_pages(step, (source, target), cache.page_size)
        return seal(cache, self.codes, exact, codes, count)

    def read(self, cache: KVCache, queries: Queries) -> jax.Array:
        """See `LayerAttention`."""
        P, kept = cache.page_size, self.kept

        def partial(
            index: int, part: Literal["first", "middle", "recent"]
        ) -> tuple[jax.Array, jax.Array]:
            keys = KeyPart(
                part=part, page_size=P, recent=kept.recent + 1, first=kept.sink_pages * P
            )
            options = replace(queries.options, keys=keys)
            wide = replace(queries, q=queries.q.astype(jnp.float32), options=options)
            (group,) = cache.groups_of(index)
            return paged_attention(cache.layers[index], group, wide)

        merged = merge_partials(*partial(self.codes, "middle"), *partial(self.exact, "recent"))
        if kept.sink_pages:
            merged = merge_partials(*partial(self.exact, "first"), *merged)
        return merged[0].astype(queries.q.dtype)


def filled_pages(
    step: StepInputs, groups: tuple[int, ...], page_size: int
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """The pages whose last slot a step writes.

    Returns:
      Page ids `[T // P + B]` int32 for each of `groups`, the same logical pages in all, and their
      number, an int32 scalar; the entries after it are padding.
    """
    (T,), (B,) = step.tokens.shape, step.seq_lens.shape
    query_lens = step.query_starts[1:] - step.query_starts[:-1]
    before, after = (step.seq_lens - query_lens) // page_size, step.seq_lens // page_size
    ends = jnp.cumsum(after - before, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    index = jnp.arange(T // page_size + B, dtype=jnp.int32)
    seq = jnp.minimum(owner(starts, index), B - 1)
    place = before[seq] + index - starts[seq]
    tables = (step.page_tables[group] for group in groups)
    return tuple(table.at[seq, place].get(mode="clip") for table in tables), starts[-1]
