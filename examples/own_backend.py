"""An attention backend of your own, compared with naive attention; an engine takes it too."""

import jax.numpy as jnp
from jax.nn import logsumexp

from jaxkv.testing import naive_attention, place, random_batch
from pallas_kernels import Backend, ragged_paged_attention


def attention(q, pages, page_table, ragged, sinks, options):
    """Every row gathers all pages of its sequence, and computes one softmax."""
    (T, H, D), K, P = q.shape, pages.num_kv_heads, pages.page_size
    sequence, position = ragged.rows(T)
    slot = jnp.arange(page_table.shape[1] * P)
    low, high = options.bounds(position)  # window and causal mask: the keys that each row sees
    seen = (slot[None] >= low[:, None]) & (slot[None] < high[:, None])  # [T, S]
    page, offset = page_table[sequence][:, slot // P], jnp.tile(slot % P, (T, 1))
    k, v = (pages.read(i, page, offset).astype(jnp.float32) for i in (0, 1))  # [T, K, S, D]
    v = jnp.where(seen[:, None, :, None], v, 0.0)  # a slot that is not seen may hold NaN
    grouped = options.scale * q.astype(jnp.float32).reshape(T, K, H // K, D)
    logits = jnp.einsum("tkgd,tksd->tkgs", grouped, k, precision="highest")
    logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
    lse = logsumexp(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isinf(lse), 0.0, lse))
    out = jnp.einsum("tkgs,tksd->tkgd", weights, v, precision="highest")
    return out.reshape(T, H, D).astype(q.dtype), lse.reshape(T, H)


def refusal(q, pages, page_table, ragged, sinks, options):
    """Returns why the backend does not take a call, or None if it does."""
    has_more = sinks is not None or options.soft_cap is not None
    return "sinks and soft caps are not implemented" if has_more else None


mine = Backend(name="mine", run=attention, refusal=refusal)  # EngineConfig(backend=mine) works too

batch = random_batch([40, 7, 25], [1, 3, 25], T=32, heads=(8, 2), D=64)  # cached tokens, queries
cache = place(batch)  # pages in random order; every slot that is not in use holds NaN
arrays = cache.pages, cache.page_table, cache.kv_lens, cache.query_starts
out = ragged_paged_attention(jnp.asarray(batch.q), *arrays, scale=0.125, backend=mine)
want, _ = naive_attention(batch, scale=0.125)
print(f"largest difference from naive attention: {abs(out - want).max():.0e}")
assert jnp.allclose(out, want, atol=1e-5)
