"""Writes paged attention in plain jax.numpy and checks it against naive attention in float64.

Run `python examples/check_a_backend.py`; it needs the extra `testing`.
"""

import jax
import jax.numpy as jnp

from jaxkv.testing import check_attention


def attention(
    q, pages, page_table, kv_lens, query_starts, *, scale, window=None, sinks=None, soft_cap=None,
    return_lse=True,
):  # fmt: skip
    """Each query gathers the pages of its whole sequence; see `ragged_paged_attention`."""
    (T, H, D), K, P, S = q.shape, pages.num_kv_heads, pages.page_size, page_table.shape[1]
    row, slot = jnp.arange(T)[:, None], jnp.arange(S * P)[None]
    b = (query_starts[None, 1:-1] <= row).sum(axis=1)  # the sequence of each row
    position = (kv_lens[b] - query_starts[b + 1])[:, None] + row
    visible = (slot <= position) & (row < query_starts[-1])  # [T, S], no rows of padding
    if window is not None:
        visible &= slot > position - window
    page, offset = page_table[b][:, slot[0] // P], jnp.broadcast_to(slot % P, (T, S * P))
    k, v = (pages.read(i, page, offset).astype(jnp.float32) for i in (0, 1))  # [T, K, S, D]
    v = jnp.where(visible[:, None, :, None], v, 0.0)  # an unused slot may hold NaN

    grouped = scale * q.astype(jnp.float32).reshape(T, K, H // K, D)
    logits = jnp.einsum("tkgd,tksd->tkgs", grouped, k, precision="highest").reshape(T, H, S * P)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = jnp.where(visible[:, None], logits, -jnp.inf)
    if sinks is not None:
        sink = jnp.where(row < query_starts[-1], sinks[None], -jnp.inf)
        logits = jnp.concatenate([logits, sink[..., None]], axis=-1)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - jnp.where(jnp.isinf(lse), 0.0, lse)[..., None])[..., : S * P]
    weights = weights.reshape(T, K, H // K, S * P)
    out = jnp.einsum("tkgs,tksd->tkgd", weights, v, precision="highest")
    return out.reshape(T, H, D).astype(q.dtype), lse


if __name__ == "__main__":
    # The cases with `keys` are left out: this function has no such option.
    checked = check_attention(attention, takes=lambda case: "keys" not in case.options)
    print(f"{len(checked)} cases agree with naive attention")
