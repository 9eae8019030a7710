"""The GPU kernels under the compiler of real GPUs, none of which need be here."""

import itertools
from pathlib import Path

import pytest

from pallas_kernels.targets import TargetUnavailable
from pallas_kernels.targets.cases import NAMES, Shape
from pallas_kernels.targets.gpu import environment, find_compiler
from pallas_kernels.targets.gpu_probe import GpuRow, probe_gpu
from pallas_kernels.targets.sass import read_kernels

needs_compiler = pytest.mark.skipif(
    find_compiler() is None, reason="JAX's CUDA plugin, which compiles for GPUs, is absent"
)
DECODE, PREFILL = "decode-bf16-h32-k8-d128-p16", "prefill-bf16-h32-k8-d128-p16"
HOPPER = ("h100", "h200")
REFUSED = {
    "f32": "pages of float32",
    "int4": "AffinePages are not read yet",
    "d80": "D = 80 is none of",
    "d96": "D = 96 is none of",
}


# Every D with every type and two kinds of steps, and with them all kinds of P and G in turn.
SIZES = zip(
    [
        f"{step}-{dtype}"
        for dtype in ("bf16", "f16", "int8", "e4m3", "e5m2")
        for step in ("decode", "prefill")
        for _ in range(4)
    ],
    itertools.cycle((64, 128, 192, 256)),
    itertools.cycle([(1, 3), (3, 2), (5, 1), (6, 1), (7, 1), (8, 2), (12, 1), (16, 1), (71, 1)]),
    itertools.cycle([8, 16, 24, 64, 128, 256, 72]),
    strict=False,
)
SIZE_NAMES = [f"{begin}-h{G * K}-k{K}-d{D}-p{P}" for begin, D, (G, K), P in SIZES]


def check(row: GpuRow) -> None:
    refused = [reason for mark, reason in REFUSED.items() if mark in row.shape.split("-")]
    if refused:
        assert not row.ok
        assert row.reason is not None and refused[0] in row.reason
        return
    assert row.ok, row
    assert row.spill_bytes == 0
    # Tiles of many rows of the largest heads leave room for two.
    few = "prefill" in row.shape and "-d256-" in row.shape
    assert row.stages is not None and row.stages >= (2 if few else 3)
    assert row.shared_bytes is not None and row.shared_bytes <= 227 << 10
    # Each byte of a page is fetched once per tile of query rows, only by bulk copies.
    assert row.loaded_bytes_per_kv_token == row.token_bytes == Shape.parse(row.shape).token_bytes
    assert row.alias_bytes is not None and row.pool_bytes is not None
    assert row.alias_bytes == row.pool_bytes


@needs_compiler
def test_steps_compile_in_place_without_spills_and_fetch_each_byte_once():
    decode, prefill = probe_gpu("h200", [("mosaic_gpu", DECODE), ("mosaic_gpu", PREFILL)])
    check(decode)
    check(prefill)
    # Two blocks of threads a processor: while one waits, the other computes.
    assert decode.blocks_a_processor is not None and decode.blocks_a_processor >= 2


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("target", HOPPER)
def test_every_named_shape_compiles_or_is_refused(target):
    for row in probe_gpu(target, [("mosaic_gpu", name) for name in NAMES]):
        check(row)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_head_dim_and_type_compiles_at_pages_and_groups_of_all_sizes(part):
    for row in probe_gpu("h200", [("mosaic_gpu", name) for name in SIZE_NAMES[part::4]]):
        check(row)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("target", "has"), [("a100", "8.0"), ("b200", "10.0")])
def test_a_gpu_without_the_instructions_is_refused_every_named_shape(target, has):
    for row in probe_gpu(target, [("mosaic_gpu", name) for name in NAMES]):
        assert not row.ok
        assert row.reason is not None and row.reason.endswith(f"this GPU has {has}")


@needs_compiler
@pytest.mark.slow
def test_steps_compile_in_a_program_that_turns_64_bit_types_on(monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    for row in probe_gpu("h200", [("mosaic_gpu", DECODE), ("mosaic_gpu", PREFILL)]):
        check(row)


@needs_compiler
@pytest.mark.parametrize(("target", "has"), [("a100", "8.0"), ("b200", "10.0")])
def test_a_gpu_without_the_instructions_is_refused_with_the_reason(target, has):
    (row,) = probe_gpu(target, [("mosaic_gpu", DECODE)])
    assert not row.ok
    assert row.reason is not None and row.reason.endswith(f"this GPU has {has}")


@needs_compiler
def test_without_a_disassembler_the_target_is_unavailable_with_a_line(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_ROOT", str(tmp_path))
    with pytest.raises(TargetUnavailable, match="the package nvidia-cuda-nvdisasm has it"):
        environment()


def test_loops_copies_and_registers_are_read_from_a_dump(tmp_path: Path):
    (tmp_path / "walk_3.ptxas").write_text(
        "    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 102 registers, used 16 barriers, 1 bytes smem\n"
    )
    (tmp_path / "walk_3.resources.txt").write_text("Resources(smem_scratch_bytes=2048, ...)")
    copy = (
        '"mosaic_gpu.async_load"(%%1) <{slice_lengths = array<i64: -1, %s>}> : '
        "(memref<9x8x8x%s>, memref<8x128xbf16, strided<[128, 1]>>)\n"
    )
    copies = [("8, 128", "bf16"), ("16, 64", "i8"), ("16", "f32")]
    (tmp_path / "walk_3.before_layout_inference.txt").write_text(
        "".join(copy % one for one in copies)
    )
    line = "   -:-:-:Y:01        /*0{:03x}*/          {} \n"
    body = [
        *("MOV R1, R2", ".L_x_1:", "UTMALDG.5D [UR32]", ".L_x_2:", "@UP6 UTMALDG.5D [UR32]"),
        *("UTMALDG.3D [UR8]", "@P1 BRA `(.L_x_2)", "FFMA R1", "@!P0 BRA `(.L_x_1)"),
        *("HGMMA.64x8x16 R2", "BRA `(.L_x_2)"),
    ]
    (tmp_path / "walk_3.sass_ctrl").write_text(
        "".join(x + "\n" if x.startswith(".") else line.format(i, x) for i, x in enumerate(body))
    )
    (kernel,) = read_kernels(tmp_path, "walk")
    assert (kernel.registers, kernel.spill_bytes, kernel.shared_bytes) == (102, 4, 2048)
    assert kernel.copies == (8 * 128 * 2, 16 * 64, 16 * 4)
    assert [loop.names["UTMALDG"] for loop in kernel.loops] == [2, 3]
    assert kernel.innermost("FFMA").count("UTMALDG", "FFMA") == 4
    assert kernel.block_bytes == 16 * 64 + 16 * 4


def test_programs_are_matched_with_machine_code_by_their_products(tmp_path: Path):
    """Whatever their numbers: those of one are in another order than those of the other."""
    for number, (code, program) in enumerate([(48, 8), (8, 48)]):
        (tmp_path / f"walk_{number}.ptxas").write_text(
            f"0 bytes spill stores\nUsed {2 * code} registers\n"
        )
        (tmp_path / f"walk_{number}.sass_ctrl").write_text(
            f"        /*0010*/          HGMMA.64x{code}x16.F32.BF16 R24, gdesc[UR52] \n"
        )
        (tmp_path / f"walk_{number}.resources.txt").write_text(f"smem_scratch_bytes={program}")
        ring = f"memref<2x{program // 4}x64x128xbf16, #gpu.address_space<workgroup>>"
        (tmp_path / f"walk_{number}.before_layout_inference.txt").write_text(
            f"%1 = mosaic_gpu.wgmma accumulator(%0 : vector<64x{program}xf32>) b({ring})"
        )
    kernels = read_kernels(tmp_path, "walk")
    found = [(kernel.registers, kernel.shared_bytes, kernel.stages) for kernel in kernels]
    assert found == [(16, 8, 2), (96, 48, 12)]
