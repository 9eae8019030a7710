"""The machine code of a kernel for a GPU, read from the compiler's dump.

The environment variables DUMPS turn dumps on; `{folder}` stands for their folder. For a kernel it
then has the files

    NAME_0.ptxas                          registers and spills
    NAME_0.resources.txt                  shared memory
    NAME_0.sass_ctrl                      machine code
    NAME_0.before_layout_inference.txt    the kernel before it was lowered: here a copy still has
                                          its size

The first and the third are numbered in the order in which machine code was made, the others in that
of the program. If a step has several kernels of a name, the width of their products says which
files belong together.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

DUMPS = {
    "MOSAIC_GPU_DUMP_TO": "{folder}",
    "MOSAIC_GPU_DUMP_SASS": "1",
    "MOSAIC_GPU_DUMP_PTXAS": "1",
}
_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z0-9_]+)\S*(.*)")
_COPY = re.compile(r'"mosaic_gpu\.async_load".*slice_lengths = array<i64: ([-\d, ]+)>')
_BITS = re.compile(r"memref<[\dx]+x(\w+)>, memref")
_PRODUCT_OF_CODE = re.compile(r"HGMMA\.64x(\d+)x")
_PRODUCT_OF_PROGRAM = re.compile(r"mosaic_gpu\.wgmma accumulator\(%\w+ : vector<64x(\d+)x")
# The rings of blocks of keys: [2, stages, keys, D], or one number per key in place of D.
_RING = re.compile(r"memref<2x(\d+)x\d+x\d+x\w+, #gpu\.address_space<workgroup>>")
_TYPE_BITS = {"bf16": 16, "f16": 16, "f32": 32, "i8": 8, "f8E4M3FN": 8, "f8E5M2": 8}


@dataclass(frozen=True)
class Loop:
    """The instructions of a loop and of its inner loops, by name without modifiers."""

    names: Counter[str]
    start: int
    end: int

    def count(self, *names: str) -> int:
        """Returns the number of instructions of some names."""
        return sum(self.names[name] for name in names)


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes:
      registers: registers of a thread.
      spill_bytes: bytes of registers that a thread stores in memory.
      shared_bytes: bytes of shared memory of a block of threads.
      loops: the loops, innermost first.
      stages: blocks of keys that fit into shared memory at once; 0 if it holds none.
      copies: bytes of pages that each asynchronous copy brings into shared memory, in the order of
        the program; 0 for copies of other arrays.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    loops: tuple[Loop, ...]
    stages: int
    copies: tuple[int, ...]

    def innermost(self, name: str) -> Loop:
        """Returns the smallest loop that has an instruction."""
        return next(loop for loop in self.loops if loop.names[name])

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of pages that one trip of the innermost loop of copies brings."""
        fetch = self.innermost("UTMALDG")
        return sum(self.copies[-fetch.count("UTMALDG") :])


def read_kernels(folder: Path, name: str) -> list[Kernel]:
    """Reads the kernels with a name from a dump, those with narrow products first."""

    def texts(suffix: str) -> list[str]:
        paths = folder.glob(f"{name}_*{suffix}")
        numbered = sorted(paths, key=lambda path: int(path.name[len(name) + 1 : -len(suffix)]))
        return [path.read_text(encoding="utf-8", errors="replace") for path in numbered]

    def width(product: re.Pattern[str], text: str) -> int:
        found = product.search(text)
        return int(found[1]) if found else 0

    code = list(zip(texts(".ptxas"), texts(".sass_ctrl"), strict=True))
    code.sort(key=lambda parts: width(_PRODUCT_OF_CODE, parts[1]))
    suffixes = ".resources.txt", ".before_layout_inference.txt"
    programs = list(zip(*map(texts, suffixes), strict=True))
    programs.sort(key=lambda parts: width(_PRODUCT_OF_PROGRAM, parts[1]))
    return [_read(*parts, *others) for parts, others in zip(code, programs, strict=True)]


def _read(ptxas: str, sass: str, resources: str, program: str) -> Kernel:
    def number(pattern: str, where: str) -> int:
        found = re.search(pattern, where)
        if found is None:
            raise ValueError(f"nothing like {pattern!r} in {where[:200]!r}")
        return int(found[1])

    return Kernel(
        registers=number(r"Used (\d+) registers", ptxas),
        spill_bytes=number(r"(\d+) bytes spill stores", ptxas),
        shared_bytes=number(r"smem_scratch_bytes=(\d+)", resources),
        loops=_loops(sass),
        stages=min(map(int, _RING.findall(program)), default=0),
        copies=tuple(map(_copied, _COPY.finditer(program))),
    )


def _copied(copy: re.Match[str]) -> int:
    lengths = [int(length) for length in copy[1].split(",")]
    if lengths.count(-1) != 1:  # pools have one leading axis, queries have two
        return 0
    found = _BITS.search(copy.string, copy.start())
    assert found is not None
    size = _TYPE_BITS[found[1]] // 8
    for length in lengths:
        size *= max(length, 1)  # -1 is an index
    return size


def _loops(sass: str) -> tuple[Loop, ...]:
    """Returns every range of code that ends with a conditional branch back, short ones first.

    Unconditional branches back are not loops: they return from waits that were moved elsewhere.
    """
    labels: dict[str, int] = {}
    names: list[str] = []
    branches: list[tuple[int, str]] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(names)
        elif found := _INSTRUCTION.search(line):
            condition, name, operands = found.groups()
            if condition and name == "BRA" and (target := re.search(r"\.L_x_\d+", operands)):
                branches.append((len(names), target[0]))
            names.append(name)
    loops = [
        Loop(Counter(names[labels[target] : at + 1]), labels[target], at)
        for at, target in branches
        if labels[target] <= at
    ]
    return tuple(sorted(loops, key=lambda loop: loop.end - loop.start))
