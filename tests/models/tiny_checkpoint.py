"""Small models of random weights on disk, with a tokenizer: a Hugging Face directory, a GGUF file.

Both hold the same model. The tests that read them check the properties.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from jaxkv.models.checkpoints.hf_config import config_from_hf
from jaxkv.models.checkpoints.names import tensor_shapes

V = 300
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
}
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the")]


def random_weights(config: dict[str, Any] = CONFIG) -> dict[str, np.ndarray]:
    """Returns weights by Hugging Face name, scaled so that activations keep their size."""
    rng = np.random.default_rng(0)
    weights = {}
    for name, shape in tensor_shapes(config_from_hf(config)).items():
        values = rng.standard_normal(shape, np.float32)
        weights[name] = 1 + 0.1 * values if len(shape) == 1 else values * shape[1] ** -0.5
    return weights


def vocabulary() -> list[str]:
    """256 bytes, the merged tokens, and `<|im_end|>`, which ends an answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*alphabet, *("".join(pair) for pair in MERGES), "<|im_end|>"]


def write_hf(
    folder: Path,
    weights: dict[str, np.ndarray] | None = None,
    *,
    config: dict[str, Any] = CONFIG,
    shards: int = 1,
    tokenizer: bool = True,
) -> Path:
    """Writes a Hugging Face directory; its tokenizer has no special tokens around a text."""
    folder.mkdir()
    weights = random_weights(config) if weights is None else weights
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
    else:
        weight_map = {name: f"part{i % shards}.safetensors" for i, name in enumerate(weights)}
        for file in set(weight_map.values()):
            part = {name: value for name, value in weights.items() if weight_map[name] == file}
            save_file(part, folder / file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`."""
    ids = {token: i for i, token in enumerate(vocabulary()[:-1])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_gguf(
    path: Path, weights: dict[str, np.ndarray] | None = None, *, pre: str | None = "gpt-2"
) -> Path:
    """Writes a GGUF file; `pre` is its kind of pre-tokenizer, None leaves the tokenizer out."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    writer.add_vocab_size(V)
    if pre is not None:
        tokens = vocabulary()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([1] * (len(tokens) - 1) + [3])
        writer.add_token_merges([" ".join(pair) for pair in MERGES])
        writer.add_eos_token_id(len(tokens) - 1)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, CONFIG["num_hidden_layers"])
    for name, values in (random_weights() if weights is None else weights).items():
        gguf_name = table.get_name(name, try_suffixes=(".weight",))
        assert gguf_name is not None
        if "q_proj" in name or "k_proj" in name:  # llama.cpp rotates neighbouring channels
            halves = values.reshape(-1, 2, CONFIG["head_dim"] // 2, CONFIG["hidden_size"])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(gguf_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
