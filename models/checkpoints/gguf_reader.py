"""A GGUF file as a Checkpoint: Hugging Face names, half-split RoPE, dequantised values.

In files of the `llama` architecture the two halves of each head of W_q and W_k are interleaved,
because llama.cpp rotates neighbouring channels; the rows are put back while they are read. Other
architectures are stored as they are. Norm weights are the whole factor in every GGUF file.

`gguf_file` reads the file format, and `gguf_config` the keys.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from jaxkv.models.checkpoints.base import CheckpointTensor
from jaxkv.models.checkpoints.gguf_config import ROPE_FREQS, config_from_gguf
from jaxkv.models.checkpoints.gguf_file import GgufFile, GgufTensor, open_gguf
from jaxkv.models.checkpoints.names import check_tensors
from jaxkv.models.config import ModelConfig

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_POST_NORM_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class GgufCheckpoint:
    """A GGUF file whose header was read; implements `base.Checkpoint`."""

    config: ModelConfig
    file: GgufFile
    stored: Mapping[str, GgufTensor]

    def tensors(self) -> Iterator[CheckpointTensor]:
        """Yields every tensor in file order."""
        attention = self.config.attention
        permuted = self.file.metadata["general.architecture"] == "llama"
        for name, stored in self.stored.items():
            rows = None
            if permuted and name.split(".")[-2] in ("q_proj", "k_proj"):
                rows = _half_split_rows(stored.shape[0], attention.head_dim)
            read_into = partial(_read_into, self.file, stored, rows)
            yield CheckpointTensor(name, stored.shape, read_into)


def open_gguf_checkpoint(path: Path) -> GgufCheckpoint:
    """Opens a GGUF file of a model.

    Raises:
      ModelError: the file cannot be read (`open_gguf`), its keys are refused
        (`config_from_gguf`), or a tensor is missing, unknown or has another shape.
    """
    file = open_gguf(path)
    config = config_from_gguf(file)
    stored = {
        _hf_name(name, post_norms=config.post_norms): tensor
        for name, tensor in file.tensors.items()
        if name != ROPE_FREQS
    }
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    check_tensors(config, shapes, str(path), "its metadata")
    return GgufCheckpoint(config, file, stored)


def _hf_name(name: str, *, post_norms: bool) -> str:
    """Returns the Hugging Face name. An unknown name is returned as it is, and refused later."""
    if name in _OUTER:
        return _OUTER[name]
    table = _POST_NORM_LAYER if post_norms else _LAYER
    match name.split("."):
        case ["blk", layer, part, kind] if part in table:
            return f"model.layers.{layer}.{table[part]}.{kind}"
        case _:
            return name


def _half_split_rows(num_rows: int, head_dim: int) -> np.ndarray:
    """Returns where each stored row goes: in a head, row 2i is channel i, row 2i + 1 is D/2 + i."""
    rows = np.arange(num_rows).reshape(-1, 2, head_dim // 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _read_into(
    file: GgufFile, stored: GgufTensor, rows: np.ndarray | None, target: np.ndarray
) -> None:
    for run, values in file.blocks(stored):
        target[run if rows is None else rows[run]] = values
