"""Ragged paged attention, naive and in float32: tests compare all other backends with it.

Each query row gathers the pages of its sequence's whole table row, masks, and computes one softmax.
Nothing is tiled, skipped or merged, so the cost grows with the width of the table, and models use
other backends.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.ragged import PADDING, Ragged
from pallas_kernels.online_softmax import finite_or_zero
from pallas_kernels.quantised_pages import AnyPages


@jax.jit(static_argnames="options")
def ragged_paged_attention(
    q: jax.Array,
    pages: AnyPages,
    page_table: jax.Array,
    ragged: Ragged,
    sinks: jax.Array | None,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """Computes what `pallas_kernels.ragged_paged_attention` says.

    Args:
      q, pages, page_table, sinks: those of the call, already checked.
      ragged: lengths of the sequences, and their rows.
      options: the static options of the call.

    Returns:
      `(out [T, H, D], lse [T, H])`.
    """
    T, H, D = q.shape
    K, P, M = pages.num_kv_heads, pages.page_size, page_table.shape[1]
    seq, position = ragged.rows(T)  # [T], [T]

    slot = jnp.arange(M * P, dtype=jnp.int32)
    visible = slot[None] <= position[:, None]  # [T, S]; so below kv_lens too
    if options.window is not None:
        visible &= slot[None] > position[:, None] - options.window
    if options.keys is not None:
        low, high = options.keys.bounds(position)
        visible &= (slot[None] >= low[:, None]) & (slot[None] < high[:, None])

    page, offset = page_table[seq][:, slot // P], jnp.broadcast_to(slot % P, (T, M * P))
    k, v = (pages.read(i, page, offset).astype(jnp.float32) for i in (0, 1))  # [T, K, S, D]
    # A slot that is not seen may hold NaN, and 0 * NaN is NaN: V is masked as well as the weights.
    v = jnp.where(visible[:, None, :, None], v, 0.0)

    grouped = q.astype(jnp.float32).reshape(T, K, H // K, D)
    logits = jnp.einsum("tkgd,tksd->tkgs", grouped, k, precision="highest")
    logits = logits * options.scale
    if options.soft_cap is not None:
        logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
    logits = jnp.where(visible[:, None, None, :], logits, -jnp.inf)
    if sinks is None:
        sink = jnp.full((T, K, H // K, 1), -jnp.inf, jnp.float32)
    else:
        real = (position != PADDING)[:, None]
        sink = jnp.where(real, sinks[None], -jnp.inf).reshape(T, K, H // K, 1)

    m = finite_or_zero(jnp.maximum(logits.max(axis=-1, keepdims=True), sink))
    weights = jnp.exp(logits - m)
    total = weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - m)
    weights = weights / jnp.where(total == 0.0, 1.0, total)
    out = jnp.einsum("tkgs,tksd->tkgd", weights, v, precision="highest")
    return out.reshape(T, H, D).astype(q.dtype), (m + jnp.log(total)).reshape(T, H)
