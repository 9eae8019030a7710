"""The functions that `Compressor` compiles: observe queries, choose tokens, move them.

All of them work on the row of one sequence, and on each layer that drops tokens in turn.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.attention import AttentionBackend, StepInputs
from jaxkv.cache import KVCache, gather_dense, move_tokens, rotate
from jaxkv.compress.inputs import LayerTokens, Queries
from jaxkv.compress.kept import Kept, Row
from jaxkv.compress.method import FORCED, ScoreMethod, map_slots
from jaxkv.model import DecodeModel


class Chunk(NamedTuple):
    """Tokens whose queries are computed again.

    Attributes:
      tokens: `[T]` int32, padded at the end.
      end: int32 scalar, the position after the last token.
      num_tokens: int32 scalar, number of tokens without the padding.
    """

    tokens: Any
    end: Any
    num_tokens: Any


class Positions(NamedTuple):
    """Positions of the tokens that were kept before, in the layers that drop tokens.

    Attributes:
      positions: `[layers, K, S]` int32, of the tokens in the first slots.
      counts: `[layers, K]` int32, number of these tokens. The tokens after them followed later,
        one after the other.
    """

    positions: jax.Array
    counts: jax.Array


class LayerChoice(NamedTuple):
    """The fields of `Kept` for one layer."""

    slots: jax.Array
    positions: jax.Array
    counts: jax.Array
    statistics: Any


def observe(
    model: DecodeModel,
    method: ScoreMethod,
    layers: Sequence[int],
    attention: AttentionBackend,
    params: Any,
    cache: KVCache,
    row: Row,
    chunk: Chunk,
) -> tuple[Any, ...]:
    """The method's statistics of a chunk of queries, for each layer that drops tokens."""
    step = StepInputs(
        tokens=chunk.tokens,
        seq_lens=jnp.stack([chunk.end]),
        query_starts=jnp.stack([jnp.int32(0), chunk.num_tokens]),
        page_tables=tuple(row.tables[:, None]),
        kv_lens=chunk.end - row.dropped[:, None],
    )
    queries = model.queries(params, cache, step, attention)
    _, positions = step.places()
    statistics = []
    for layer in layers:
        own, tokens = queries[layer], layer_tokens(model, cache, layer, row)
        dropped = row.num_tokens - tokens.lens
        slots = positions[None] - dropped[:, None]
        chunk_queries = Queries(own.q, positions, slots, own.soft_cap)
        statistics.append(method.observe(chunk_queries, tokens))
    return tuple(statistics)


def choose(
    model: DecodeModel,
    method: ScoreMethod,
    layers: Sequence[int],
    cache: KVCache,
    row: Row,
    statistics: tuple[Any, ...],
    known: Positions | None,
    protect: jax.Array,
    budgets: jax.Array,
) -> Kept:
    """See `Compressor.choose`; `budgets [layers]` are the tokens that each layer's heads keep."""
    choices = []
    for i, layer in enumerate(layers):
        tokens = layer_tokens(model, cache, layer, row)
        positions = tokens.slots[None] + (row.num_tokens - tokens.lens)[:, None]
        if known is not None:
            earlier = tokens.slots[None] < known.counts[i][:, None]
            positions = jnp.where(earlier, known.positions[i], positions)
        choices.append(
            choose_in_layer(method, tokens, statistics[i], positions, protect, budgets[i])
        )
    slots, positions, counts, statistics = zip(*choices, strict=True)
    return Kept(jnp.stack(slots), jnp.stack(positions), jnp.stack(counts), statistics)


def choose_in_layer(
    method: ScoreMethod,
    tokens: LayerTokens,
    statistics: Any,
    positions: jax.Array,
    protect: jax.Array,
    keep: jax.Array,
) -> LayerChoice:
    """Chooses which tokens of one layer are kept; traced.

    Args:
      method: scores and chooses tokens.
      tokens: the layer's tokens.
      statistics: the layer's statistics.
      positions: `[K, S]` int32, position of the token in each slot.
      protect: `[MAX_SPANS, 2]` int32, spans of protected positions; empty ones are padding.
      keep: int32 scalar, number of tokens that each head keeps, on average over the heads.
    """
    scores = method.score(tokens, statistics, keep)
    _check(method, "score", scores, tokens.live.shape, jnp.floating)
    scores = jnp.clip(jnp.nan_to_num(scores, nan=-FORCED), -FORCED, FORCED)
    at, (first, end) = positions[..., None], protect.T[:, None, None]
    scores = jnp.where(((at >= first) & (at < end)).any(axis=-1), jnp.inf, scores)
    kept = method.choose(jnp.where(tokens.live, scores, -jnp.inf), keep)
    _check(method, "choose", kept, tokens.live.shape, jnp.bool_)
    kept = kept & tokens.live
    counts = kept.sum(axis=-1, dtype=jnp.int32)
    S = tokens.k.shape[1]
    slots = jnp.sort(jnp.where(kept, tokens.slots[None], S), axis=-1)

    def taken(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, jnp.minimum(slots, S - 1), axis=-1)

    if method.num_queries is not None:  # the next choice observes its own queries
        return LayerChoice(slots, taken(positions), counts, None)
    filled = tokens.slots[None] < counts[:, None]
    statistics = map_slots(lambda x: jnp.where(filled, taken(x), 0.0), statistics)
    return LayerChoice(slots, taken(positions), counts, statistics)


def _check(method: ScoreMethod, name: str, x: jax.Array, shape: tuple[int, ...], kind: Any) -> None:
    """Raises ValueError unless a method returned an array `[K, S]` of the right kind."""
    if jnp.shape(x) != shape or not jnp.issubdtype(jnp.result_type(x), kind):
        got = f"{jnp.shape(x)} {jnp.result_type(x)}"
        raise ValueError(f"{name} of {method} must be [K, S] = {shape} {kind.__name__}, got {got}")


def move(
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


def layer_tokens(model: DecodeModel, cache: KVCache, layer: int, row: Row) -> LayerTokens:
    """K and V of a layer as the model computed them, 0 in slots without a token."""
    groups = cache.groups_of(layer)
    k, v = gather_dense(cache, layer, row.tables[groups.start : groups.stop])
    k, v = (x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], x.shape[3]) for x in (k, v))
    D = model.layers[layer].head_dim  # pages may have padded it
    k, v = (x[:, :, :D].astype(jnp.float32) for x in (k, v))
    if cache.spec.formats[layer].rotates:
        k, v = rotate(k), rotate(v)
    lens = row.num_tokens - row.dropped[groups.start : groups.stop]
    lens = jnp.broadcast_to(lens, (k.shape[0],))
    live = jnp.arange(k.shape[1], dtype=jnp.int32)[None] < lens[:, None]
    k, v = (jnp.where(live[..., None], x, 0.0) for x in (k, v))
    index = jnp.asarray(layer, jnp.int32)
    return LayerTokens(k, v, lens, row.num_tokens, index, partial(model.turn, layer))


def resized(x: jax.Array, S: int) -> jax.Array:
    """An array `[..., K, slots]` cut to S slots or padded with zeros."""
    x = x[..., :S]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, S - x.shape[-1])])
