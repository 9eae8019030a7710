"""Filling the decoder's parameters from a checkpoint, one tensor at a time.

Several tensors of a checkpoint may be one parameter here (q, k and v are one matrix): each is read
straight into its rows of that parameter's buffer, which becomes a device array as soon as it is
full. Peak host memory is little more than the weights. If the device has separate memory, it is
little more than the largest parameter.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import cast

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxkv.models.checkpoints import Checkpoint
from jaxkv.models.config import ModelConfig
from jaxkv.models.decode_model import FlaxDecodeModel, ParamPath
from jaxkv.models.decoder import Decoder

Progress = Callable[[int, int], None]
DTYPES = ("float32", "bfloat16", "float16")  # of matrices
_XLA_ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class _Place:
    """Where a checkpoint's tensor goes: a parameter, and its first row there."""

    path: ParamPath
    row: int = 0


def abstract_model(
    config: ModelConfig, dtype: DTypeLike
) -> tuple[nnx.GraphDef, dict[ParamPath, jax.ShapeDtypeStruct]]:
    """Structure and parameter shapes of a decoder; allocates no memory for the values."""
    module = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(module)
    leaves = cast(Iterable[tuple[ParamPath, nnx.Variable]], nnx.to_flat_state(state))
    return graphdef, {path: leaf.get_value() for path, leaf in leaves}


def random_model(config: ModelConfig, seed: int) -> FlaxDecodeModel:
    """A decoder with random float32 weights drawn from a seed, for training from scratch."""
    graphdef, state = nnx.split(Decoder(config, rngs=nnx.Rngs(seed)))
    leaves = cast(Iterable[tuple[ParamPath, nnx.Variable]], nnx.to_flat_state(state))
    named = {path: leaf.get_value() for path, leaf in leaves}
    return FlaxDecodeModel.from_named(config, graphdef, named)


def load_weights(
    checkpoint: Checkpoint, dtype: DTypeLike, progress: Progress | None = None
) -> FlaxDecodeModel:
    """Reads all parameters of a checkpoint, matrices as `dtype` and norms as float32.

    Args:
      checkpoint: an open checkpoint.
      dtype: dtype of the matrices.
      progress: called with the bytes of parameters that are in place, and their total.

    Raises:
      ModelError: a tensor cannot be read.
    """
    graphdef, shapes = abstract_model(checkpoint.config, dtype)
    places = _places(checkpoint.config)
    buffers: dict[ParamPath, np.ndarray] = {}
    rows_left = {path: shape.shape[0] for path, shape in shapes.items()}
    named: dict[ParamPath, jax.Array] = {}
    done, total = 0, sum(_num_bytes(shape) for shape in shapes.values())
    for tensor in checkpoint.tensors():
        place = places[tensor.name]
        shape = shapes[place.path]
        if place.path not in buffers:
            buffers[place.path] = _empty(shape.shape, shape.dtype)
        num_rows = tensor.shape[0]
        tensor.read_into(buffers[place.path][place.row : place.row + num_rows])
        rows_left[place.path] -= num_rows
        if rows_left[place.path] == 0:
            named[place.path] = _to_device(buffers.pop(place.path))
            done += _num_bytes(shape)
            if progress is not None:
                progress(done, total)
    in_order = {path: named[path] for path in shapes}
    return FlaxDecodeModel.from_named(checkpoint.config, graphdef, in_order)


def _num_bytes(shape: jax.ShapeDtypeStruct) -> int:
    return shape.size * shape.dtype.itemsize


def _empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An array with the alignment that lets XLA's CPU client use it without a copy."""
    num_bytes = prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(num_bytes + _XLA_ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _XLA_ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def _to_device(buffer: np.ndarray) -> jax.Array:
    # On a CPU the device array is the buffer itself. Elsewhere the wait keeps the next buffer from
    # being filled while this one is still being copied.
    return jax.block_until_ready(jax.device_put(buffer, may_alias=True))


def _places(config: ModelConfig) -> dict[str, _Place]:
    """Place of each tensor of `jaxkv.models.checkpoints.names.tensor_shapes(config)`."""
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
