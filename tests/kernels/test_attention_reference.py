"""The naive backend: the suite, and JAX's own attention where the two mean the same."""

import jax
import numpy as np
import pytest

from tests.kernels.attention_suite import AttentionSuite
from tests.kernels.batches import place, random_batch


class TestReference(AttentionSuite):
    backend = "reference"

    @pytest.mark.parametrize("window", [None, 3], ids=["no window", "window"])
    @pytest.mark.parametrize("H, K", [(6, 2), (4, 1), (3, 3)], ids=["GQA", "MQA", "MHA"])
    def test_a_whole_sequence_agrees_with_attention_of_jax(self, H, K, window):
        batch = random_batch([21], [21], T=21, heads=(H, K))
        out, _ = self.attend(batch, place(batch, M=2), window=window)
        want = jax.nn.dot_product_attention(
            batch.q[None],
            batch.keys[0][None],
            batch.values[0][None],
            scale=0.25,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
        )
        np.testing.assert_allclose(out, want[0], rtol=1e-5, atol=1e-5)

    def test_a_decoded_token_agrees_with_attention_of_jax(self):
        batch = random_batch([21], [1], T=1)
        out, _ = self.attend(batch, place(batch, M=2))
        dense = (x[None] for x in (batch.q, batch.keys[0], batch.values[0]))
        want = jax.nn.dot_product_attention(*dense, scale=0.25)
        np.testing.assert_allclose(out, want[0], rtol=1e-5, atol=1e-5)
