"""Dropping tokens of a sequence in a paged cache: look at queries, score, choose, move.

    look      runs tokens once more for their queries' sake, and sums up what they tell
    choose    scores each token of each KV head of the layers without a window: which of them stay
    move      brings those that stay into other pages, or to the front of the same ones

Each is one jitted function over the sequence's page tables, cut to a width that holds the sequence
(powers of two of pages, so that few are compiled). Tokens that stay keep the positions at which
they were rotated; the next token's position is the sequence's length, dropped tokens included. Not
here: scores (a file each), who holds which page (`jaxkv.prefix`), when it is done (`jaxkv.engine`).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.attention import AttentionBackend, Backend, StepInputs
from jaxkv.cache import KVCache, LayerSpec, gather_dense, move_tokens, rotate
from jaxkv.compress.method import FORCED, LayerTokens, Queries, ScoreMethod, Seen

CHUNK = 64  # tokens that are looked at in one call
MIN_WIDTH = 8  # pages of the narrowest tables
MAX_SPANS = 16  # of protected tokens

Spans = Sequence[tuple[int, int]]


def num_protected(spans: Spans) -> int:
    """Tokens that are in any of some spans `[start, end)`."""
    total = behind = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, behind))
        behind = max(behind, end)
    return total


class Model(Protocol):
    """What is asked of a model; a `jaxkv.engine.DecodeModel` has it."""

    @property
    def params(self) -> Any:
        """Parameters, a pytree."""
        ...

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer keeps for a token."""
        ...

    def forward(
        self, params: Any, cache: KVCache, step: StepInputs, backend: AttentionBackend
    ) -> tuple[jax.Array, KVCache]:
        """Runs a step."""
        ...

    def turn(self, layer: int, x: jax.Array, by: jax.Array) -> jax.Array:
        """Rotates `[T, heads, D]` on by `[T]` positions, as a layer's RoPE does."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence's row of the page tables.

    Attributes:
      tables: `[groups, M]` int32, page ids.
      dropped: `[groups]` int32, tokens that a group no longer has.
      num_tokens: int32 scalar, dropped ones included.
    """

    tables: Any
    dropped: Any
    num_tokens: Any

    def narrow(self, page_size: int) -> "Row":
        """The row without columns that no token needs; on the host."""
        M = self.tables.shape[1]
        used = -(-int(self.num_tokens - self.dropped.min()) // page_size)
        width = min(M, max(MIN_WIDTH, 1 << (used - 1).bit_length()))
        return dataclasses.replace(self, tables=self.tables[:, :width])


class Kept(NamedTuple):
    """Which tokens stay, in the F layers that lose some.

    Attributes:
      slots: `[F, K, S]` int32, of each KV head the slots of those that stay, ascending; behind them
        S.
      positions: `[F, K, S]` int32, their positions in the sequence.
      counts: `[F, K]` int32, how many.
      seen: of each layer what its method goes on to add up.
    """

    slots: jax.Array
    positions: jax.Array
    counts: jax.Array
    seen: tuple[Seen, ...]

    def lens(self, cache: KVCache, layers: Sequence[int]) -> dict[int, int]:
        """By layer group, how many tokens are left in it; `layers` are those that lost some."""
        counts = np.asarray(self.counts)
        return {
            group: int(counts[i, head])
            for i, layer in enumerate(layers)
            for head, group in enumerate(cache.groups_of(layer))
        }


class Compressor:
    """The compiled functions of one model and one method.

    Attributes:
      method: scores and chooses.
      layers: the layers that lose tokens, F of them: those without a window.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        method: ScoreMethod,
        *,
        backend: str | Backend | None = None,
    ):
        """Compiles nothing yet.

        Args:
          model: the decoder.
          cache: of the kind that is to lose tokens; it is not kept.
          method: scores and chooses.
          backend: of attention.
        """
        L = len(cache.exact)
        self.method = method
        self.layers = tuple(i for i in range(L) if cache.windows[cache.groups[i]] is None)
        self._params = model.params
        attention = AttentionBackend(name=backend, query_tile=CHUNK)
        self._look = jax.jit(partial(_look, model, method, self.layers, attention))
        self._choose = jax.jit(partial(_choose, model, method, self.layers))
        self._move = jax.jit(partial(_move, self.layers), donate_argnums=0)

    def choose(
        self,
        cache: KVCache,
        row: Row,
        tokens: Sequence[int],
        keep: int,
        *,
        spans: Spans = (),
        since: int = 0,
        before: Kept | None = None,
    ) -> Kept:
        """Chooses which tokens of a sequence stay; the cache stays as it is.

        Args:
          cache: the cache.
          row: of the sequence.
          tokens: all of its tokens that are computed.
          keep: how many each KV head keeps, on average where the method shares them out.
          spans: positions `[start, end)` of tokens that stay whatever their score; `keep` in all
            at most.
          since: position from which on queries are looked at.
          before: the last choice, if tokens were dropped before.
        """
        row, n = row.narrow(cache.page_size), len(tokens)
        S = row.tables.shape[1] * cache.page_size
        wanted = self.method.num_queries
        seen = []
        if before is not None and wanted is None:
            seen.append(_sized_seen(before.seen, self.method.by_slot, S))
        first = since if wanted is None else max(since, n - wanted)
        for start in range(first, n, CHUNK):
            chunk = np.zeros(CHUNK, np.int32)
            end = min(n, start + CHUNK)
            chunk[: end - start] = tokens[start:end]
            spot = np.array([end, end - start], np.int32)
            seen.append(self._look(self._params, cache, row, chunk, spot))
        sums = _total(seen) if seen else ({},) * len(self.layers)
        known = None if before is None else (_sized(before.positions, S), before.counts)
        bounds = np.zeros((MAX_SPANS, 2), np.int32)
        bounds[: len(spans)] = np.reshape(np.asarray(spans, np.int32), (-1, 2))
        budgets = self.method.budgets(len(self.layers), n, keep, num_protected(spans))
        return self._choose(cache, row, sums, known, bounds, np.array(budgets, np.int32))

    def move(self, cache: KVCache, kept: Kept, row: Row, target: np.ndarray) -> KVCache:
        """Brings the tokens that stay into other pages; `cache` is donated.

        Args:
          cache: the cache.
          kept: which.
          row: where they are.
          target: `[groups, M]` int32, the pages that they go to, from slot 0 on; those of `row`
            will do.
        """
        row = row.narrow(cache.page_size)
        return self._move(cache, kept.slots, kept.counts, row, target[:, : row.tables.shape[1]])


def _look(
    model: Model,
    method: ScoreMethod,
    layers: Sequence[int],
    attention: AttentionBackend,
    params: Any,
    cache: KVCache,
    row: Row,
    tokens: jax.Array,
    spot: jax.Array,
) -> tuple[Seen, ...]:
    """What a method sees of a chunk's queries, by layer: `spot` is the position behind its last
    token, and how many it has."""
    step = StepInputs(
        tokens=tokens,
        kv_lens=spot[:1],
        query_starts=spot * jnp.array([0, 1], jnp.int32),
        page_tables=tuple(row.tables[:, None]),
        dropped=row.dropped[:, None],
    )
    _, observing = model.forward(params, cache.observe(), step, attention)
    assert observing.observed is not None
    _, positions = step.places()
    found = []
    for layer in layers:
        seen, own = observing.observed[layer], _layer_tokens(model, cache, layer, row)
        assert seen is not None
        dropped = row.num_tokens - own.lens
        queries = Queries(seen.q, positions, positions[None] - dropped[:, None], seen.soft_cap)
        found.append(method.look(queries, own))
    return tuple(found)


def _choose(
    model: Model,
    method: ScoreMethod,
    layers: Sequence[int],
    cache: KVCache,
    row: Row,
    sums: tuple[Seen, ...],
    known: tuple[jax.Array, jax.Array] | None,
    spans: jax.Array,
    keep: jax.Array,
) -> Kept:
    """Which tokens stay; `known` are positions `[F, K, S]` of slots, and how many of each head
    (`[F, K]`) have another one than those in order."""
    chosen = []
    for i, layer in enumerate(layers):
        own = _layer_tokens(model, cache, layer, row)
        positions = own.slots[None] + (row.num_tokens - own.lens)[:, None]
        if known is not None:
            early = own.slots[None] < known[1][i][:, None]
            positions = jnp.where(early, known[0][i], positions)
        chosen.append(_choose_in_layer(method, own, sums[i], positions, spans, keep[i]))
    slots, positions, counts, seen = zip(*chosen, strict=True)
    return Kept(jnp.stack(slots), jnp.stack(positions), jnp.stack(counts), tuple(seen))


def _choose_in_layer(
    method: ScoreMethod,
    own: LayerTokens,
    seen: Seen,
    positions: jax.Array,
    spans: jax.Array,
    keep: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, Seen]:
    """The same in one layer, as the fields of `Kept`."""
    scores = method.score(own, seen, keep)
    scores = jnp.clip(jnp.nan_to_num(scores, nan=-FORCED), -FORCED, FORCED)
    at, (first, end) = positions[..., None], spans.T[:, None, None]
    inside = ((at >= first) & (at < end)).any(axis=-1)
    scores = jnp.where(inside, jnp.inf, scores)
    stays = method.choose(jnp.where(own.live, scores, -jnp.inf), keep) & own.live
    S = own.k.shape[1]
    slots = jnp.sort(jnp.where(stays, own.slots[None], S), axis=-1)

    def taken(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, jnp.minimum(slots, S - 1), axis=-1)

    counts = stays.sum(axis=-1, dtype=jnp.int32)
    if method.num_queries is not None:
        return slots, taken(positions), counts, {}
    filled = own.slots[None] < counts[:, None]
    moved = {name: jnp.where(filled, taken(seen[name]), 0.0) for name in method.by_slot}
    return slots, taken(positions), counts, seen | moved


def _move(
    layers: Sequence[int],
    cache: KVCache,
    slots: jax.Array,
    counts: jax.Array,
    row: Row,
    target: jax.Array,
) -> KVCache:
    """See `Compressor.move`."""
    P, (_, K, S) = cache.page_size, slots.shape
    index = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32)[None], (K, S))
    for i, layer in enumerate(layers):
        groups = cache.groups_of(layer)

        def physical(tables: jax.Array, logical: jax.Array, groups: range = groups) -> jax.Array:
            own = tables[groups.start : groups.stop]
            own = jnp.broadcast_to(own, (K, own.shape[1]))
            page = jnp.take_along_axis(own, logical // P, axis=1, mode="clip")
            return page * P + logical % P

        outside = cache.layers[layer].num_pages * P
        places = jnp.where(index < counts[i][:, None], physical(target, index), outside)
        cache = move_tokens(cache, layer, physical(row.tables, slots[i]), places)
    return cache


def _layer_tokens(model: Model, cache: KVCache, layer: int, row: Row) -> LayerTokens:
    """K and V of a layer as the model made them, and 0 where there are none."""
    groups = cache.groups_of(layer)
    k, v = gather_dense(cache, layer, row.tables[groups.start : groups.stop])
    k, v = (x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], x.shape[3]) for x in (k, v))
    D = model.layers[layer].head_dim  # of pages it may be larger
    k, v = (x[:, :, :D].astype(jnp.float32) for x in (k, v))
    if cache.formats[layer].rotates:
        k, v = rotate(k), rotate(v)
    lens = row.num_tokens - row.dropped[groups.start : groups.stop]
    lens = jnp.broadcast_to(lens, (k.shape[0],))
    live = jnp.arange(k.shape[1], dtype=jnp.int32)[None] < lens[:, None]
    k, v = (jnp.where(live[..., None], x, 0.0) for x in (k, v))
    number = jnp.asarray(layer, jnp.int32)
    return LayerTokens(k, v, lens, row.num_tokens, number, partial(model.turn, layer))


def _total(seen: Sequence[tuple[Seen, ...]]) -> tuple[Seen, ...]:
    """Sums of what was seen, by layer."""
    return jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *seen)


def _sized_seen(seen: tuple[Seen, ...], by_slot: tuple[str, ...], S: int) -> tuple[Seen, ...]:
    return tuple(
        {name: _sized(x, S) if name in by_slot else x for name, x in layer.items()}
        for layer in seen
    )


def _sized(x: jax.Array, S: int) -> jax.Array:
    """An array `[..., K, slots]` with S slots, zeros behind."""
    x = x[..., :S]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, S - x.shape[-1])])
