"""Compiles cases for a TPU in a separate process, and reports what the compiler made of them.

libtpu reads its flags when it is loaded, and dumps into one folder per process. Run as a module,
this one takes a target, a folder and pairs `kernel/shape`, and prints one JSON object per line.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pallas_kernels.targets.schedule import DUMP_FLAGS, read_schedule
from pallas_kernels.targets.target import Target, TargetUnavailable
from pallas_kernels.targets.tpu import TPU_TARGETS, TpuTarget

if TYPE_CHECKING:
    from pallas_kernels.targets.cases import Case, Shape

_COPY = re.compile(r" = \(?(\w+\[[\d,]*\]).* copy(?:-start)?\(%")
_HLO_TYPES = {"bfloat": "bf", "float": "f", "uint": "u", "int": "s", "_": ""}
_CALL = re.compile(r"\s*(?:ROOT )?%?ragged_paged_attention")


class Row(NamedTuple):
    """The figures of a kernel on a shape for a TPU; None if it does not compile.

    Attributes:
      ok: it compiles.
      reason: why it does not, in one line.
      bundles_per_kv_token: bundles of the inner loop per token of K and V, for all heads. They are
        the cycles that the token costs.
      hbm_cycles_per_kv_token: cycles in which HBM delivers the token's bytes.
      binds: the larger of the two: `compute` or `memory`.
      mxu_share: share of the inner loop's bundles that use a matrix unit.
      tile_bundles: bundles outside of that loop, each counted once: the other costs of a tile of
        queries and of the call.
      spill_slots: instructions that spill or fill a vector register.
      vmem_bytes: bytes of the core's fast memory that the kernel uses.
      alias_bytes: bytes of the pool that the step updates in place.
      pool_bytes: bytes of the pool.
      temp_bytes: bytes of other memory that the program uses.
      copied_bytes: bytes of the pool's arrays that the program copies whole, found by type and
        shape.
    """

    kernel: str
    target: str
    shape: str
    ok: bool
    reason: str | None = None
    bundles_per_kv_token: float | None = None
    hbm_cycles_per_kv_token: float | None = None
    binds: str | None = None
    mxu_share: float | None = None
    tile_bundles: int | None = None
    spill_slots: int | None = None
    vmem_bytes: int | None = None
    alias_bytes: int | None = None
    pool_bytes: int | None = None
    temp_bytes: int | None = None
    copied_bytes: int | None = None


def probe(target: str, cases: Sequence[tuple[str, str]]) -> Iterator[Row]:
    """Compiles (kernel, shape) pairs for a target; yields one row for each, in order.

    Raises:
      TargetUnavailable: libtpu is not installed.
      RuntimeError: the process ended early.
    """
    for row in rows_apart(__name__, target, cases, {"LIBTPU_INIT_ARGS": DUMP_FLAGS}):
        yield Row(**row)


def rows_apart(
    module: str, target: str, cases: Sequence[tuple[str, str]], environment: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Runs a module in a separate process on cases, and yields the JSON objects that it prints.

    Args:
      module: name of the module; its arguments are the target, a folder for dumps, and the cases.
      target: name of the target.
      cases: pairs of kernel and shape.
      environment: additional variables of the process; `{folder}` stands for the folder.

    Raises:
      TargetUnavailable: the target's compiler is not installed.
      RuntimeError: the process ended early.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as complaints:
        filled = {name: value.format(folder=folder) for name, value in environment.items()}
        names = ["/".join(case) for case in cases]
        command = [sys.executable, "-m", module, target, folder, *names]
        with subprocess.Popen(
            command,
            env=os.environ | {"JAX_PLATFORMS": "cpu"} | filled,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    row = json.loads(line)
                    if "unavailable" in row:
                        raise TargetUnavailable(row["unavailable"])
                    yield row
                if process.wait():
                    complaints.seek(0)
                    raise RuntimeError(f"compiling for {target} ended with: {complaints.read()}")
            finally:
                process.kill()


def measure(target: TpuTarget, kernel: str, name: str, folder: Path) -> Row:
    """Compiles one case in this process, with dumps in `folder`, which is emptied."""
    built = compile_case(target, kernel, name, folder)
    if isinstance(built, str):
        return Row(kernel, target.name, name, ok=False, reason=built)
    shape, case, compiled = built
    # A step with sequences of both kinds has two kernels; the one with larger tiles is reported.
    schedules = read_schedule(folder, "ragged_paged_attention")
    schedule = max(schedules, key=lambda one: one.inner.mxu if one.inner else 0)
    memory, inner = compiled.memory_analysis(), schedule.inner
    assert inner is not None
    bundles = inner.bundles / case.block_tokens
    hbm = shape.token_bytes * target.clock_hz / target.info.mem_bw_bytes_per_second
    return Row(
        kernel,
        target.name,
        name,
        ok=True,
        bundles_per_kv_token=round(bundles, 3),
        hbm_cycles_per_kv_token=round(hbm, 3),
        binds="compute" if bundles > hbm else "memory",
        mxu_share=round(inner.mxu_bundles / inner.bundles, 3),
        tile_bundles=schedule.outside,
        spill_slots=schedule.spill_slots,
        vmem_bytes=_vmem_bytes(compiled.as_text()),
        alias_bytes=memory.alias_size_in_bytes,
        pool_bytes=case.pool_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        copied_bytes=_copied_bytes(compiled.as_text(), case.arguments[0]),
    )


def compile_case(
    target: Target, kernel: str, name: str, folder: Path
) -> "tuple[Shape, Case, Any] | str":
    """Compiles a named shape for a target, after emptying `folder`, which has the dumps.

    Returns:
      The shape, its case and the program; or one line that says why there is no program.

    Raises:
      TargetUnavailable: the compiler is not installed.
    """
    from pallas_kernels.targets.cases import KERNELS, Shape

    for path in folder.iterdir():
        path.unlink()
    shape = Shape.parse(name)
    try:
        with target.lowering():
            case = KERNELS[kernel](shape)
        donated = (0,) if case.donates else ()
        return shape, case, target.compile(case.function, case.arguments, donate_argnums=donated)
    except TargetUnavailable:
        raise
    except Exception as error:  # any error of a compiler is the reason
        return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def _copied_bytes(program: str, pool: Any) -> int:
    """Returns the bytes of copies that have the type and shape of an array of the pool."""
    import jax

    sizes = {}
    for array in jax.tree.leaves(pool):
        name, shape = array.dtype.name, ",".join(map(str, array.shape))
        for ours, theirs in _HLO_TYPES.items():
            name = name.replace(ours, theirs)
        sizes[f"{name}[{shape}]"] = array.size * array.dtype.itemsize
    return sum(sizes.get(copied, 0) for copied in _COPY.findall(program))


def _vmem_bytes(program: str) -> int | None:
    """Returns the most fast memory that a call of the kernel uses, from the compiled program."""
    calls = [line for line in program.splitlines() if _CALL.match(line)]
    taken = re.findall(r'"used_scoped_memory_configs":\[{[^}]*"size":"(\d+)"', "".join(calls))
    return max(map(int, taken), default=None)


def _main(target: str, folder: str, *cases: str) -> None:
    def show(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)

    for case in cases:
        kernel, _, shape = case.partition("/")
        try:
            show(measure(TPU_TARGETS[target], kernel, shape, Path(folder))._asdict())
        except TargetUnavailable as error:
            return show({"unavailable": str(error)})


if __name__ == "__main__":
    _main(*sys.argv[1:])
