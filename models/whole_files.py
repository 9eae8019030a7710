"""Writes files atomically, and checks that files are complete before a library reads them."""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

from jaxkv.models.errors import ModelError

Sums = dict[str, list[int]]
_BLOCK_BYTES = 1 << 20


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically: a reader sees the old text or the new one."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, "utf-8")
    os.replace(new, path)


def sums_of(folder: Path) -> Sums:
    """Size and CRC-32 of every file below a folder, by its path in the folder."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {
        file.relative_to(folder).as_posix(): [file.stat().st_size, _crc32(file)] for file in files
    }


def are_sums(found: object) -> TypeGuard[Sums]:
    """Whether a value read from a file has the form that `sums_of` returns."""
    return isinstance(found, dict) and all(
        isinstance(x, list) and len(x) == 2 for x in found.values()
    )


def check_sums(folder: Path, sums: Mapping[str, list[int]], advice: str) -> None:
    """Checks that every file has the size and the CRC-32 it was written with.

    Raises:
      ModelError: a file is missing or differs; the message ends with `advice`.
    """
    for name, (size, crc) in sums.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found is None:
            state = "is missing"
        elif found != size:
            state = f"has {found} bytes in place of {size}"
        elif _crc32(file) != crc:
            state = "is damaged"
        else:
            continue
        raise ModelError(f"{file}: {state}; {advice}")


def _crc32(file: Path) -> int:
    crc = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc
