"""The naive backend: the suite, and JAX's own attention where the two mean the same."""

import functools

import chex
import jax
import pytest

from jaxkv.testing.attention_suite import AttentionSuite
from jaxkv.testing.batches import Batch, place, random_batch


def dense_attention(batch: Batch, **options) -> jax.Array:
    """JAX's attention of a batch of one sequence; queries and keys both begin at position 0."""
    call = jax.jit(functools.partial(jax.nn.dot_product_attention, scale=0.25, **options))
    return call(batch.q[None], batch.keys[0][None], batch.values[0][None])[0]


class TestReference(AttentionSuite):
    backend = "reference"

    @pytest.mark.parametrize(
        "H, K, window", [(6, 2, 3), (3, 3, None)], ids=["GQA in a window", "MHA"]
    )
    def test_a_whole_sequence_agrees_with_attention_of_jax(self, H, K, window):
        batch = random_batch([21], [21], T=21, heads=(H, K))
        out, _ = self.attend(batch, place(batch, M=2, window=window), window=window)
        local = None if window is None else (window - 1, 0)
        want = dense_attention(batch, is_causal=True, local_window_size=local)
        chex.assert_trees_all_close(out, want, rtol=1e-5, atol=1e-5)

    def test_a_decoded_token_agrees_with_attention_of_jax(self):
        batch = random_batch([21], [1], T=1, heads=(4, 1))
        out, _ = self.attend(batch, place(batch, M=2))
        chex.assert_trees_all_close(out, dense_attention(batch), rtol=1e-5, atol=1e-5)
