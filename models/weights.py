"""Filling the decoder's parameters from a checkpoint, one tensor at a time.

Several tensors of a checkpoint may be one parameter here (q, k and v are one matrix): each is read
straight into its rows of that parameter's buffer, which becomes a device array, and is dropped, as
soon as it is full. Peak memory is the weights and the largest parameter.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from models.checkpoints import Checkpoint
from models.config import ModelConfig
from models.decoder import Decoder

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class _Place:
    """Where a checkpoint's tensor goes: a parameter, and the first of its rows there."""

    path: Path
    row: int = 0


def abstract_decoder(config: ModelConfig, dtype: DTypeLike) -> tuple[nnx.GraphDef, nnx.State]:
    """Structure and parameter shapes of a decoder, without memory for its values."""
    module = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(module)
    return graphdef, params


def load_params(checkpoint: Checkpoint, dtype: DTypeLike) -> tuple[nnx.GraphDef, nnx.State]:
    """Reads all parameters of a checkpoint, matrices as `dtype` and norms as float32.

    Raises:
      ModelError: a tensor cannot be read.
    """
    graphdef, abstract = abstract_decoder(checkpoint.config, dtype)
    places = _places(checkpoint.config)
    shapes = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(abstract)}
    buffers: dict[Path, np.ndarray] = {}
    rows_left = {path: shape.shape[0] for path, shape in shapes.items()}
    params: dict[Path, nnx.Param] = {}
    for tensor in checkpoint.tensors():
        place = places[tensor.name]
        shape = shapes[place.path]
        if place.path not in buffers:
            buffers[place.path] = np.empty(shape.shape, shape.dtype)
        num_rows = tensor.shape[0]
        tensor.read_into(buffers[place.path][place.row : place.row + num_rows])
        rows_left[place.path] -= num_rows
        if rows_left[place.path] == 0:
            params[place.path] = nnx.Param(_to_device(buffers.pop(place.path)))
    return graphdef, nnx.from_flat_state(params)


def _to_device(buffer: np.ndarray) -> jax.Array:
    # Waiting keeps a second buffer from being filled while this one is still being copied.
    return jax.block_until_ready(jnp.array(buffer))


def _places(config: ModelConfig) -> dict[str, _Place]:
    """Place of each tensor of `models.checkpoints.names.tensor_shapes(config)`."""
    attention = config.attention
    q_rows = attention.num_heads * attention.head_dim
    kv_rows = attention.num_kv_heads * attention.head_dim
    rows = {"q": 0, "k": q_rows, "v": q_rows + kv_rows}
    places = {
        "model.embed_tokens.weight": _Place(("embedding",)),
        "model.norm.weight": _Place(("final_norm", "weight")),
        "lm_head.weight": _Place(("head",)),
    }
    before_mlp = "pre_feedforward" if config.post_norms else "post_attention"
    norms = {
        "input": "attention_norm",
        "post_attention": "attention_post_norm",
        "post_feedforward": "mlp_post_norm",
        before_mlp: "mlp_norm",
    }
    for i in range(len(config.layers)):
        name, path = f"model.layers.{i}", ("layers", i)
        for kind in ("weight", "bias"):
            for part, row in rows.items():
                place = _Place((*path, "attention", "qkv", kind), row)
                places[f"{name}.self_attn.{part}_proj.{kind}"] = place
        for part in ("q", "k"):
            place = _Place((*path, "attention", f"{part}_norm", "weight"))
            places[f"{name}.self_attn.{part}_norm.weight"] = place
        places |= {
            f"{name}.self_attn.o_proj.weight": _Place((*path, "attention", "out", "weight")),
            f"{name}.mlp.gate_proj.weight": _Place((*path, "mlp", "gate_up", "weight")),
            f"{name}.mlp.up_proj.weight": _Place(
                (*path, "mlp", "gate_up", "weight"), config.mlp_width
            ),
            f"{name}.mlp.down_proj.weight": _Place((*path, "mlp", "down", "weight")),
        }
        for checkpoint_name, own in norms.items():
            places[f"{name}.{checkpoint_name}_layernorm.weight"] = _Place((*path, own, "weight"))
    return places
