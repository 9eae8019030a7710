"""`jaxkv` and `python -m jaxkv.cli`."""

import sys
from pathlib import Path

from jaxkv.cli.commands import commands, run

FOLDER = Path(__file__).resolve().parent


def main() -> int:
    """Runs the command that the process's arguments name, and returns its exit code."""
    return run(commands(FOLDER, "jaxkv.cli"), sys.argv[1:], "jaxkv")


if __name__ == "__main__":
    sys.exit(main())
