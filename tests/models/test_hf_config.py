"""config.json becomes one ModelConfig, in both of transformers' forms, or is refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from jaxkv.models.checkpoints.hf_config import config_from_hf
from jaxkv.models.config import (
    AttentionConfig,
    LayerConfig,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    YarnScaling,
)
from jaxkv.models.errors import ModelError

SIZES = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")


def raw_config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SIZES, **changes}


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.window for layer in config.layers]


def thetas(config: ModelConfig) -> list[float]:
    return [layer.rope.theta for layer in config.layers]


def test_every_field_of_a_gemma2_config_is_read():
    config = config_from_hf(
        raw_config(
            "gemma2",
            head_dim=32,
            query_pre_attn_scalar=144,
            sliding_window=24,
            attn_logit_softcapping=20.0,
            final_logit_softcapping=15.0,
            rms_norm_eps=1e-5,
            rope_theta=20_000.0,
            hidden_act="gelu",  # transformers reads `hidden_activation`
        )
    )
    rope = RopeConfig(theta=20_000.0)
    assert config == ModelConfig(
        family="gemma2",
        vocab_size=320,
        width=96,
        mlp_width=160,
        layers=(LayerConfig(window=24, rope=rope), LayerConfig(window=None, rope=rope)) * 2,
        attention=AttentionConfig(
            num_heads=6, num_kv_heads=2, head_dim=32, scale=1 / 12, soft_cap=20.0
        ),
        max_positions=512,
        rms_eps=1e-5,
        activation="gelu_tanh",
        post_norms=True,
        embedding_scale=math.sqrt(96),
        logit_soft_cap=15.0,
        tied_embeddings=True,
    )


@pytest.mark.parametrize(
    ("model_type", "old", "new"),
    [
        ("llama", {"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}),
        (
            "llama",
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}},
        ),
        (
            "qwen3",
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}},
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 3},
            {
                "use_sliding_window": True,
                "sliding_window": 24,
                "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
            },
        ),
        (
            "gemma3_text",
            {
                "rope_theta": 2e6,
                "rope_local_base_freq": 2e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "sliding_window_pattern": 2,
            },
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 2e6, "rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
                },
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "_sliding_window_pattern": 2,
            },
        ),
    ],
    ids=["theta", "linear", "yarn", "qwen_windows", "gemma3"],
)
def test_the_forms_of_transformers_4_and_5_give_equal_configs(model_type, old, new):
    old_config = config_from_hf(raw_config(model_type, torch_dtype="bfloat16", **old))
    new_config = config_from_hf(raw_config(model_type, dtype="bfloat16", **new))
    assert old_config == new_config
    assert old_config != config_from_hf(raw_config(model_type))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_missing_keys_have_the_defaults_of_the_family(model_type):
    raw = raw_config(model_type)
    del raw["num_key_value_heads"], raw["max_position_embeddings"]
    raw["num_attention_heads"] = 32
    raw["hidden_size"] = 64 * 32
    config = config_from_hf(raw)
    attention = config.attention
    gemma = model_type.startswith("gemma")
    kv_heads = {"mistral": 8, "gemma2": 4, "gemma3_text": 4}.get(model_type, 32)
    head_dim = {"qwen3": 128, "gemma2": 256, "gemma3_text": 256}.get(model_type, 64)
    positions = {
        "llama": 2048,
        "mistral": 131_072,
        "qwen2": 32_768,
        "qwen3": 32_768,
        "gemma2": 8192,
        "gemma3_text": 131_072,
    }
    assert (attention.num_kv_heads, attention.head_dim) == (kv_heads, head_dim)
    assert attention.scale == pytest.approx(1 / math.sqrt(head_dim))
    assert config.max_positions == positions[model_type]
    assert config.tied_embeddings is gemma
    assert config.rms_eps == 1e-6
    assert config.activation == ("gelu_tanh" if gemma else "silu")
    assert attention.qkv_bias is (model_type == "qwen2")
    assert attention.qk_norm is (model_type in ("qwen3", "gemma3_text"))
    caps = (attention.soft_cap, config.logit_soft_cap)
    assert caps == ((50.0, 30.0) if model_type == "gemma2" else (None, None))


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("llama", {}, [None] * 4),
        ("mistral", {}, [4096] * 4),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("qwen2", {"sliding_window": 24}, [None] * 4),
        (
            "qwen2",
            {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 0},
            [24] * 4,
        ),
        ("qwen3", {"sliding_window": 24, "use_sliding_window": True}, [None] * 4),
        ("gemma2", {"sliding_window": 24}, [24, None, 24, None]),
        ("gemma3_text", {"sliding_window": 24}, [24] * 4),
        ("gemma3_text", {"sliding_window": 9, "sliding_window_pattern": 3}, [9, 9, None, 9]),
    ],
    ids=str,
)
def test_windows_follow_the_pattern_of_the_family(model_type, changes, expected):
    assert windows(config_from_hf(raw_config(model_type, **changes))) == expected


def test_gemma3_gives_sliding_layers_their_own_rope_base_and_no_scaling():
    raw = raw_config("gemma3_text", sliding_window_pattern=2)
    raw["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    config = config_from_hf(raw)
    assert thetas(config) == [1e4, 1e6, 1e4, 1e6]
    assert [layer.rope.scaling for layer in config.layers] == [
        None,
        LinearScaling(factor=8.0),
    ] * 2


def test_llama3_scaling_is_read():
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = config_from_hf(raw_config(rope_scaling=scaling))
    assert config.layers[0].rope.scaling == Llama3Scaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )


@pytest.mark.parametrize(
    ("changes", "attention_factor", "max_positions"),
    [
        ({}, 1.1386294361119891, 2048),
        ({"attention_factor": 1.5}, 1.5, 2048),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, 2048),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, 1.2772588722239782 / 1.1386294361119891, 2048),
        ({"mscale": 2.0}, 1.1386294361119891, 2048),
        ({"factor": None}, 1.0, 512),
        ({"original_max_position_embeddings": 64}, 1.1386294361119891, 512),
    ],
    ids=["paper", "given", "equal_pair", "pair", "half_a_pair", "no_factor", "short"],
)
def test_yarn_has_the_defaults_of_transformers(changes, attention_factor, max_positions):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, **changes}
    config = config_from_hf(raw_config(rope_scaling=scaling))
    rope = config.layers[0].rope.scaling
    assert isinstance(rope, YarnScaling)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, True)
    assert config.max_positions == max_positions


def test_yarn_bounds_are_read():
    scaling = {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16, "beta_slow": 2}
    rope = config_from_hf(raw_config(rope_scaling=scaling | {"truncate": False})).layers[0].rope
    assert rope.scaling == YarnScaling(
        factor=2.0,
        original_max_positions=512,
        beta_fast=16.0,
        beta_slow=2.0,
        attention_factor=0.1 * math.log(2) + 1,
        truncate=False,
    )


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("llama", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "hidden_act", "gelu"),
        ("llama", "num_local_experts", 8),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "is_causal", False),
        ("llama", "attention_chunk_size", 8192),
        ("llama", "sliding_window", 4096),
        ("llama", "quantization_config", {"quant_method": "awq"}),
        ("llama", "auto_map", {"AutoModel": "modeling.Model"}),
        ("llama", "architectures", ["LlamaForSequenceClassification"]),
        ("llama", "layer_types", ["sliding_attention"] * 4),
        ("llama", "num_key_value_heads", 4),
        ("llama", "num_attention_heads", 7),
        ("llama", "head_dim", 15),
        ("llama", "vocab_size", "320"),
        ("llama", "hidden_size", None),
        ("llama", "rms_norm_eps", 0),
        ("llama", "tie_word_embeddings", "yes"),
        ("mistral", "layer_types", ["sliding_attention", "full_attention"] * 2),
        ("qwen2", "layer_types", ["sliding_attention"] * 4),
        ("qwen2", "layer_types", ["full_attention"] * 3),
        ("qwen3", "attention_bias", True),
        ("qwen3", "layer_types", ["full_attention"] * 3 + ["linear_attention"]),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma2", "hidden_activation", "gelu"),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("gemma3_text", "sliding_window", None),
        ("gemma3_text", "rope_parameters", {"rope_theta": 1e6}),
        ("llama", "attention_sinks", 4),
    ],
    ids=str,
)
def test_a_value_that_changes_the_maths_is_refused_by_name(model_type, key, value):
    with pytest.raises(ModelError) as caught:
        config_from_hf(raw_config(model_type, **{key: value}), "some/config.json")
    message = str(caught.value)
    assert message.startswith("some/config.json: ")
    assert key in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("scaling", "name"),
    [
        ({"type": "dynamic", "factor": 2.0}, "type = 'dynamic'"),
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type = 'longrope'"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -1}, "factor = -1"),
        ({"rope_type": "default", "mrope_section": [8, 8]}, "mrope_section"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ([1, 2], "rope_scaling"),
    ],
    ids=str,
)
def test_a_rope_scaling_that_is_not_implemented_is_refused_by_name(scaling, name):
    with pytest.raises(ModelError) as caught:
        config_from_hf(raw_config(rope_scaling=scaling))
    assert name in str(caught.value)
    assert "rope_scaling" in str(caught.value)


def test_both_forms_of_rope_scaling_at_once_are_refused():
    raw = raw_config(rope_scaling={"type": "linear", "factor": 2.0})
    raw["rope_parameters"] = {"rope_theta": 1e4}
    with pytest.raises(ModelError, match="both rope_parameters and rope_scaling"):
        config_from_hf(raw)


@pytest.mark.parametrize("model_type", ["llama4", "mixtral", "qwen2_moe", "gemma", None, ["llama"]])
def test_an_unknown_architecture_is_refused_by_name(model_type):
    with pytest.raises(ModelError, match="model_type") as caught:
        config_from_hf({**SIZES, "model_type": model_type})
    assert repr(model_type) in str(caught.value)


def test_keys_that_cannot_change_the_maths_and_switches_that_are_off_pass():
    extra = {
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "pretraining_tp": 2,
        "attention_bias": False,
        "quantization_config": None,
        "num_experts": 0,
        "pruned_heads": {},
        "_attn_implementation": "sdpa",
        "partial_rotary_factor": 1.0,
        "layer_types": ["full_attention"] * 4,
        "temperature": 0.6,
        "rope_scaling": None,
    }
    assert config_from_hf(raw_config(**extra)) == config_from_hf(raw_config())


def test_a_gemma3_with_a_vision_tower_is_read_as_its_text_model():
    # The hub's 4B: what equals the class defaults is left out.
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = config_from_hf(
        {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": text,
            "vision_config": {"model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 256,
            "eoi_token_index": 256_000,
        }
    )
    assert config.family == "gemma3"
    assert (config.vocab_size, config.width, config.attention.num_heads) == (262_208, 2560, 8)
    assert windows(config)[:7] == [1024] * 5 + [None, 1024]


def test_a_quantised_gemma3_with_a_vision_tower_is_refused():
    raw = {"model_type": "gemma3", "text_config": {}, "quantization_config": {"bits": 4}}
    with pytest.raises(ModelError, match="quantization_config"):
        config_from_hf(raw)


@pytest.mark.parametrize(
    ("name", "family", "expected_windows"),
    [
        ("llama3_rope", "llama", [None] * 4),
        ("mistral_window", "mistral", [24] * 4),
        ("qwen2_bias", "qwen2", [None] * 4),
        ("qwen3_qknorm", "qwen3", [None] * 4),
        ("gemma2_softcap", "gemma2", [24, None] * 2),
        ("gemma3_local_global", "gemma3", [24] * 5 + [None, 24]),
    ],
)
def test_files_that_transformers_5_wrote_are_read(data: Path, name, family, expected_windows):
    path = data / "tiny" / name / "config.json"
    config = config_from_hf(json.loads(path.read_text()))
    assert config.family == family
    assert windows(config) == expected_windows
