"""Compile the kernels for chips that are not here, and print what the compiler made of them.

  jaxkv kernels
  jaxkv kernels --target v6e --json
  jaxkv kernels --target h200 --shape decode-bf16-h32-k8-d128-p16 --shape prefill-...

A target is a TPU or an NVIDIA GPU. A shape's name is step (decode, mixed, prefill), type of K and V
(bf16, f16, f32, or codes with parameters: int8, e4m3, e5m2, int4), H, K, D, P, and a window perhaps
(-w1024). For TPUs the table has JAX's own kernel, `jax_rpa`, next to ours.

TPUs
  bundles   of the inner loop, a token of K and V of all heads: cycles, while memory keeps up
  HBM       cycles in which the chip's memory delivers that token
  binds     which of the two is more
  MXU       share of the inner loop's bundles with work for a matrix unit
  outside   bundles outside the inner loop, once each: a tile of queries, and the call
  spills    instructions that spill or fill a vector register
  VMEM      MiB of the core's fast memory that the kernel takes

GPUs: of the loops over blocks of keys of one KV head
  registers of a thread, and the bytes that it spills
  shared    KiB of shared memory a block of threads, and how many of them a processor holds
  stages    blocks of keys that are in shared memory, or on their way there
  loaded    bytes that are fetched a token of K and V, and what it has in the pages
  TMA       asynchronous copies of a block of keys
  wgmma     products of matrices; then FMA and the like, exponentials, shuffles, barriers, and all
            instructions of the loop

Both
  in place  bytes of the pool that the step updates in place, and of the pool
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxkv.cli import console
from jaxkv.errors import UsageError

Cells = Callable[[dict[str, Any]], list[str]]
KIND = ("kernel", "target", "shape")
TPU_HEAD = ("bundles", "HBM", "binds", "MXU", "outside", "spills", "VMEM", "in place, MiB")
GPU_HEAD = (
    *("registers", "shared, KiB", "stages", "loaded", "TMA", "wgmma", "FMA", "exp", "shuffles"),
    *("barriers", "all", "in place, MiB"),
)


@dataclass(frozen=True, kw_only=True)
class KernelsOptions:
    """The command line; None takes the default."""

    target: list[str] | None
    kernel: list[str] | None
    shape: list[str] | None
    json: bool


def main(argv: list[str]) -> int:
    """Prints a row for each kernel, target and shape."""
    from pallas_kernels.targets import GPU_TARGETS, TPU_TARGETS, TargetUnavailable
    from pallas_kernels.targets.cases import GPU_KERNELS, KERNELS, NAMES, TPU_KERNELS
    from pallas_kernels.targets.gpu_probe import probe_gpu
    from pallas_kernels.targets.probe import probe

    options = _parse(argv)
    shapes, targets = options.shape or NAMES, options.target or list(TPU_TARGETS)
    rows: list[dict[str, Any]] = []
    try:
        for targets_of, kernels_of, run, head, cells in (
            (TPU_TARGETS, TPU_KERNELS, probe, TPU_HEAD, _tpu_cells),
            (GPU_TARGETS, GPU_KERNELS, probe_gpu, GPU_HEAD, _gpu_cells),
        ):
            chosen = [target for target in targets if target in targets_of]
            kernels = [kernel for kernel in options.kernel or KERNELS if kernel in kernels_of]
            cases = [(kernel, shape) for shape in shapes for kernel in kernels]
            found = _rows(run, chosen, cases)
            if options.json:
                rows += found
            elif chosen and cases:
                _print_table(found, (*KIND, *head), cells)
    except TargetUnavailable as error:
        raise UsageError(str(error)) from None
    if options.json:
        print(json.dumps(rows, indent=1))
    return 0


def _parse(argv: list[str]) -> KernelsOptions:
    from pallas_kernels.targets import GPU_TARGETS, TPU_TARGETS
    from pallas_kernels.targets.cases import GPU_KERNELS, KERNELS, NAMES, TPU_KERNELS, Shape

    parser = console.Parser("jaxkv kernels", __doc__)
    add = parser.add_argument
    add("--target", action="append", choices=TPU_TARGETS | GPU_TARGETS,
        help="a chip; may be repeated (default: every TPU)")  # fmt: skip
    add("--kernel", action="append", choices=KERNELS, help="may be repeated (default: all)")
    add("--shape", action="append", metavar="NAME",
        help=f"may be repeated (default: {', '.join(NAMES)})")  # fmt: skip
    add("--json", action="store_true", help="a JSON list of rows, raw numbers")
    options = parser.read(KernelsOptions, argv)
    for name in options.shape or ():
        try:
            Shape.parse(name)
        except ValueError as error:
            parser.error(str(error))
    for target in options.target or list(TPU_TARGETS):
        kernels_of = TPU_KERNELS if target in TPU_TARGETS else GPU_KERNELS
        if options.kernel and not set(options.kernel) & set(kernels_of):
            asked, named = ", ".join(options.kernel), ", ".join(kernels_of)
            parser.error(f"{target} has no kernel {asked}: there are {named}")
    return options


def _rows(
    run: Callable[[str, list[tuple[str, str]]], Iterator[Any]],
    targets: list[str],
    cases: list[tuple[str, str]],
) -> Iterator[dict[str, Any]]:
    total = len(targets) * len(cases)
    with console.progress(total, unit="kernel", description="compiling") as bar:
        for target in targets:
            for row in run(target, cases):
                bar.update()
                yield row._asdict()


def _print_table(rows: Iterator[dict[str, Any]], head: tuple[str, ...], cells: Cells) -> None:
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        shown = [row[name] for name in KIND]
        if row["ok"]:
            shown += cells(row)
        else:
            shown += [row["reason"].replace("|", "/"), *[""] * (len(head) - len(KIND) - 1)]
        print(f"| {' | '.join(shown)} |", flush=True)


def _tpu_cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['bundles_per_kv_token']:.2f}",
        f"{row['hbm_cycles_per_kv_token']:.2f}",
        row["binds"],
        f"{row['mxu_share']:.0%}",
        f"{row['tile_bundles']}",
        f"{row['spill_slots']}",
        f"{row['vmem_bytes'] / 2**20:.1f}",
        _in_place(row),
    ]


def _gpu_cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['registers']}, {row['spill_bytes']} spilt",
        f"{row['shared_bytes'] / 1024:.0f}, {row['blocks_a_processor']} blocks",
        f"{row['stages']}",
        f"{row['loaded_bytes_per_kv_token']:.0f} of {row['token_bytes']}",
        *(f"{row[name]}" for name in ("tma", "products", "arithmetic", "exponentials")),
        *(f"{row[name]}" for name in ("shuffles", "barriers", "instructions")),
        _in_place(row),
    ]


def _in_place(row: dict[str, Any]) -> str:
    return f"{row['alias_bytes'] / 2**20:.0f} of {row['pool_bytes'] / 2**20:.0f}"
