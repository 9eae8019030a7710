"""Ragged paged attention in plain XLA: flash attention over tiles of queries and chunks of keys.

Queries are cut into tiles of `query_tile` rows; a tile has rows of one sequence only. The G heads
that share a KV head are rows of the same products, so no K or V is repeated. Tiles are computed in
groups. A group walks the chunks of KV_CHUNK keys that its rows can see, with an online softmax, and
stops after the last one:

    group of tiles    rows 0..63 of seq 3 | rows 0..0 of seq 4 | ...
    trip j            chunk first(tile) + j of each tile's own keys, gathered through the page table

The bounds of both loops are data, so the work depends on the live tokens and the window, and not on
the width of the table. Chunks begin at multiples of KV_CHUNK for all page sizes: the sum of a row
is always split at the same places. Source: FlashAttention-2, arXiv 2307.08691, algorithm 1.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.arith import ceil_div
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.ragged import PADDING, Ragged
from pallas_kernels.attention.tiles import Tiles
from pallas_kernels.online_softmax import finite_or_zero
from pallas_kernels.quantised_pages import AnyPages

KV_CHUNK = 128  # keys per trip
GROUP_ROWS = 64  # query rows of a group, if tiles have many rows
GROUP_DECODE = 32  # tiles of a group, if each has one row
CPU_SINGLE_ROWS = 8  # most rows of a single tile's product that a CPU multiplies one by one


@jax.jit(static_argnames="options")
def ragged_paged_attention(
    q: jax.Array,
    pages: AnyPages,
    page_table: jax.Array,
    ragged: Ragged,
    sinks: jax.Array | None,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """Computes `(out [T, H, D], lse [T, H])`; see `attention.reference` for the arguments."""
    T, H, D = q.shape
    B, K = page_table.shape[0], pages.num_kv_heads
    tile = options.query_tile or (1 if T <= B else 64)
    tiles = Tiles.plan(ragged, T, tile, options)
    # Groups of many-row tiles have one shape for all T and B: the bits of a product, and of the
    # sums that XLA fuses with it, depend on its shape.
    group = max(1, GROUP_ROWS // tile) if tile > 1 else min(tiles.count, GROUP_DECODE)
    num_groups = ceil_div(tiles.count, group)
    sink = jnp.full((H,), -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32)

    def attend_group(g, outputs):
        part = tiles.group(g * group, group)
        rows = part.first_row[:, None] + jnp.arange(tile, dtype=jnp.int32)[None]  # [W, tile]
        _, position = ragged.place(rows, part.seq[:, None])
        grouped = q.at[rows].get(mode="clip").reshape(group, tile, K, H // K, D)
        grouped = grouped.astype(jnp.float32) * options.scale
        state = _walk_chunks(grouped, position, pages, page_table[part.seq], part, options)
        out, lse = _finish(state, sink.reshape(1, K, 1, H // K))
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(whole, new, g * group, axis=0)
            for whole, new in zip(outputs, (out, lse), strict=True)
        )

    shape = (num_groups * group, K, tile, H // K)
    outputs = jnp.zeros((*shape, D), jnp.float32), jnp.full(shape, -jnp.inf, jnp.float32)
    live = ceil_div(tiles.num_live, group)
    if num_groups == 1:
        outputs = attend_group(0, outputs)
    else:
        outputs = jax.lax.fori_loop(0, live, attend_group, outputs)

    _, position = ragged.rows(T)
    index = tiles.place_of(ragged, T, tile)
    out, lse = (x[index[0], :, index[1]].reshape(T, H, *x.shape[4:]) for x in outputs)
    padding = position == PADDING
    out = jnp.where(padding[:, None, None], 0.0, out)
    return out.astype(q.dtype), jnp.where(padding[:, None], -jnp.inf, lse)


def _walk_chunks(
    q: jax.Array,
    position: jax.Array,
    pages: AnyPages,
    table: jax.Array,
    tiles: Tiles,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the online softmax of a group of tiles over all chunks that they see.

    Args:
      q: `[W, tile, K, G, D]` float32, scaled.
      position: `[W, tile]` int32.
      pages: the pages.
      table: `[W, M]` int32, the page table row of each tile's sequence.
      tiles: the W tiles.
      options: the options of the call.

    Returns:
      Running maximum and sum of exponentials `[W, K, tile, G]`, weighted sum of V
      `[W, K, tile, G, D]`.
    """
    W, tile, K, G, D = q.shape
    q = q.transpose(0, 2, 1, 3, 4).reshape(W, K, tile * G, D)
    first = tiles.low // KV_CHUNK
    trips = jnp.max(ceil_div(tiles.high, KV_CHUNK) - first)
    in_chunk = jnp.arange(KV_CHUNK, dtype=jnp.int32)
    low, high = (bound[:, :, None] for bound in options.bounds(position))  # [W, tile, 1]

    def trip(j, state):
        m, total, acc = state
        start = (first + j) * KV_CHUNK  # [W]
        slot = start[:, None] + in_chunk[None]  # [W, C]
        k, v = _gather_chunk(pages, table, start, tiles)

        logits = _batched_dot(q, k, contract=(3, 3)).reshape(W, K, tile, G, KV_CHUNK)
        if options.soft_cap is not None:
            logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
        visible = (slot[:, None] >= low) & (slot[:, None] < high)  # [W, tile, C]
        logits = jnp.where(visible[:, None, :, None], logits, -jnp.inf)

        m_new = jnp.maximum(m, logits.max(axis=-1))
        finite = finite_or_zero(m_new)
        weights = jnp.exp(logits - finite[..., None])
        decay = jnp.exp(m - finite)
        flat = weights.reshape(W, K, tile * G, KV_CHUNK)
        partial = _batched_dot(flat, v, contract=(3, 2)).reshape(W, K, tile, G, D)
        return m_new, total * decay + weights.sum(axis=-1), acc * decay[..., None] + partial

    shape = (W, K, tile, G)
    state = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, D), jnp.float32),
    )
    return jax.lax.fori_loop(0, trips, trip, state)


def _gather_chunk(
    pages: AnyPages, table: jax.Array, start: jax.Array, tiles: Tiles
) -> tuple[jax.Array, jax.Array]:
    """Gathers KV_CHUNK keys and values of each tile, from slot `start [W]` on.

    The tokens of a head lie side by side in a page. They are read in runs, whose length divides
    both a page and a chunk.

    Returns:
      K and V `[W, K, C, D]` float32; V is zero where no row of the tile sees it.
    """
    P, K, D = pages.page_size, pages.num_kv_heads, pages.head_dim
    run = math.gcd(P, KV_CHUNK)
    slot = start[:, None] + jnp.arange(0, KV_CHUNK, run, dtype=jnp.int32)[None]  # [W, C / run]
    page = jnp.take_along_axis(table, jnp.minimum(slot // P, table.shape[1] - 1), axis=1)
    offset = slot % P // run
    k, v = (pages.read(i, page, offset, run).astype(jnp.float32) for i in (0, 1))

    # A slot that is not seen may hold NaN, and 0 * NaN is NaN: V is masked as well as the weights.
    token = slot[..., None] + jnp.arange(run * D, dtype=jnp.int32)[None, None] // D
    low, high = (x[:, None, None] for x in (tiles.low, tiles.high))
    v = jnp.where(((token >= low) & (token < high))[:, None], v, 0.0)
    # If XLA fused the copies with the reshape, its CPU loops would move one float at a time.
    k, v = jax.lax.optimization_barrier((k, v))
    shape = (start.shape[0], K, KV_CHUNK, D)
    return k.reshape(shape), v.reshape(shape)


def _batched_dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Multiplies arrays `[W, K, ...]` over an axis of each, batched over W and K, in float32."""
    highest, batched = jax.lax.Precision.HIGHEST, ((0, 1), (0, 1))
    W, _, num_rows, _ = a.shape
    if W == 1 and num_rows <= CPU_SINGLE_ROWS and jax.default_backend() == "cpu":
        # Matrix-vector products need no threads, and XLA then compiles the walk into one function.
        # Passing work to threads took longer than the arithmetic.
        dims = (((contract[0] - 1,), (contract[1],)), batched)
        rows = (a[:, :, row] for row in range(num_rows))
        products = [jax.lax.dot_general(row, b, dims, precision=highest) for row in rows]
        return jnp.stack(products, axis=2)
    dims = (((contract[0],), (contract[1],)), batched)
    return jax.lax.dot_general(a, b, dims, precision=highest)


def _finish(
    state: tuple[jax.Array, jax.Array, jax.Array], sink: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Normalises a group; here the sink `[1, K, 1, G]` joins the denominator, once."""
    m, total, acc = state
    m_new = finite_or_zero(jnp.maximum(m, sink))
    decay = jnp.exp(m - m_new)
    total = total * decay + jnp.exp(sink - m_new)
    safe = jnp.where(total == 0.0, 1.0, total)
    return acc * (decay / safe)[..., None], m_new + jnp.log(total)
