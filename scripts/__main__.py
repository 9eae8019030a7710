"""`python scripts`: lists the commands of this folder, and runs one of them.

A command is a module with a function `main(argv: list[str]) -> int`; the first line of its
docstring is what the list says of it. `bench_decode.py` is the command `bench decode`. Commands
are found by reading their source, so that the list does not wait for jax.
"""

import ast
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def commands(folder: Path) -> dict[str, tuple[str, str]]:
    """Returns command -> (module name, its one line), sorted by command."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        is_command = any(
            isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body
        )
        if is_command and not path.stem.startswith("_"):
            summary = (ast.get_docstring(tree) or "").partition("\n")[0].rstrip(".")
            found[path.stem.replace("_", " ", 1)] = (path.stem, summary)
    return found


def listing(known: Mapping[str, tuple[str, str]]) -> str:
    """Returns the text that shows the commands, one a line."""
    width = max(map(len, known), default=0)
    lines = [f"  {command:{width}}  {summary}" for command, (_, summary) in known.items()]
    return "\n".join(
        ["python scripts COMMAND [ARGUMENTS]; COMMAND --help tells its arguments", "", *lines]
    )


def main(argv: list[str]) -> int:
    """Runs the command that `argv` starts with, and returns its exit code."""
    from scripts import console

    known = commands(FOLDER)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(listing(known))
        return 0
    words = next((n for n in (2, 1) if " ".join(argv[:n]) in known), 0)
    if not words:
        group = {one: known[one] for one in known if one.split()[0] == argv[0]}
        if group and argv[1:2] in ([], ["-h"], ["--help"], ["help"]):
            print(listing(group))
            return 0
        if group:
            names = ", ".join(one.split()[1] for one in group)
            print(f"{argv[0]} has no {argv[1]!r}: there are {names}", file=sys.stderr)
            return 2
        print(f"no command is named {argv[0]!r}: `python scripts` lists them", file=sys.stderr)
        return 2
    module, _ = known[" ".join(argv[:words])]

    def load_and_run(arguments: list[str]) -> int:
        return importlib.import_module(f"scripts.{module}").main(arguments)

    return console.run(load_and_run, argv[words:])  # the loading too: jax takes a while


if __name__ == "__main__":
    # The repository's root in place of this folder, whose file names could hide other modules.
    sys.path[0] = str(FOLDER.parent)
    sys.exit(main(sys.argv[1:]))
