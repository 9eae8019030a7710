"""Compiles cases for a GPU in a separate process, and reports what the compiler made of them.

JAX looks for plugins, and the compiler for the folder of its dumps, once per process. Run as a
module, this one takes a target, a folder and pairs `kernel/shape`, and prints one JSON object per
line.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from pallas_kernels.targets.gpu import GPU_TARGETS, GpuTarget, environment
from pallas_kernels.targets.probe import compile_case, rows_apart
from pallas_kernels.targets.sass import DUMPS, read_kernels


class GpuRow(NamedTuple):
    """The figures of a kernel on a shape for a GPU; None if it does not compile.

    Instructions are counted in the inner loops, for a block of keys of one KV head: copies in the
    loop that fetches, all others in the loop that computes. Instructions that only a block at an
    edge executes are included.

    Attributes:
      ok: it compiles.
      reason: why it does not, in one line.
      registers: registers of a thread.
      spill_bytes: bytes of registers that a thread stores in memory.
      shared_bytes: bytes of shared memory of a block of threads.
      blocks_a_processor: blocks of threads that a processor holds at once, by registers and shared
        memory.
      stages: blocks of keys that are in shared memory or being copied there.
      loaded_bytes_per_kv_token: bytes that the loop that fetches copies per token, for all heads.
      token_bytes: bytes of K and V of a token in the pages.
      tma: asynchronous copies of a block of keys.
      products: wgmma instructions.
      arithmetic: FMA, multiplications and additions of float32.
      exponentials, shuffles, barriers: instructions of those kinds.
      instructions: all instructions of the loop that computes.
      alias_bytes, pool_bytes, temp_bytes: see `probe.Row`.
    """

    kernel: str
    target: str
    shape: str
    ok: bool
    reason: str | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    blocks_a_processor: int | None = None
    stages: int | None = None
    loaded_bytes_per_kv_token: float | None = None
    token_bytes: int | None = None
    tma: int | None = None
    products: int | None = None
    arithmetic: int | None = None
    exponentials: int | None = None
    shuffles: int | None = None
    barriers: int | None = None
    instructions: int | None = None
    alias_bytes: int | None = None
    pool_bytes: int | None = None
    temp_bytes: int | None = None


def probe_gpu(target: str, cases: Sequence[tuple[str, str]]) -> Iterator[GpuRow]:
    """Compiles (kernel, shape) pairs for a target; yields one row for each, in order.

    Raises:
      TargetUnavailable: the CUDA plugin is not installed.
      RuntimeError: the process ended early.
    """
    for row in rows_apart(__name__, target, cases, environment() | DUMPS):
        yield GpuRow(**row)


def measure(target: GpuTarget, kernel: str, name: str, folder: Path) -> GpuRow:
    """Compiles one case in this process, with dumps in `folder`, which is emptied."""
    from pallas_kernels.attention.mosaic_gpu.walk import THREADS

    jax.clear_caches()  # cached programs would not be dumped again
    built = compile_case(target, kernel, name, folder)
    if isinstance(built, str):
        return GpuRow(kernel, target.name, name, ok=False, reason=built)
    shape, case, compiled = built
    # A step with sequences of both kinds has two kernels; the one with larger tiles is reported.
    found = max(read_kernels(folder, "ragged_paged_attention"), key=lambda one: one.registers)
    memory, inner = compiled.memory_analysis(), found.innermost("HGMMA")
    return GpuRow(
        kernel,
        target.name,
        name,
        ok=True,
        registers=found.registers,
        spill_bytes=found.spill_bytes,
        shared_bytes=found.shared_bytes,
        blocks_a_processor=min(
            (1 << 16) // (found.registers * THREADS), target.shared // (found.shared_bytes + 1024)
        ),
        stages=found.stages,
        loaded_bytes_per_kv_token=found.block_bytes * shape.K / case.block_tokens,
        token_bytes=shape.token_bytes,
        tma=found.innermost("UTMALDG").count("UTMALDG"),
        products=inner.count("HGMMA"),
        arithmetic=inner.count("FFMA", "FMUL", "FADD", "FMNMX"),
        exponentials=inner.count("MUFU"),
        shuffles=inner.count("SHFL"),
        barriers=inner.count("BAR"),
        instructions=sum(inner.names.values()),
        alias_bytes=memory.alias_size_in_bytes,
        pool_bytes=case.pool_bytes,
        temp_bytes=memory.temp_size_in_bytes,
    )


def _main(target: str, folder: str, *cases: str) -> None:
    for case in cases:
        kernel, _, shape = case.partition("/")
        row = measure(GPU_TARGETS[target], kernel, shape, Path(folder))
        print(json.dumps(row._asdict()), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
