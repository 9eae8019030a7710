"""A GGUF file, opened: its metadata, and its tensors, which are dequantised block by block.

This module reads the header itself, since `gguf.GGUFReader` makes numpy arrays of every string:
that takes tens of seconds for the 262,144 tokens of Gemma 3, where this takes a tenth of a second.
Values are read, not mapped, so that pages of the file never count as memory of the process.
Versions 2 and 3 are read, little-endian only. The layout of the file:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxkv.arith import round_up
from jaxkv.models.errors import ModelError

# By type number: the code of `struct`.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U64, _ARRAY_HEAD = struct.Struct("<Q"), struct.Struct("<IQ")
_BLOCK_VALUES = 1 << 16  # 256 KiB as float32, so that temporaries of `dequantize` stay in L2


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """Where one tensor lies in the file.

    Attributes:
      name: GGUF name, such as `blk.0.attn_q.weight`.
      shape: row-major, `[out, in]` for a matrix (the file lists dims in the opposite order).
      kind: how values are quantised.
      offset: offset of the first byte from the start of the file.
      nbytes: bytes in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file whose header has been read.

    Attributes:
      path: path of the file.
      metadata: plain Python values by key; an array is a list that is decoded at its first use.
      tensors: tensors by name, in file order.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def blocks(self, tensor: GgufTensor) -> Iterator[tuple[slice, np.ndarray]]:
        """Reads a tensor as float32, in runs of whole rows of about 256 KiB each.

        Yields:
          Pairs of a slice of rows and their values, `[rows, in]`; a vector is one run of shape
          `[n]`.

        Raises:
          ModelError: values of this type cannot be dequantised, or the file has become shorter.
        """
        block_values, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        num_rows = tensor.shape[0]
        row_shape = tensor.shape[1:]
        row_values = prod(row_shape)
        step = max(1, _BLOCK_VALUES // row_values) if row_shape else num_rows
        with open(self.path, "rb") as file:
            file.seek(tensor.offset)
            for start in range(0, num_rows, step):
                stop = min(start + step, num_rows)
                wanted = (stop - start) * row_values // block_values * block_bytes
                raw = file.read(wanted)
                if len(raw) != wanted:
                    raise ModelError(f"{self.path}: ended while tensor {tensor.name} was read")
                values = self._dequantised(tensor, raw)
                yield slice(start, stop), values.reshape(stop - start, *row_shape)

    def _dequantised(self, tensor: GgufTensor, raw: bytes) -> np.ndarray:
        # One flat row, since `dequantize` loops in Python over groups of 16 rows.
        flat = np.frombuffer(raw, np.uint8)[None]
        try:
            return dequantize(flat, tensor.kind)
        except NotImplementedError:
            raise ModelError(
                f"{self.path}: tensor {tensor.name} has type {tensor.kind.name}, which cannot be "
                "dequantised; use a file quantised to another type"
            ) from None


def open_gguf(path: Path) -> GgufFile:
    """Opens a GGUF file: reads its header, and checks that every tensor lies within the file.

    Args:
      path: path of the file.

    Raises:
      ModelError: the file is missing, empty, truncated, big-endian, not GGUF, has an unknown
        version, or has a tensor of an unknown type.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            magic = file.read(4)
            if magic != b"GGUF":
                raise ModelError(f"{path}: not a GGUF file: it starts with {magic!r}, not b'GGUF'")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path}: cannot be opened: {error.strerror or error}") from None
    header = _Header(path, data)
    header.offset = 4
    version = header.scalar("I")
    if version & 0xFFFF == 0:
        raise ModelError(f"{path}: a big-endian GGUF file; convert it to little-endian")
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version}; only 2 and 3 are read")
    num_tensors, num_keys = header.scalar("Q"), header.scalar("Q")
    metadata = _Metadata(path, dict(header.key_value() for _ in range(num_keys)))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{path}: general.alignment = {alignment!r}; the file is damaged")
    infos = [header.tensor() for _ in range(num_tensors)]
    start = round_up(header.offset, alignment)
    tensors = [_checked(path, size, info, start) for info in infos]
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in tensors})


def _checked(
    path: Path, file_size: int, info: tuple[str, tuple[int, ...], int, int], start: int
) -> GgufTensor:
    """Checks an entry of the list of tensors; the values of all tensors start at byte `start`."""
    name, shape, kind, offset = info
    try:
        known = GGMLQuantizationType(kind)
        block_values, block_bytes = GGML_QUANT_SIZES[known]
    except (KeyError, ValueError):
        raise ModelError(f"{path}: tensor {name} has unknown type number {kind}") from None
    if not shape or 0 in shape or shape[-1] % block_values:
        raise ModelError(
            f"{path}: tensor {name} of shape {list(shape)} cannot have type {known.name}, whose "
            f"rows are blocks of {block_values}; the file is damaged"
        )
    nbytes = prod(shape) // block_values * block_bytes
    if start + offset + nbytes > file_size:
        raise ModelError(
            f"{path}: truncated: tensor {name} ends at byte {start + offset + nbytes} of a file of "
            f"{file_size}; fetch it again"
        )
    return GgufTensor(name=name, shape=shape, kind=known, offset=start + offset, nbytes=nbytes)


class _Header:
    """A cursor over the header. Reading past the end of the file raises ModelError."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.offset = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self._take(struct.calcsize(code)))
        return value

    def string(self, what: str) -> str:
        raw = self._take(self.scalar("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ModelError(f"{self.path}: {what} is not UTF-8; the file is damaged") from None

    def key_value(self) -> tuple[str, Any]:
        """Reads a key with its value; for an array, with a function that decodes it."""
        key = self.string("a key")
        kind = self.scalar("I")
        if kind == _STRING:
            return key, self.string(key)
        if kind == _ARRAY:
            start = self.offset
            self._skip_array(key)
            return key, partial(_Header.array, self, start, key)
        return key, self.scalar(self._code(kind, key))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Reads name, row-major shape, type number, and offset from the start of the values."""
        name = self.string("a tensor's name")
        dims = [self.scalar("Q") for _ in range(self.scalar("I"))]
        return name, tuple(reversed(dims)), self.scalar("I"), self.scalar("Q")

    def array(self, start: int, key: str) -> list[Any]:
        """Decodes the array whose type is stored at byte `start`."""
        self.offset = start
        kind, count = _ARRAY_HEAD.unpack(self._take(_ARRAY_HEAD.size))
        if kind == _STRING:
            return [self.string(key) for _ in range(count)]
        if kind == _ARRAY:
            raise ModelError(f"{self.path}: {key} is an array of arrays, which is not read")
        dtype = np.dtype("<" + self._code(kind, key))
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()

    def _skip_array(self, key: str) -> None:
        kind, count = _ARRAY_HEAD.unpack(self._take(_ARRAY_HEAD.size))
        if kind == _STRING:
            self._skip_strings(count)
        elif kind == _ARRAY:
            for _ in range(count):
                self._skip_array(key)
        else:
            self._take(count * struct.calcsize(self._code(kind, key)))

    def _skip_strings(self, count: int) -> None:
        # The hot loop when a file is opened: a vocabulary has a quarter of a million strings.
        data, offset, read = self.data, self.offset, _U64.unpack_from
        try:
            for _ in range(count):
                offset += 8 + read(data, offset)[0]
        except struct.error:
            offset = len(data) + 1
        self.offset = offset
        self._take(0)

    def _take(self, count: int) -> bytes:
        end = self.offset + count
        if end > len(self.data):
            raise ModelError(f"{self.path}: truncated inside its header; fetch it again")
        raw = self.data[self.offset : end]
        self.offset = end
        return raw

    def _code(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise ModelError(f"{self.path}: {key} has unknown type {kind}; the file is damaged")
        return _SCALARS[kind]


class _Metadata(Mapping[str, Any]):
    """The key-value pairs of a header; an array is stored as a function until its first use."""

    def __init__(self, path: Path, values: dict[str, Any | Callable[[], list[Any]]]):
        self._path = path
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if callable(value):
            value = self._values[key] = value()
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
