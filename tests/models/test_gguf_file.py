"""GGUF files open fast, say what they hold, and are refused in one line where they are damaged."""

import struct
import tracemalloc
from pathlib import Path

import chex
import gguf
import numpy as np
import pytest

from jaxkv.models.checkpoints.gguf_file import open_gguf
from jaxkv.models.errors import ModelError

Kind = gguf.GGMLQuantizationType


def write(path: Path, tensors: dict[str, tuple[np.ndarray, Kind]], **metadata) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        name = key.replace("__", ".")
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((6, 64), np.float32)
    packed = gguf.quants.quantize(values, Kind.Q8_0)
    return write(
        tmp_path / "small.gguf",
        {"a.weight": (packed, Kind.Q8_0), "b.weight": (values[0], Kind.F32)},
        text="Ünïcode",
        whole=-3,
        real=0.5,
        yes=True,
        tokens=["<s>", "", "é", "word"],
        scores=[0.5, -1.0],
        types=[1, 2, 3],
    )


def test_metadata_are_the_values_that_were_written(small_file: Path):
    metadata = open_gguf(small_file).metadata
    assert dict(metadata) == {
        "general.architecture": "llama",
        "text": "Ünïcode",
        "whole": -3,
        "real": 0.5,
        "yes": True,
        "tokens": ["<s>", "", "é", "word"],
        "scores": [0.5, -1.0],
        "types": [1, 2, 3],
    }
    assert metadata["tokens"] is metadata["tokens"]
    assert len(metadata) == 8


def test_arrays_are_decoded_when_they_are_asked_for_and_not_before(tmp_path: Path):
    path = write(tmp_path / "bad.gguf", {}, tokens=[b"fine", b"\xff"])
    metadata = open_gguf(path).metadata
    with pytest.raises(ModelError, match="tokens is not UTF-8"):
        metadata["tokens"]


def test_shapes_are_row_major(small_file: Path):
    tensors = open_gguf(small_file).tensors
    assert {name: t.shape for name, t in tensors.items()} == {
        "a.weight": (6, 64),
        "b.weight": (64,),
    }


@pytest.mark.parametrize(
    "kind",
    [
        Kind.F16,
        Kind.BF16,
        Kind.Q4_0,
        Kind.Q4_1,
        Kind.Q5_0,
        Kind.Q5_1,
        Kind.Q8_0,
        Kind.Q2_K,
        Kind.Q3_K,
        Kind.Q4_K,
        Kind.Q5_K,
        Kind.Q6_K,
        Kind.IQ4_NL,
        Kind.IQ4_XS,
    ],
    ids=lambda kind: kind.name,
)
def test_blocks_join_to_what_dequantising_the_whole_tensor_gives(tmp_path: Path, kind: Kind):
    shape = (300, 512)  # more than one block, and a last one that is shorter
    values, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 255, (shape[0], shape[1] // values * size), np.uint8)
    # As scales are float16 anywhere in a block, clear the bit that could make one infinite.
    packed &= 0xBF
    path = write(tmp_path / "q.gguf", {"w": (packed, kind)})
    file = open_gguf(path)
    runs = list(file.blocks(file.tensors["w"]))
    assert len(runs) > 1
    assert [run.start for run, _ in runs[1:]] == [run.stop for run, _ in runs[:-1]]
    found = np.concatenate([block for _, block in runs])
    chex.assert_trees_all_equal(found, gguf.quants.dequantize(packed, kind))
    assert found.dtype == np.float32
    assert found.shape == shape


def test_a_large_tensor_is_read_within_a_few_megabytes(tmp_path: Path):
    shape = (4096, 2048)  # 32 MiB as float32
    packed = np.zeros((shape[0], shape[1] // 32 * 34), np.uint8)
    file = open_gguf(write(tmp_path / "large.gguf", {"w": (packed, Kind.Q8_0)}))
    target = np.empty(shape, np.float32)
    tracemalloc.start()
    try:
        for run, block in file.blocks(file.tensors["w"]):
            target[run] = block
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert not target.any()


def test_a_file_cut_anywhere_is_refused_in_one_line_that_names_it(small_file: Path):
    whole = small_file.read_bytes()
    for length in range(4, len(whole), 7):
        small_file.write_bytes(whole[:length])
        with pytest.raises(ModelError) as caught:
            open_gguf(small_file)
        message = str(caught.value)
        assert str(small_file) in message
        assert "truncated" in message
        assert "\n" not in message


def test_a_file_that_shrinks_after_it_was_opened_is_refused(small_file: Path):
    file = open_gguf(small_file)
    small_file.write_bytes(small_file.read_bytes()[:-200])
    with pytest.raises(ModelError, match=r"ended while tensor b\.weight"):
        list(file.blocks(file.tensors["b.weight"]))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 a wheel", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "GGUF version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "k has unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**62), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 32, 99, 0), "type number 99"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 33, 8, 0), "damaged"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 0, 0, 0), "damaged"),
    ],
    ids=[
        "empty",
        "other",
        "version_1",
        "version_4",
        "big_endian",
        "tensor_count",
        "key_count",
        "value_type",
        "key_length",
        "array_length",
        "tensor_type",
        "row_not_of_blocks",
        "empty_tensor",
    ],
)
def test_a_file_that_is_not_a_sound_gguf_is_refused(tmp_path: Path, content: bytes, problem: str):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        open_gguf(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert problem in str(caught.value)


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path):
    with pytest.raises(ModelError, match=r"absent\.gguf: cannot be opened: No such file"):
        open_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="cannot be opened: Is a directory"):
        open_gguf(tmp_path)


def test_a_type_that_cannot_be_dequantised_is_refused_by_tensor_and_type(tmp_path: Path):
    path = write(tmp_path / "i32.gguf", {"w": (np.zeros((4, 8), np.int32), Kind.I32)})
    file = open_gguf(path)
    with pytest.raises(ModelError, match="tensor w has type I32"):
        list(file.blocks(file.tensors["w"]))
