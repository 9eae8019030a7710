"""Writes an attention backend in plain jax.numpy and checks it in every case of jaxkv.testing.

Run `python examples/check_a_backend.py`; it needs the extra `testing` and takes a few minutes.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.testing import check_attention
from pallas_kernels import Backend, ragged_paged_attention


def run(q, pages, page_table, ragged, sinks, options):
    """Each row gathers all pages of its sequence, and computes one softmax."""
    (T, H, D), K, P = q.shape, pages.num_kv_heads, pages.page_size
    sequence, position = ragged.rows(T)  # the position of a row of padding is far below 0
    slot = jnp.arange(page_table.shape[1] * P)[None]
    low, high = options.bounds(position)
    visible = (slot >= low[:, None]) & (slot < high[:, None]) & (slot <= position[:, None])
    page, offset = page_table[sequence][:, slot[0] // P], jnp.tile(slot % P, (T, 1))
    k, v = (pages.read(i, page, offset).astype(jnp.float32) for i in (0, 1))  # [T, K, S, D]
    v = jnp.where(visible[:, None, :, None], v, 0.0)  # a slot that is not in use may hold NaN

    grouped = options.scale * q.astype(jnp.float32).reshape(T, K, H // K, D)
    logits = jnp.einsum("tkgd,tksd->tkgs", grouped, k, precision="highest").reshape(T, H, -1)
    if options.soft_cap is not None:
        logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
    logits = jnp.where(visible[:, None], logits, -jnp.inf)
    if sinks is not None:  # one more logit per head, but not in rows of padding
        sink = jnp.where((position >= -T)[:, None], sinks[None], -jnp.inf)
        logits = jnp.concatenate([logits, sink[..., None]], axis=-1)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - jnp.where(jnp.isinf(lse), 0.0, lse)[..., None])
    weights = weights[..., : slot.size].reshape(T, K, H // K, -1)
    out = jnp.einsum("tkgs,tksd->tkgd", weights, v, precision="highest")
    return out.reshape(T, H, D).astype(q.dtype), lse


attention = partial(ragged_paged_attention, backend=Backend(name="mine", run=run))

if __name__ == "__main__":
    print(f"{len(check_attention(attention))} cases agree with naive attention")
