"""Drops tokens of one sequence in a paged cache.

    observe   computes the queries of some tokens again and takes statistics of them
    choose    scores each token of each KV head of the layers without a window, and keeps the best
    move      copies the kept tokens to other pages, or to the first slots of the same pages

Kept tokens keep the positions at which they were rotated; the next token's position is the length
of the sequence, dropped tokens included. A caller does three things:

    kept = compressor.choose(cache, row, tokens, budget)      # None: the budget keeps every token
    ...                                                       # pages for compressor.lens(kept)
    cache = compressor.move(cache, kept, row, target)
"""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import jax
import numpy as np

from jaxkv.attention import AttentionBackend, Backend
from jaxkv.cache import KVCache
from jaxkv.compress import device
from jaxkv.compress.budget import Budget
from jaxkv.compress.kept import MAX_SPANS, Kept, Row, Spans, num_protected
from jaxkv.compress.method import ScoreMethod, map_slots
from jaxkv.model import DecodeModel

CHUNK = 64  # tokens whose queries are computed in one call


class Compressor:
    """The compiled functions of one model and one score method.

    Attributes:
      method: scores and chooses tokens.
      groups: the layer groups of each layer that drops tokens; these are the layers without a
        window, in ascending order. A layer has several groups if each head has its own pages.
    """

    def __init__(
        self,
        model: DecodeModel,
        cache: KVCache,
        method: ScoreMethod,
        *,
        backend: str | Backend | None = None,
    ):
        """Compiles nothing yet.

        Args:
          model: the decoder.
          cache: any cache of the kind that tokens are dropped from; it is not kept.
          method: scores and chooses tokens.
          backend: the attention backend, see `jaxkv.attention.AttentionBackend`.
        """
        full = tuple(i for i, layer in enumerate(cache.spec.layers) if layer.window is None)
        self.method = method
        self.groups = {layer: cache.groups_of(layer) for layer in full}
        self._params = model.params
        attention = AttentionBackend(name=backend, query_tile=CHUNK)
        self._observe = jax.jit(partial(device.observe, model, method, full, attention))
        self._choose = jax.jit(partial(device.choose, model, method, full))
        self._move = jax.jit(partial(device.move, full), donate_argnums=0)

    def choose(
        self,
        cache: KVCache,
        row: Row,
        tokens: Sequence[int],
        budget: Budget,
        *,
        protect: Spans = (),
        since: int = 0,
        before: Kept | None = None,
    ) -> Kept | None:
        """Chooses which tokens of a sequence are kept; the cache is only read.

        Args:
          cache: the cache.
          row: the sequence's row, on the host.
          tokens: all tokens of the sequence that are computed.
          budget: how many of them each KV head keeps, on average over heads and layers.
          protect: spans `[start, end)` of positions that are kept whatever their score; together
            no more than the budget.
          since: position of the first token whose query may be observed.
          before: the last choice, if tokens were dropped before.

        Returns:
          The choice; None if the budget keeps every token that is still there.
        """
        n = len(tokens)
        keep = budget.keep(n)
        groups = [group for own in self.groups.values() for group in own]
        if keep >= n - row.dropped[groups].mean():
            return None
        row = row.narrow(cache.page_size)
        S = row.tables.shape[1] * cache.page_size
        statistics = self._statistics(cache, row, tokens, since, before)
        known = None
        if before is not None:
            known = device.Positions(device.resized(before.positions, S), before.counts)
        spans = np.zeros((MAX_SPANS, 2), np.int32)
        spans[: len(protect)] = np.reshape(np.asarray(protect, np.int32), (-1, 2))
        budgets = self.method.budgets(len(self.groups), n, keep, num_protected(protect))
        num_layers = len(self.groups)
        if len(budgets) != num_layers or min(budgets) < 1:
            raise ValueError(
                f"budgets of {self.method} must be {num_layers} positive numbers, got {budgets}"
            )
        return self._choose(cache, row, statistics, known, spans, np.array(budgets, np.int32))

    def _statistics(
        self, cache: KVCache, row: Row, tokens: Sequence[int], since: int, before: Kept | None
    ) -> tuple[Any, ...]:
        """The method's statistics of each layer, accumulated over chunks of queries."""
        parts, n, wanted = [], len(tokens), self.method.num_queries
        if before is not None and wanted is None:
            S = row.tables.shape[1] * cache.page_size
            parts.append(
                tuple(map_slots(partial(device.resized, S=S), x) for x in before.statistics)
            )
        first = since if wanted is None else max(since, n - wanted)
        for start in range(first, n, CHUNK):
            part = np.asarray(tokens[start : start + CHUNK], np.int32)
            padded = np.pad(part, (0, CHUNK - len(part)))
            chunk = device.Chunk(padded, np.int32(start + len(part)), np.int32(len(part)))
            parts.append(self._observe(self._params, cache, row, chunk))
        if not parts:
            return (None,) * len(self.groups)
        return tuple(reduce(self.method.accumulate, own) for own in zip(*parts, strict=True))

    def lens(self, kept: Kept) -> dict[int, int]:
        """Returns how many tokens each layer group keeps, for the groups that drop tokens."""
        counts = np.asarray(kept.counts)
        return {
            group: int(counts[i, head])
            for i, groups in enumerate(self.groups.values())
            for head, group in enumerate(groups)
        }

    def move(self, cache: KVCache, kept: Kept, row: Row, target: np.ndarray) -> KVCache:
        """Moves the kept tokens to other pages; `cache` is donated.

        Args:
          cache: the cache.
          kept: what `choose` returned.
          row: the row that it was chosen for.
          target: `[groups, M]` int32, the pages to fill from slot 0 on; they may be the row's own.

        Returns:
          The new cache. The caller books the new lengths (`lens`).
        """
        row = row.narrow(cache.page_size)
        return self._move(cache, kept.slots, kept.counts, row, target[:, : row.tables.shape[1]])
