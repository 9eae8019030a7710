"""What is said of KV caches in general, with the model and the unit that it is true for."""

import pytest

from jaxkv.ledger import CacheLedger, preset, weight_bytes

GiB = 1 << 30


def ratio(name: str, context: int) -> float:
    """KV bytes of a sequence in 16 bits, in parts of the weights'."""
    model = preset(name)
    return CacheLedger.of(model, "f16").sequence_bytes(context) / weight_bytes(model, "f16")


def test_the_cache_of_a_7b_mha_model_equals_its_weights_near_32k():
    model = preset("llama-2-7b")
    assert CacheLedger.of(model, "f16").bytes_per_token == 512 * 1024
    assert ratio("llama-2-7b", 32 << 10) == pytest.approx(1.27, abs=0.01)
    assert ratio("llama-2-7b", 128 << 10) == pytest.approx(5.10, abs=0.01)
    crossing = CacheLedger.of(model, "f16").crossing_context(weight_bytes(model, "f16"))
    assert crossing == 25_697  # 25.1k


def test_with_grouped_queries_the_same_size_is_level_past_100k_only():
    assert ratio("mistral-7b-v0.3", 32 << 10) == pytest.approx(0.30, abs=0.01)
    assert ratio("mistral-7b-v0.3", 128 << 10) == pytest.approx(1.19, abs=0.01)
    assert ratio("qwen2.5-7b", 128 << 10) == pytest.approx(0.49, abs=0.01)


def test_weights_of_70b_are_140_decimal_gigabytes():
    assert weight_bytes(preset("llama-2-70b"), "f16") / 1e9 == pytest.approx(138.0, abs=0.1)
    assert weight_bytes(preset("llama-3.1-70b"), "f16") / 1e9 == pytest.approx(141.1, abs=0.1)
    assert weight_bytes(preset("llama-2-70b"), "f16") / GiB == pytest.approx(128.5, abs=0.1)


def test_the_cache_of_70b_at_32k_is_80_gib_with_all_heads_and_10_gib_with_8():
    grouped = preset("llama-2-70b")
    all_heads = grouped.with_kv_heads(64)
    assert CacheLedger.of(all_heads, "f16").sequence_bytes(32 << 10) == 80 * GiB
    assert CacheLedger.of(grouped, "f16").sequence_bytes(32 << 10) == 10 * GiB
    # It passes the weights in some configurations: with all heads at 60 thousand tokens (where K
    # and V have projections of 9.4e9 parameters more), with 8 at 421 thousand.
    for model, crossing in ((all_heads, 59_793), (grouped, 420_993)):
        ledger, weights = CacheLedger.of(model, "f16"), weight_bytes(model, "f16")
        assert ledger.crossing_context(weights) == crossing
