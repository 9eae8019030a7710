"""The schedule of a kernel for a TPU, read from the compiler's dump.

A TPU core issues one bundle of instructions per cycle, in order. So the bundles of a loop's body
are its cycles as long as memory keeps up. Stalls are not included: the figure is a lower bound, the
same in every run.

A dump has one line per bundle. The number of `>` is the depth of loops; LB is the first bundle of a
loop's body:

    0x40 LB: > { %s1 = sld [smem:...]  ;;  %v2 = vld [vmem:...] }
"""

import re
from dataclasses import dataclass
from pathlib import Path

DUMP_FLAGS = "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
_BUNDLE = re.compile(r"\s*(?:0x)?[0-9a-f]+\s*([A-Z]{2})?\s*:\s*(>*)\s*\{(.*)")
# The units of a row of the utilization table, which has a bundle's instructions by unit.
_UNITS = ("mxu", "xlu", "valu", "pop", "eup", "load", "fill", "store", "spill", "scalar")


@dataclass(frozen=True)
class Loop:
    """A loop's body.

    Attributes:
      start: its first bundle.
      bundles: bundles of the body; those of inner loops are counted once.
      mxu: instructions for the matrix units.
      mxu_bundles: bundles that have such an instruction.
    """

    start: int
    bundles: int
    mxu: int
    mxu_bundles: int

    def holds(self, other: "Loop") -> bool:
        """Returns whether the other loop is inside this one."""
        inside = range(self.start, self.start + self.bundles)
        return other is not self and other.start in inside


@dataclass(frozen=True)
class Schedule:
    """The schedule of a kernel.

    Attributes:
      loops: the loops, in the order of the program.
      bundles: bundles of the whole program, each counted once.
      spill_slots: instructions that spill or fill a vector register.
    """

    loops: tuple[Loop, ...]
    bundles: int
    spill_slots: int

    @property
    def working(self) -> list[Loop]:
        """The innermost loops that have matrix products."""
        with_products = [loop for loop in self.loops if loop.mxu]
        return [loop for loop in with_products if not any(map(loop.holds, with_products))]

    @property
    def outside(self) -> int:
        """Bundles outside of the working loops, each counted once."""
        return self.bundles - sum(loop.bundles for loop in self.working)

    @property
    def inner(self) -> Loop | None:
        """The working loop that is expected to make most trips; None if there are no products.

        It is the shortest of the loops that have at least half of the products of any other.
        """
        most = max((loop.mxu for loop in self.working), default=0)
        bulky = [loop for loop in self.working if 2 * loop.mxu >= most]
        return min(bulky, key=lambda loop: loop.bundles, default=None)


def read_schedule(folder: Path, kernel: str) -> list[Schedule]:
    """Reads the programs of a dump whose name contains `kernel`, in the order of compilation.

    Args:
      folder: folder of the dump (DUMP_FLAGS in LIBTPU_INIT_ARGS, before libtpu is loaded).
      kernel: the `name` of the pallas_call.
    """
    finals = [
        path
        for path in sorted(folder.glob(f"*{kernel}*-final_bundles.txt"))
        if "schedule-analysis" not in path.name
    ]
    return [_read(path) for path in finals]


def _read(path: Path) -> Schedule:
    stem = re.sub(r"\d+-final_bundles\.txt$", "", path.name)
    (table,) = path.parent.glob(f"{stem}*-final_hlo-static-per-bundle-utilization.txt")
    units = [_row(line) for line in table.read_text().splitlines() if re.match(r"[\d\s]+$", line)]
    used = [dict(zip(_UNITS, row, strict=True)) for row in units if len(row) == len(_UNITS)][1:]
    depths, begins = _bundles(path)
    if len(used) != len(depths):
        raise ValueError(f"{path}: {len(depths)} bundles, {len(used)} rows of their use")
    loops = []
    for start in begins:
        depth = depths[start]
        end = next((i for i in range(start + 1, len(depths)) if _ends(i, depth, depths, begins)), 0)
        body = used[start : end or len(depths)]
        mxu = [row["mxu"] for row in body]
        loops.append(Loop(start, len(body), sum(mxu), sum(n > 0 for n in mxu)))
    return Schedule(
        loops=tuple(loops),
        bundles=len(depths),
        spill_slots=sum(row["fill"] + row["spill"] for row in used),
    )


def _ends(i: int, depth: int, depths: list[int], begins: list[int]) -> bool:
    """Returns whether a loop of a depth has ended before bundle i."""
    return depths[i] < depth or (depths[i] == depth and i in begins)


def _row(line: str) -> list[int]:
    return [int(number) for number in line.split()]


def _bundles(path: Path) -> tuple[list[int], list[int]]:
    """Returns the depth of each bundle, and the bundles that begin a loop's body."""
    depths: list[int] = []
    begins: list[int] = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if found := _BUNDLE.match(line):
                tag, marks, content = found.groups()
                if tag == "LB":
                    begins.append(len(depths))
                # An empty bundle may have no marks: it is in the loop of the one before it.
                waits = not marks and content.startswith("}") and depths
                depths.append(depths[-1] if waits else len(marks))
    return depths, begins
