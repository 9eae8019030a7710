"""The kernels under the compilers of real TPUs, none of which need be here."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from pallas_kernels.attention.mosaic_tpu.tuning import TABLES
from pallas_kernels.targets import TPU_TARGETS, find_compiler, read_schedule
from pallas_kernels.targets.cases import DTYPES, NAMES, Shape
from pallas_kernels.targets.probe import Row, probe
from tests.cli.test_console import run_scripts

needs_compiler = pytest.mark.skipif(
    find_compiler() is None, reason="libtpu, which compiles for TPUs, is absent"
)
DECODE = "decode-bf16-h32-k8-d128-p16"
MOST_BUNDLES = {"v4": 1.7, "v5e": 1.7, "v5p": 1.7, "v6e": 1.5, "7x": 1.5}


def check(row: Row) -> None:
    assert row.ok, row
    # The pool is updated in place; scales that fill no registers with their padding.
    assert row.alias_bytes is not None and row.pool_bytes is not None
    assert row.alias_bytes >= row.pool_bytes
    shape = Shape.parse(row.shape)
    if not shape.has_codes or 2 * shape.K * shape.P % 128 == 0:
        assert row.alias_bytes == row.pool_bytes
    # XLA brings rows that fill no registers into another layout at each step.
    if 2 * shape.D % 128 == 0:
        assert row.temp_bytes is not None and row.temp_bytes < row.pool_bytes / 4
        assert row.copied_bytes == 0
    assert row.vmem_bytes is not None and 0 < row.vmem_bytes < 128 << 20


@needs_compiler
@pytest.mark.parametrize("target", TPU_TARGETS)
def test_a_decode_step_compiles_in_place_and_stays_near_the_memory_roof(target):
    (row,) = probe(target, [("mosaic_tpu", DECODE)])
    check(row)
    assert row.bundles_per_kv_token is not None and row.spill_slots is not None
    assert row.bundles_per_kv_token <= MOST_BUNDLES[target]
    assert row.spill_slots <= 300
    assert row.binds == "memory"


@needs_compiler
@pytest.mark.parametrize(
    ("target", "codes"),
    [
        pytest.param(target, codes, marks=() if is_fast else pytest.mark.slow)
        for target in ("v6e", "v5e", "v5p", "7x")  # v4 converts codes
        for codes in ("int8", "e4m3", "e5m2")
        for is_fast in [(target, codes) == ("v6e", "e4m3")]
    ],
)
def test_a_decode_step_over_codes_stays_near_the_memory_roof(target, codes):
    (row,) = probe(target, [("mosaic_tpu", f"decode-{codes}-h32-k8-d128-p64")])
    check(row)
    assert row.bundles_per_kv_token is not None and row.spill_slots is not None
    assert row.bundles_per_kv_token <= 1.2
    assert row.spill_slots <= 300
    assert row.binds == "memory"


@needs_compiler
@pytest.mark.parametrize(
    ("target", "shape"),
    [
        ("v4", "prefill-bf16-h32-k32-d128-p16"),
        *(
            pytest.param(target, shape, marks=pytest.mark.slow)
            for target in TPU_TARGETS
            for shape in (
                "prefill-bf16-h32-k32-d128-p16",
                "prefill-f32-h16-k16-d256-p16",
                "prefill-int8-h32-k32-d128-p128",
                "prefill-int8-h32-k8-d128-p256",
                "prefill-int4-h32-k16-d256-p64",
            )
            if (target, shape) != ("v4", "prefill-bf16-h32-k32-d128-p16")
        ),
    ],
)
def test_many_and_large_heads_fit_into_the_memory_of_each_chip(target, shape):
    for row in probe(target, [("mosaic_tpu", shape)]):
        check(row)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("target", TPU_TARGETS)
def test_every_named_shape_compiles_in_place(target):
    for row in probe(target, [("mosaic_tpu", name) for name in NAMES]):
        check(row)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("table", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_every_row_of_a_table_of_block_sizes_compiles(table):
    steps = {"row": "decode", "rows": "prefill"}
    dtypes = {jnp.dtype(dtype).name: name for name, dtype in DTYPES.items()}
    rows = json.loads(table.read_text())
    names = [f"{steps[row['tile']]}-{dtypes[row['dtype']]}-h32-k8-d128-p16" for row in rows]
    assert len(set(names)) == len(names) > 0
    for row in probe(table.stem, [("mosaic_tpu", name) for name in names]):
        check(row)


@needs_compiler
def test_what_does_not_compile_has_a_row_with_the_reason():
    (row,) = probe("v6e", [("jax_rpa", "decode-int8-h32-k8-d128-p64")])
    assert (row.ok, row.reason) == (False, "it takes no pages of codes")


@pytest.mark.parametrize("name", NAMES)
def test_a_shape_is_read_from_its_name(name):
    shape = Shape.parse(name)
    assert shape.name == name
    assert shape.H % shape.K == 0


@pytest.mark.parametrize("name", ["", "decode", "decode-bf16-h32-k8-d128", DECODE + "-x1"])
def test_what_is_no_name_of_a_shape_is_refused(name):
    with pytest.raises(ValueError, match="no shape is named"):
        Shape.parse(name)


@pytest.mark.parametrize(
    ("end", "reason"), [("p16-w0", "a window is above 0"), ("p999999", "P is")]
)
def test_a_shape_that_cannot_be_is_refused_with_the_reason(end, reason):
    with pytest.raises(ValueError, match=reason):
        Shape.parse(f"decode-bf16-h32-k8-d128-{end}")


def write_dump(folder: Path, bundles: list[tuple[str, str, int]]) -> None:
    """Bundles as (tag, marks of depth, products)."""
    lines = [
        f"  {i:#x} {tag:2} : {marks} {{ %v1 = thing }}" if marks != "?" else f"  {i:#x}  :  {{}}"
        for i, (tag, marks, _) in enumerate(bundles)
    ]
    table = ["2 2 4 2 1 3 3 2 2 2"]  # the units that there are
    table += [f"{mxu} 0 1 0 0 1 {i % 2} 0 1 2" for i, (_, _, mxu) in enumerate(bundles)]
    (folder / "1-kernel.1-72-final_bundles.txt").write_text("\n".join(lines) + "\n")
    (folder / "1-kernel.1-70-final_hlo-static-per-bundle-utilization.txt").write_text(
        "\n".join(table) + "\n"
    )


def test_the_inner_loop_is_the_shortest_of_those_that_do_the_products(tmp_path):
    outer, inner = ">", ">>"
    write_dump(tmp_path, [
        ("", "", 0),
        ("LB", outer, 0),
        *[("LB", inner, 2), ("", inner, 2), ("", "?", 0), ("", inner, 2), ("", inner, 0)],  # masked
        *[("LB", inner, 2), ("", inner, 2), ("PF", inner, 2)],  # whole blocks
        ("PF", outer, 1),
        *[("LB", inner, 0)],  # copies only
        ("", outer, 0),
    ])  # fmt: skip
    (schedule,) = read_schedule(tmp_path, "kernel")
    assert schedule.inner is not None
    assert (schedule.inner.bundles, schedule.inner.mxu, schedule.inner.mxu_bundles) == (3, 6, 3)
    assert (schedule.bundles, schedule.outside) == (13, 13 - 5 - 3)
    assert schedule.spill_slots == 13 + 6


def test_the_command_names_what_it_does_not_know():
    result = run_scripts("kernels", "--shape", "decode-bf16")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "no shape is named 'decode-bf16'" in result.stderr
