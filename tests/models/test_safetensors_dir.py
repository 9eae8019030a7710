"""A Hugging Face directory, sharded or not, is read tensor by tensor, or refused in one line."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import chex
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxkv.models.checkpoints import open_checkpoint
from jaxkv.models.checkpoints.hf_config import config_from_hf
from jaxkv.models.checkpoints.names import tensor_shapes
from jaxkv.models.errors import ModelError

LLAMA = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
GEMMA2 = LLAMA | {"model_type": "gemma2", "head_dim": 8}
GEMMA3 = LLAMA | {"model_type": "gemma3_text", "head_dim": 8}
UP_PROJ = "model.layers.1.mlp.up_proj.weight"


def random_weights(raw: dict[str, Any], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = tensor_shapes(config_from_hf(raw))
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write(
    folder: Path, raw: dict[str, Any], weights: dict[str, np.ndarray], shards: int = 1
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        file_name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in sorted(weights)[i::shards]}
        save_file(part, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_raw(path: Path, header: Any, data: bytes = b"") -> None:
    """A safetensors file by hand, for what the library refuses to write."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_all(path: Path, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    arrays = {}
    for tensor in open_checkpoint(path).tensors():
        assert tensor.name not in arrays
        arrays[tensor.name] = np.empty(tensor.shape, dtype)
        tensor.read_into(arrays[tensor.name])
    return arrays


def error(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_all(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("target", [np.float32, ml_dtypes.bfloat16], ids=["to_f32", "to_bf16"])
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("shards", [1, 3])
def test_weights_are_those_that_were_saved(tmp_path: Path, stored, target, shards: int):
    weights = random_weights(LLAMA, stored)
    found = read_all(write(tmp_path, LLAMA, weights, shards), target)
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        chex.assert_trees_all_equal(found[name], values.astype(target), custom_message=name)


@pytest.mark.parametrize("raw", [GEMMA2, GEMMA3], ids=["gemma2", "gemma3"])
def test_norms_of_gemma_gain_the_one_that_their_files_leave_out(tmp_path: Path, raw):
    weights = random_weights(raw, ml_dtypes.bfloat16)
    found = read_all(write(tmp_path, raw, weights))
    num_norms = 0
    for name, values in weights.items():
        expected = values.astype(np.float32)
        if "norm" in name:
            expected, num_norms = 1 + expected, num_norms + 1
        chex.assert_trees_all_equal(found[name], expected, custom_message=name)
    assert num_norms == 1 + 2 * (4 if raw is GEMMA2 else 6)


def test_a_target_may_be_any_view(tmp_path: Path):
    weights = random_weights(LLAMA)
    for tensor in open_checkpoint(write(tmp_path, LLAMA, weights)).tensors():
        target = np.zeros((*tensor.shape[::-1], 2), np.float32)
        tensor.read_into(target[..., 0].T)
        chex.assert_trees_all_equal(target[..., 0].T, weights[tensor.name])
        assert not target[..., 1].any()


def test_what_a_decoder_does_not_need_is_skipped(tmp_path: Path):
    weights = random_weights(LLAMA)
    extra = {
        "lm_head.weight": np.ones((40, 32), np.float32),  # tied: the embeddings serve
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    assert read_all(write(tmp_path, LLAMA, weights | extra)).keys() == weights.keys()


@pytest.mark.parametrize(
    ("text", "vision"),
    [("language_model.model.", "vision_tower."), ("model.language_model.", "model.vision_tower.")],
    ids=["transformers_4", "transformers_5"],
)
def test_the_text_model_of_a_gemma3_with_a_vision_tower_is_read(tmp_path: Path, text, vision):
    weights = random_weights(GEMMA3)
    stored = {name.replace("model.", text, 1): values for name, values in weights.items()}
    stored[f"{vision}embeddings.position_ids"] = np.arange(4)  # of another dtype, too
    outer = {"model_type": "gemma3", "text_config": GEMMA3, "vision_config": {"a": 1}}
    plain = read_all(write(tmp_path / "plain", GEMMA3, weights))
    found = read_all(write(tmp_path / "outer", outer, stored))
    assert found.keys() == plain.keys()
    for name, values in plain.items():
        chex.assert_trees_all_equal(found[name], values, custom_message=name)


def test_a_large_tensor_is_read_within_a_few_megabytes(tmp_path: Path):
    raw = LLAMA | {"vocab_size": 16_384, "hidden_size": 512}  # 32 MiB of embeddings as float32
    weights = random_weights(raw, ml_dtypes.bfloat16)
    checkpoint = open_checkpoint(write(tmp_path, raw, weights))
    targets = {t.name: np.empty(t.shape, np.float32) for t in checkpoint.tensors()}
    tracemalloc.start()
    try:
        for tensor in checkpoint.tensors():
            tensor.read_into(targets[tensor.name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_a_file_cut_anywhere_is_refused_by_its_name(tmp_path: Path):
    path = write(tmp_path, LLAMA, random_weights(LLAMA)) / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 5, 8, 100, 3000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        message = error(tmp_path)
        assert message.startswith(f"{path}: truncated")


def test_a_file_that_shrinks_after_it_was_opened_is_refused(tmp_path: Path):
    path = write(tmp_path, LLAMA, random_weights(LLAMA)) / "model.safetensors"
    *_, last = open_checkpoint(tmp_path).tensors()
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelError, match="ended while tensor"):
        last.read_into(np.empty(last.shape, np.float32))


@pytest.mark.parametrize("dtype", ["I8", "U8", "F8_E4M3", "I32", "F64"])
def test_another_dtype_is_refused_by_tensor_and_dtype(tmp_path: Path, dtype: str):
    write(tmp_path, LLAMA, random_weights(LLAMA))
    header = {"lm_head.bias": {"dtype": dtype, "shape": [2, 4], "data_offsets": [0, 8]}}
    write_raw(tmp_path / "model.safetensors", header, bytes(8))
    message = error(tmp_path)
    assert "model.safetensors: tensor lm_head.bias" in message
    assert dtype in message


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({UP_PROJ: None}, f"has no tensor {UP_PROJ}"),
        ({UP_PROJ: np.zeros((32, 48), np.float32)}, f"{UP_PROJ} has shape [32, 48]"),
        (
            {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)},
            "model.layers.0.self_attn.q_proj.bias",
        ),
        ({"model.layers.2.mlp.up_proj.weight": np.zeros(1, np.float32)}, "model.layers.2.mlp"),
    ],
    ids=["missing", "shape", "bias", "too_many_layers"],
)
def test_tensors_that_do_not_fit_the_config_are_refused_by_name(tmp_path: Path, change, problem):
    weights = random_weights(LLAMA) | change
    weights = {name: values for name, values in weights.items() if values is not None}
    assert problem in error(write(tmp_path, LLAMA, weights))


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"not json", "its header is not JSON"),
        ([1], "its header is not a JSON object"),
        ({"t": {"dtype": "F32", "shape": [4]}}, "entry for tensor t is damaged"),
        ({"t": {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]}}, "entry for tensor t"),
        ({"t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}, "entry for tensor t"),
        ({"t": {"dtype": "F32", "shape": ["a"], "data_offsets": [0, 16]}}, "entry for tensor t"),
        ({"t": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, "entry for tensor t"),
        ({"t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99]}}, "truncated"),
    ],
    ids=[
        "not_json",
        "a_list",
        "no_offsets",
        "bad_shape",
        "bad_size",
        "bad_dim",
        "before",
        "outside",
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, header, problem: str):
    write(tmp_path, LLAMA, random_weights(LLAMA))
    write_raw(tmp_path / "model.safetensors", header, bytes(16))
    message = error(tmp_path)
    assert message.startswith(f"{tmp_path / 'model.safetensors'}: ")
    assert problem in message


def test_a_missing_shard_is_refused_by_its_name(tmp_path: Path):
    write(tmp_path, LLAMA, random_weights(LLAMA), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors: cannot be read: No such file" in error(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_refused(tmp_path: Path):
    write(tmp_path, LLAMA, random_weights(LLAMA), shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][UP_PROJ] = (
        {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
        - {index["weight_map"][UP_PROJ]}
    ).pop()
    path.write_text(json.dumps(index))
    message = error(tmp_path)
    assert f"{index['weight_map'][UP_PROJ]}: has no tensor {UP_PROJ}" in message


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": {"a": 1}}, "has no weight_map"),
        ({"weight_map": {"a": "../model.safetensors"}}, "is not a file name"),
    ],
    ids=["empty", "not_a_name", "outside"],
)
def test_a_damaged_index_is_refused(tmp_path: Path, index, problem: str):
    write(tmp_path, LLAMA, random_weights(LLAMA))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert problem in error(tmp_path)


def test_one_file_of_another_name_is_read_and_several_are_refused(tmp_path: Path):
    write(tmp_path, LLAMA, random_weights(LLAMA))
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    assert read_all(tmp_path).keys() == random_weights(LLAMA).keys()
    write_raw(tmp_path / "b.safetensors", {})
    assert "2 .safetensors files but no model.safetensors.index.json" in error(tmp_path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"{", "is not JSON"), (b"[]", "must hold a JSON object"), (b"\xff", "is not JSON")],
    ids=["cut", "list", "not_utf8"],
)
def test_a_config_that_is_not_json_is_refused(tmp_path: Path, content: bytes, problem: str):
    (tmp_path / "config.json").write_bytes(content)
    message = error(tmp_path)
    assert message.startswith(f"{tmp_path / 'config.json'}: ")
    assert problem in message


def test_a_path_that_is_no_model_says_what_was_looked_for(tmp_path: Path):
    assert "has no config.json" in error(tmp_path)
    assert "no such file or directory" in error(tmp_path / "absent")
    (tmp_path / "model.bin").write_bytes(b"")
    message = error(tmp_path / "model.bin")
    assert "config.json" in message
    assert ".gguf" in message
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert "model.safetensors" in error(tmp_path)
