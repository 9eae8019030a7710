"""`python scripts COMMAND`: the `jaxkv` command from a checkout, and the commands of this folder.

The folders `bench`, `device` and `studies` hold commands that are not installed with the library.
`bench/decode.py` is `python scripts bench decode`, and `studies/tradeoff.py` is
`python scripts tradeoff`.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxkv.cli.commands import Command

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent


def known_commands() -> "dict[str, Command]":
    """All commands by their words: the installed ones, then those of this folder."""
    from jaxkv.cli.commands import commands

    known = commands(ROOT / "jaxkv" / "cli", "jaxkv.cli")
    for folder, prefix in (("bench", "bench"), ("device", "device"), ("studies", "")):
        known |= commands(FOLDER / folder, f"scripts.{folder}", prefix)
    return known


def main(argv: list[str]) -> int:
    """Runs the command that `argv` starts with, and returns its exit code."""
    from jaxkv.cli.commands import run

    return run(known_commands(), argv, "python scripts")


if __name__ == "__main__":
    # The repository's root in place of this folder, whose file names could hide other modules.
    sys.path[0] = str(ROOT)
    sys.exit(main(sys.argv[1:]))
