"""Finds the commands of a folder, lists them, and runs one of them.

The commands are found by parsing source files, so that listing them does not import jax.
"""

import ast
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxkv.cli import console


@dataclass(frozen=True)
class Command:
    """A module that can be run from the command line.

    Attributes:
      module: its dotted name; `main(argv: list[str]) -> int` runs it.
      summary: the first line of its docstring, without the full stop.
    """

    module: str
    summary: str

    def run(self, argv: list[str]) -> int:
        """Imports the module and runs it; importing is part of the run, since jax takes a while."""
        return importlib.import_module(self.module).main(argv)


def commands(folder: Path, package: str, prefix: str = "") -> dict[str, Command]:
    """Finds the commands in a folder.

    Args:
      folder: the folder with the modules.
      package: the dotted name of the folder.
      prefix: a word that comes before each command's own words, or "".

    Returns:
      The commands by the words that call them, sorted. `simulate_reuse.py` is called by
      `simulate reuse`.
    """
    found = {}
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        is_command = any(
            isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body
        )
        if is_command and not path.stem.startswith("_"):
            summary = (ast.get_docstring(tree) or "").partition("\n")[0].rstrip(".")
            words = f"{prefix} {path.stem.replace('_', ' ', 1)}".strip()
            found[words] = Command(f"{package}.{path.stem}", summary)
    return found


def listing(known: Mapping[str, Command], program: str) -> str:
    """Returns the help text that lists the commands, one per line."""
    width = max(map(len, known), default=0)
    lines = [f"  {words:{width}}  {command.summary}" for words, command in known.items()]
    head = f"{program} COMMAND [ARGUMENTS]; COMMAND --help explains its arguments"
    return "\n".join([head, "", *lines])


def run(known: Mapping[str, Command], argv: list[str], program: str) -> int:
    """Runs the command whose words `argv` starts with.

    Args:
      known: the commands by their words.
      argv: the arguments after the program's name.
      program: what the user types before the command, for messages.

    Returns:
      The exit code: 2 if there is no such command.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(listing(known, program))
        return 0
    words = next((" ".join(argv[:n]) for n in (2, 1) if " ".join(argv[:n]) in known), None)
    if words is not None:
        return console.run(known[words].run, argv[len(words.split()) :])
    group = {name: command for name, command in known.items() if name.split()[0] == argv[0]}
    if not group:
        print(f"no command is named {argv[0]!r}: `{program}` lists them", file=sys.stderr)
        return 2
    if argv[1:2] in ([], ["-h"], ["--help"], ["help"]):
        print(listing(group, program))
        return 0
    names = ", ".join(name.split()[1] for name in group)
    print(f"{argv[0]} has no {argv[1]!r}: there are {names}", file=sys.stderr)
    return 2
