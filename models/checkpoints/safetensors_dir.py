"""A Hugging Face directory as a Checkpoint: `config.json` and one or more `.safetensors` files.

Values are read, not mapped: the pages of a mapped file count as memory of the process, which would
double it while weights load. A file has the length of the header as a u64, the header as JSON, and
the values (https://github.com/huggingface/safetensors#format). `.bin` weights are pickles, and not
read.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxkv.models.checkpoints.base import CheckpointTensor
from jaxkv.models.checkpoints.hf_config import config_from_hf
from jaxkv.models.checkpoints.names import check_tensors
from jaxkv.models.config import ModelConfig
from jaxkv.models.errors import ModelError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_BLOCK_VALUES = 1 << 18
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
# A Gemma 3 with a vision tower, as transformers 4 and 5 name its text model.
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_VISION_PREFIXES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


@dataclass(frozen=True)
class _Stored:
    """Where a tensor is: its name in the file, and its offset from the start of the file."""

    path: Path
    raw_name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SafetensorsCheckpoint:
    """A directory whose config and headers were read; implements `base.Checkpoint`."""

    config: ModelConfig
    stored: Mapping[str, _Stored]

    def tensors(self) -> Iterator[CheckpointTensor]:
        """Yields every tensor, file by file."""
        gemma = self.config.family.startswith("gemma")
        for name, stored in self.stored.items():
            added = 1.0 if gemma and name.endswith("norm.weight") else 0.0
            yield CheckpointTensor(name, stored.shape, partial(_read_into, stored, added))


def open_safetensors(path: Path) -> SafetensorsCheckpoint:
    """Opens a directory of `config.json` and `.safetensors` files, sharded or not.

    The vision tower of a Gemma 3, stored RoPE buffers, and the output head of a model with tied
    embeddings are skipped. Gemma's norm weights are stored as `w - 1`; one is added while reading.

    Raises:
      ModelError: a file is missing, truncated or damaged; a tensor is missing, unknown, or has a
        dtype other than F32, F16 and BF16; or the config is refused.
    """
    config_path = path / "config.json"
    config = config_from_hf(_read_json(config_path), str(config_path))
    stored = {
        name: entry
        for raw_name, entry in _directory(path).items()
        if (name := _canonical(raw_name, config)) is not None
    }
    for entry in stored.values():
        _check_dtype(entry)
    shapes = {name: entry.shape for name, entry in stored.items()}
    check_tensors(config, shapes, str(path), "config.json")
    return SafetensorsCheckpoint(config, stored)


def _canonical(raw_name: str, config: ModelConfig) -> str | None:
    """Returns the name that `base` describes; None for a tensor that is skipped."""
    if config.family == "gemma3":
        if raw_name.startswith(_VISION_PREFIXES):
            return None
        for prefix, plain in _TEXT_PREFIXES.items():
            if raw_name.startswith(prefix):
                raw_name = plain + raw_name.removeprefix(prefix)
                break
    if raw_name.endswith(".rotary_emb.inv_freq"):
        return None
    if raw_name == "lm_head.weight" and config.tied_embeddings:
        return None
    return raw_name


def _directory(path: Path) -> dict[str, _Stored]:
    """Returns every tensor of every file, by its name in the file."""
    index_path = path / INDEX
    if not index_path.exists():
        return _read_header(_single_file(path))
    weight_map = _read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError(f"{index_path}: has no weight_map of tensor names to file names")
    merged: dict[str, _Stored] = {}
    for file_name in dict.fromkeys(weight_map.values()):
        if Path(file_name).name != file_name:
            raise ModelError(f"{index_path}: {file_name!r} is not a file name")
        merged |= _read_header(path / file_name)
    for name, file_name in weight_map.items():
        if name not in merged or merged[name].path.name != file_name:
            raise ModelError(f"{path / file_name}: has no tensor {name}, which {INDEX} puts there")
    return merged


def _single_file(path: Path) -> Path:
    if (path / SINGLE).exists():
        return path / SINGLE
    match sorted(path.glob("*.safetensors")):
        case [only]:
            return only
        case []:
            raise ModelError(f"{path}: has no {SINGLE}, no {INDEX} and no other .safetensors file")
        case many:
            raise ModelError(f"{path}: has {len(many)} .safetensors files but no {INDEX}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return value


def _read_header(path: Path) -> dict[str, _Stored]:
    """Reads the header of one file, and checks that every tensor lies within the file."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            header_bytes = int.from_bytes(file.read(8), "little")
            raw = file.read(min(header_bytes, _MAX_HEADER_BYTES))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    if size < 8 or len(raw) != header_bytes:
        raise ModelError(f"{path}: truncated, or not a safetensors file; fetch it again")
    try:
        header = json.loads(raw)
    except ValueError:
        raise ModelError(f"{path}: not a safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path}: not a safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)
    return {name: _entry(path, size, 8 + header_bytes, name, i) for name, i in header.items()}


def _entry(path: Path, size: int, start: int, name: str, info: Any) -> _Stored:
    """Returns one tensor of a header, whose offsets count from byte `start`."""
    try:
        shape = tuple(int(dim) for dim in info["shape"])
        begin, end = (int(offset) for offset in info["data_offsets"])
        stored = _Stored(path, name, str(info["dtype"]), shape, start + begin, end - begin)
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{path}: the header's entry for tensor {name} is damaged") from None
    if not 0 <= begin <= end:
        raise ModelError(f"{path}: the header's entry for tensor {name} is damaged")
    if start + end > size:
        raise ModelError(
            f"{path}: truncated: tensor {name} ends at byte {start + end} of a file of {size}; "
            "fetch it again"
        )
    return stored


def _check_dtype(stored: _Stored) -> None:
    dtype = _DTYPES.get(stored.dtype)
    if dtype is None:
        raise ModelError(
            f"{stored.path}: tensor {stored.raw_name} has dtype {stored.dtype}; "
            f"only {', '.join(_DTYPES)} are read"
        )
    if stored.nbytes != prod(stored.shape) * dtype.itemsize:
        raise ModelError(
            f"{stored.path}: the header's entry for tensor {stored.raw_name} is damaged"
        )


def _read_into(stored: _Stored, added: float, target: np.ndarray) -> None:
    """Reads runs of whole rows of about 1 MiB, adds `added`, and casts them into `target`."""
    num_rows = stored.shape[0]
    row_shape = stored.shape[1:]
    step = max(1, _BLOCK_VALUES // max(1, prod(row_shape)))
    block = np.empty((min(step, num_rows), *row_shape), _DTYPES[stored.dtype])
    try:
        with open(stored.path, "rb", buffering=0) as file:
            file.seek(stored.offset)
            for first in range(0, num_rows, step):
                rows = block[: min(step, num_rows - first)]
                wanted = memoryview(rows.view(np.uint8).reshape(-1))
                if file.readinto(wanted) != len(wanted):
                    raise ModelError(
                        f"{stored.path}: ended while tensor {stored.raw_name} was read"
                    )
                values = rows.astype(np.float32) + np.float32(added) if added else rows
                target[first : first + len(rows)] = values
    except OSError as error:
        raise ModelError(f"{stored.path}: cannot be read: {error.strerror or error}") from None
