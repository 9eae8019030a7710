"""Compile the TPU kernels for chips that are not here, and print what the compiler made of them.

  python scripts kernels
  python scripts kernels --target v6e --json
  python scripts kernels --target v5e --shape decode-bf16-h32-k8-d128-p16 --shape prefill-...

A shape's name is step (decode, mixed, prefill), type of K and V (bf16, f32, or codes with
parameters: int8, e4m3, e5m2, int4), H, K, D, P, and a window perhaps (-w1024). Beside ours,
`mosaic_tpu`, stands JAX's own kernel, `jax_rpa`.

  bundles  of the inner loop, a token of K and V of all heads: cycles, while memory keeps up
  HBM      cycles in which the chip's memory delivers that token
  binds    which of the two is more
  MXU      share of the inner loop's bundles with work for a matrix unit
  outside  bundles outside the inner loop, once each: a tile of queries, and the call
  spills   instructions that spill or fill a vector register
  VMEM     MiB of the core's fast memory that the kernel takes
  in place bytes of the pool that the step updates in place, and of the pool
"""

import json
from collections.abc import Iterator

from scripts import console

HEAD = (
    *("kernel", "target", "shape", "bundles", "HBM", "binds", "MXU", "outside", "spills"),
    *("VMEM", "in place, MiB"),
)


def main(argv: list[str]) -> int:
    """Prints a row for each kernel, target and shape."""
    from pallas_kernels.targets import TPU_TARGETS, TargetUnavailable
    from pallas_kernels.targets.cases import KERNELS, NAMES, Shape

    parser = console.Parser("kernels", __doc__)
    add = parser.add_argument
    add("--target", action="append", choices=TPU_TARGETS, help="may be repeated; default: all")
    add("--kernel", action="append", choices=KERNELS, help="may be repeated; default: both")
    add(
        "--shape",
        action="append",
        metavar="NAME",
        help=f"may be repeated; default: {', '.join(NAMES)}",
    )
    add("--json", action="store_true", help="a JSON list of rows, raw numbers")
    args = parser.parse_args(argv)
    shapes = args.shape or NAMES
    for name in shapes:
        try:
            Shape.parse(name)
        except ValueError as error:
            parser.error(str(error))
    cases = [(kernel, shape) for shape in shapes for kernel in args.kernel or KERNELS]
    rows = _rows(args.target or list(TPU_TARGETS), cases)
    try:
        if args.json:
            print(json.dumps(list(rows), indent=1))
        else:
            _print_table(rows)
    except TargetUnavailable as error:
        parser.error(str(error))
    return 0


def _rows(targets: list[str], cases: list[tuple[str, str]]) -> Iterator[dict]:
    from pallas_kernels.targets.probe import probe

    total = len(targets) * len(cases)
    with console.progress(total, unit="kernel", description="compiling") as bar:
        for target in targets:
            for row in probe(target, cases):
                bar.update()
                yield row._asdict()


def _print_table(rows: Iterator[dict]) -> None:
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for row in rows:
        cells = [row["kernel"], row["target"], row["shape"]]
        if row["ok"]:
            cells += [
                f"{row['bundles_per_kv_token']:.2f}",
                f"{row['hbm_cycles_per_kv_token']:.2f}",
                row["binds"],
                f"{row['mxu_share']:.0%}",
                f"{row['tile_bundles']}",
                f"{row['spill_slots']}",
                f"{row['vmem_bytes'] / 2**20:.1f}",
                f"{row['alias_bytes'] / 2**20:.0f} of {row['pool_bytes'] / 2**20:.0f}",
            ]
        else:
            cells += [row["reason"].replace("|", "/"), *[""] * (len(HEAD) - len(cells) - 1)]
        print(f"| {' | '.join(cells)} |", flush=True)
