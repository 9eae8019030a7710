"""A GGUF model is read as the Hugging Face model it was converted from, or refused by name."""

import math
from pathlib import Path
from typing import Any

import chex
import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxkv.models.checkpoints import open_checkpoint
from jaxkv.models.checkpoints.hf_config import config_from_hf
from jaxkv.models.checkpoints.names import tensor_shapes
from jaxkv.models.config import LinearScaling, ModelConfig, YarnScaling
from jaxkv.models.errors import ModelError

NUM_LAYERS = 7
HF_SIZES = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
GGUF_SIZES = {
    "embedding_length": 64,
    "feed_forward_length": 96,
    "block_count": NUM_LAYERS,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "context_length": 512,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5e5,
}
# By architecture: its keys other than the sizes, and those of config.json.
ARCHS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"rope.dimension_count": 16, "vocab_size": 40}, {"model_type": "llama"}),
    "mistral": (
        {"attention.sliding_window": 24},
        {"model_type": "mistral", "sliding_window": 24},
    ),
    "qwen2": ({}, {"model_type": "qwen2"}),
    "qwen3": ({}, {"model_type": "qwen3"}),
    "gemma2": (
        {
            "attention.sliding_window": 24,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 15.0,
        },
        {
            "model_type": "gemma2",
            "sliding_window": 24,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 15.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3": (
        {"attention.sliding_window": 24},
        {"model_type": "gemma3_text", "sliding_window": 24, "query_pre_attn_scalar": 16},
    ),
}


def hf_config(name: str, **changes: Any) -> ModelConfig:
    return config_from_hf({**HF_SIZES, **ARCHS[name][1], **changes})


def random_weights(config: ModelConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = tensor_shapes(config)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def interleaved(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Permutes W_q and W_k as llama.cpp's converter does, channel by channel."""
    out = np.empty_like(rows)
    for first in range(0, len(rows), head_dim):
        for i in range(head_dim // 2):
            out[first + 2 * i] = rows[first + i]
            out[first + 2 * i + 1] = rows[first + head_dim // 2 + i]
    return out


def write(path: Path, name: str, weights: dict[str, np.ndarray], **changes: Any) -> Path:
    """Writes Hugging Face weights as GGUF, under the names of the gguf package's own table."""
    arch = "llama" if name == "mistral" else name
    writer = gguf.GGUFWriter(path, arch)
    keys = {**GGUF_SIZES, **ARCHS[name][0], **changes}
    for key, value in keys.items():
        full = key if key.startswith("split.") else f"{arch}.{key}"
        if isinstance(value, list):
            writer.add_array(full, value)
        elif value is not None:
            writer.add_key_value(full, value, gguf.GGUFValueType.get_type(value))
    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch)
    table = gguf.get_tensor_name_map(kind, keys["block_count"])
    for hf_name, values in weights.items():
        gguf_name = table.get_name(hf_name, try_suffixes=(".weight", ".bias")) or hf_name
        if arch == "llama" and ("q_proj" in hf_name or "k_proj" in hf_name):
            values = interleaved(values, 16)
        writer.add_tensor(gguf_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_all(path: Path, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    arrays = {}
    for tensor in open_checkpoint(path).tensors():
        arrays[tensor.name] = np.empty(tensor.shape, dtype)
        tensor.read_into(arrays[tensor.name])
    return arrays


@pytest.mark.parametrize(
    ("name", "tied"),
    # The format has no head of its own for Gemma 2.
    [(name, tied) for name in ARCHS for tied in (True, False) if tied or name != "gemma2"],
)
def test_config_and_weights_are_those_before_conversion(tmp_path: Path, name: str, tied: bool):
    expected = hf_config(name, tie_word_embeddings=tied)
    weights = random_weights(expected)
    path = write(tmp_path / "model.gguf", name, weights)
    assert open_checkpoint(path).config == expected
    found = read_all(path)
    assert found.keys() == weights.keys()
    for key, values in weights.items():
        chex.assert_trees_all_equal(found[key], values, custom_message=key)


def test_biases_of_q_and_k_are_put_back_like_their_rows(tmp_path: Path):
    weights = random_weights(hf_config("llama", tie_word_embeddings=True))
    rng = np.random.default_rng(1)
    for layer in range(NUM_LAYERS):
        for part, width in (("q", 64), ("k", 32), ("v", 32)):
            bias = rng.standard_normal(width).astype(np.float32)
            weights[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = bias
    path = write(tmp_path / "model.gguf", "llama", weights)
    assert open_checkpoint(path).config.attention.qkv_bias
    for key, values in read_all(path).items():
        chex.assert_trees_all_equal(values, weights[key], custom_message=key)


def test_targets_may_be_bfloat16_and_strided(tmp_path: Path):
    weights = random_weights(hf_config("llama"))
    path = write(tmp_path / "model.gguf", "llama", weights)
    for tensor in open_checkpoint(path).tensors():
        expected = weights[tensor.name].astype(ml_dtypes.bfloat16)
        target = np.zeros((*tensor.shape[::-1], 2), ml_dtypes.bfloat16)
        tensor.read_into(target[..., 0].T)
        chex.assert_trees_all_equal(target[..., 0].T, expected)
        assert not target[..., 1].any()


def llama3_divisors(
    head_dim: int, theta: float, factor: float, low: float, high: float, original: int
) -> np.ndarray:
    """The divisors llama.cpp's converter writes, from the three bands of Llama 3.1's reference."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(
    ("head_dim", "theta", "factor", "original"),
    [(128, 5e5, 8.0, 8192), (64, 5e5, 32.0, 8192), (128, 5e5, 32.0, 8192), (16, 1e4, 8.0, 64)],
    ids=["llama_3.1_8b", "llama_3.2_1b", "llama_3.2_3b", "tiny"],
)
def test_llama3_scaling_is_recovered_from_its_divisors(
    tmp_path: Path, head_dim: int, theta: float, factor: float, original: int
):
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    changes = {"head_dim": head_dim, "rope_theta": theta, "tie_word_embeddings": True}
    expected = hf_config("llama", rope_scaling=scaling, **changes)
    weights = random_weights(expected)
    weights["rope_freqs.weight"] = llama3_divisors(head_dim, theta, factor, 1.0, 4.0, original)
    keys = {"attention.key_length": head_dim, "attention.value_length": head_dim}
    keys |= {"rope.dimension_count": head_dim, "rope.freq_base": theta}
    path = write(tmp_path / "model.gguf", "llama", weights, **keys)
    assert open_checkpoint(path).config == expected


@pytest.mark.parametrize(
    "divisors",
    [np.linspace(1, 8, 8), np.full(8, 2.0), np.array([1, 1, 1, 3, 8, 8, 8, 8]), np.ones(4)],
    ids=["another_ramp", "constant", "one_channel_on_the_ramp", "wrong_length"],
)
def test_divisors_that_are_no_llama3_scaling_are_refused(tmp_path: Path, divisors: np.ndarray):
    weights = random_weights(hf_config("llama"))
    weights["rope_freqs.weight"] = divisors.astype(np.float32)
    path = write(tmp_path / "model.gguf", "llama", weights)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        open_checkpoint(path)


def test_one_divisor_off_by_a_thousandth_is_refused(tmp_path: Path):
    divisors = llama3_divisors(128, 5e5, 8.0, 1.0, 4.0, 8192)
    on_the_ramp = int(np.flatnonzero((divisors > 1) & (divisors < 8))[2])
    divisors[on_the_ramp] *= 1.001
    changes = {"head_dim": 128, "rope_theta": 5e5, "tie_word_embeddings": True}
    weights = random_weights(hf_config("llama", **changes)) | {"rope_freqs.weight": divisors}
    keys = {"attention.key_length": 128, "attention.value_length": 128}
    path = write(tmp_path / "m.gguf", "llama", weights, **keys, **{"rope.dimension_count": 128})
    with pytest.raises(ModelError, match="not a Llama 3 scaling"):
        open_checkpoint(path)


def test_divisors_of_one_are_no_scaling(tmp_path: Path):
    expected = hf_config("llama", tie_word_embeddings=True)
    weights = random_weights(expected) | {"rope_freqs.weight": np.ones(8, np.float32)}
    assert open_checkpoint(write(tmp_path / "m.gguf", "llama", weights)).config == expected


@pytest.mark.parametrize(
    ("keys", "expected", "max_positions"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None, 512),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, LinearScaling(factor=4), 512),
        ({"rope.scaling.factor": 4.0}, LinearScaling(factor=4), 512),
        ({"rope.scale_linear": 4.0}, LinearScaling(factor=4), 512),
        ({"rope.scaling.factor": 0.0}, None, 512),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 256,
                "rope.scaling.finetuned": True,
            },
            YarnScaling(
                factor=4.0, original_max_positions=256, attention_factor=1.1386294361119891
            ),
            1024,
        ),
    ],
    ids=["none", "linear", "default_type", "old_name", "zero", "yarn"],
)
def test_rope_scaling_keys_are_read(tmp_path: Path, keys, expected, max_positions):
    path = write(tmp_path / "m.gguf", "qwen2", random_weights(hf_config("qwen2")), **keys)
    config = open_checkpoint(path).config
    assert [layer.rope.scaling for layer in config.layers] == [expected] * NUM_LAYERS
    assert config.max_positions == max_positions


def test_gemma3_scales_its_global_layers_alone(tmp_path: Path):
    keys = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    path = write(tmp_path / "m.gguf", "gemma3", random_weights(hf_config("gemma3")), **keys)
    scaling = {"rope_type": "linear", "factor": 8.0}
    assert open_checkpoint(path).config == hf_config("gemma3", rope_scaling=scaling)


@pytest.mark.parametrize(
    "pattern", [2, [True, False] * 3 + [True]], ids=["a_period", "a_list_of_layers"]
)
def test_a_window_pattern_in_the_file_is_obeyed(tmp_path: Path, pattern):
    keys = {"attention.sliding_window_pattern": pattern}
    path = write(tmp_path / "m.gguf", "gemma3", random_weights(hf_config("gemma3")), **keys)
    assert open_checkpoint(path).config == hf_config("gemma3", sliding_window_pattern=2)


@pytest.mark.parametrize(
    ("name", "num_layers", "scale"),
    [("gemma2", 46, 16), ("gemma2", 42, 8), ("gemma3", 62, 16), ("gemma3", 48, 8)],
    ids=str,
)
def test_the_27b_gemmas_scale_queries_by_width_over_heads(
    tmp_path: Path, name: str, num_layers: int, scale: int
):
    weights = random_weights(hf_config(name, num_hidden_layers=num_layers, head_dim=8))
    keys = {"attention.key_length": 8, "attention.value_length": 8, "block_count": num_layers}
    config = open_checkpoint(write(tmp_path / "m.gguf", name, weights, **keys)).config
    assert config.attention.scale == pytest.approx(1 / math.sqrt(scale))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "expert_count", 8),
        ("llama", "rope.dimension_count", 8),
        ("llama", "attention.value_length", 8),
        ("llama", "attention.clamp_kqv", 8.0),
        ("llama", "attention.causal", False),
        ("llama", "attention.head_count_kv", 3),
        ("llama", "attention.head_count_kv", [2, 2, 2, 1, 2, 2, 2]),
        ("llama", "rope.scaling.type", "longrope"),
        ("llama", "rope.scaling.type", "yarn"),
        ("llama", "rope.scaling.attn_factor", 1.5),
        ("llama", "context_length", None),
        ("llama", "split.count", 2),
        ("qwen2", "attention.sliding_window", 24),
        ("gemma3", "attention.sliding_window", None),
    ],
    ids=str,
)
def test_a_key_that_changes_the_maths_is_refused_by_name(tmp_path: Path, name, key, value):
    weights = random_weights(hf_config(name))
    path = write(tmp_path / "m.gguf", name, weights, **{key: value})
    with pytest.raises(ModelError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert key in message
    assert "\n" not in message


def test_keys_that_are_off_and_lists_of_one_value_pass(tmp_path: Path):
    keys = {
        "expert_count": 0,
        "attention.head_count_kv": [2] * NUM_LAYERS,
        "attention.causal": True,
        "rope.scaling.attn_factor": 1.0,
    }
    expected = hf_config("llama", tie_word_embeddings=True)
    path = write(tmp_path / "m.gguf", "llama", random_weights(expected), **keys)
    assert open_checkpoint(path).config == expected


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"general\.architecture 'mamba'"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model.layers.3.mlp.up_proj.weight": None}, "has no tensor model.layers.3.mlp.up_proj"),
        ({"model.embed_tokens.weight": None}, "has no tensor token_embd.weight"),
        ({"blk.0.attn_qkv.weight": np.zeros((8, 8), np.float32)}, "blk.0.attn_qkv.weight"),
        ({"blk.0.attn_output.bias": np.zeros(64, np.float32)}, "self_attn.o_proj.bias"),
        ({"model.norm.weight": np.zeros(32, np.float32)}, "model.norm.weight has shape [32]"),
    ],
    ids=["missing", "no_embedding", "unknown", "bias", "shape"],
)
def test_tensors_that_do_not_fit_the_config_are_refused_by_name(tmp_path: Path, change, problem):
    weights = random_weights(hf_config("llama")) | change
    weights = {name: values for name, values in weights.items() if values is not None}
    path = write(tmp_path / "m.gguf", "llama", weights)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(path)
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)
