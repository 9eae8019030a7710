"""Multiply-adds: closed forms, the loops, and a decoder in numpy that counts what it multiplies."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.ledger import (
    CacheLedger,
    Macs,
    Model,
    arithmetic_intensity,
    decode_macs,
    generation_macs,
    prefill_macs,
    preset,
    simulate,
)
from tests.ledger.test_memory import model_of

KINDS = {
    "mha": model_of(num_key_value_heads=8),
    "gqa": model_of(),
    "windows": model_of(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=5),
    "chunks": model_of(layer_types=["chunked_attention"] * 4, attention_chunk_size=4),
    "shared": model_of(num_kv_shared_layers=2),
    "mla": model_of(
        model_type="none",
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "experts": model_of(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2),
    "linear": model_of(
        model_type="qwen3_next",
        full_attention_interval=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
}


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    prompt=st.integers(1, 14),
    new=st.integers(1, 14),
    cache=st.booleans(),
)
def test_the_closed_forms_equal_the_loops_to_the_last_digit(kind, prompt, new, cache):
    closed = generation_macs(KINDS[kind], prompt, new, cache=cache)
    assert closed == simulate(KINDS[kind], prompt, new, cache=cache)


@pytest.mark.parametrize("name", ["llama-2-7b", "gemma-3-270m", "deepseek-v2-lite"])
def test_they_do_so_for_real_models(name):
    model = preset(name)
    for cache in (True, False):
        assert generation_macs(model, 40, 24, cache=cache) == simulate(model, 40, 24, cache=cache)


@settings(max_examples=50, deadline=None)
@given(kind=st.sampled_from(list(KINDS)), n=st.integers(1, 20), cached=st.integers(0, 20))
def test_a_prefill_in_two_parts_multiplies_what_one_does(kind, n, cached):
    model, cut = KINDS[kind], min(cached, n)
    first, second = prefill_macs(model, cut), prefill_macs(model, n, cut)
    whole = prefill_macs(model, n)
    assert first.linear + second.linear == whole.linear
    assert first.attention + second.attention == whole.attention


class CountingDecoder:
    """A decoder of random weights that counts the multiply-adds of each product."""

    def __init__(self, model: Model, vocab: int):
        rng = np.random.default_rng(0)
        self._heads = [one.mixer for one in model.layers]
        E = model.width
        self._layers = []
        for heads in self._heads:
            H, K, D, F = heads.query_heads, heads.kv_heads, heads.key_dim, 128
            shapes = [(E, H * D), (E, K * D), (E, K * D), (H * D, E), (E, F), (E, F), (F, E)]
            self._layers.append([rng.normal(size=shape) / 8 for shape in shapes])
        self._embedding = rng.normal(size=(vocab, E))
        self.macs = {"linear": 0, "attention": 0, "head": 0}

    def _multiply(self, what: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        self.macs[what] += a.shape[0] * a.shape[1] * b.shape[1]
        return a @ b

    def step(self, tokens: list[int], cache: list[list]) -> int:
        """The next token; `cache` has K and V of earlier ones for each layer, and takes these."""
        x = self._embedding[tokens]
        for layer, (heads, matrices) in enumerate(zip(self._heads, self._layers, strict=True)):
            wq, wk, wv, wo, gate, up, down = matrices
            H, K, D = heads.query_heads, heads.kv_heads, heads.key_dim
            q, k, v = (self._multiply("linear", x, w) for w in (wq, wk, wv))
            cache[layer] += zip(k.reshape(-1, K, D), v.reshape(-1, K, D), strict=True)
            start = len(cache[layer]) - len(tokens)
            rows = []
            for i, row in enumerate(q.reshape(-1, H, D)):
                seen = cache[layer][: start + i + 1]
                out = []
                for h in range(H):
                    keys, values = (np.array([kv[j][h * K // H] for kv in seen]) for j in (0, 1))
                    scores = self._multiply("attention", row[h][None], keys.T)[0] / D**0.5
                    weights = np.exp(scores - scores.max())
                    weights /= weights.sum()
                    out.append(self._multiply("attention", weights[None], values)[0])
                rows.append(np.concatenate(out))
            x = x + self._multiply("linear", np.array(rows), wo)
            gated = np.tanh(self._multiply("linear", x, gate)) * self._multiply("linear", x, up)
            x = x + self._multiply("linear", gated, down)
        return int(self._multiply("head", x[-1:], self._embedding.T).argmax())


@pytest.mark.parametrize("kind", ["mha", "gqa"])
def test_a_counting_decoder_draws_the_same_tokens_with_and_without_a_cache(kind):
    model, prompt, new, drawn = KINDS[kind], [5, 60, 7], 6, []
    for with_cache in (True, False):
        decoder, tokens = CountingDecoder(model, vocab=100), list(prompt)
        cache: list[list] = [[] for _ in model.layers]
        for step in range(new):
            if not with_cache:
                cache = [[] for _ in model.layers]
            new_tokens = tokens[-1:] if with_cache and step else tokens
            tokens.append(decoder.step(new_tokens, cache))
        drawn.append(tokens)
        assert generation_macs(model, 3, 6, cache=with_cache) == Macs(**decoder.macs)
    assert drawn[0] == drawn[1]


def test_attention_of_all_steps_is_quadratic_with_a_cache_and_cubic_without():
    model = preset("llama-2-7b")
    for cache, power in ((True, 2), (False, 3)):
        small, large = (
            generation_macs(model, 1, n, cache=cache).attention for n in (1 << 14, 1 << 15)
        )
        assert large / small == pytest.approx(2**power, rel=1e-3)
    # A step of its own: linear in what stands before it, in place of quadratic.
    for macs, power in ((decode_macs, 1), (prefill_macs, 2)):
        ratio = macs(model, 1 << 15).attention / macs(model, 1 << 14).attention
        assert ratio == pytest.approx(2**power, rel=1e-3)


def test_the_arithmetic_of_a_7b_model_is_what_its_parameters_say():
    model = preset("llama-2-7b")
    macs = decode_macs(model, 0)
    assert macs.linear + macs.head == model.parameters - model.embedding - 65 * 4096
    share = prefill_macs(model, 32_768).attention_share
    assert share == pytest.approx(0.393, abs=0.01)
    # One sequence does two operations for each 16-bit weight; a batch reads the weights once.
    ledger = CacheLedger.of(model)
    assert arithmetic_intensity(ledger, num_tokens=1) == pytest.approx(1.0, abs=0.01)
    assert arithmetic_intensity(ledger, num_tokens=1, batch=64) == pytest.approx(57, abs=8)
