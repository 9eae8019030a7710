"""The `jaxkv` command: one module per subcommand, and what they share.

A subcommand is a module of this folder with a function `main(argv: list[str]) -> int`. The first
line of its docstring is its line in the list of commands. `simulate_reuse.py` is the command
`jaxkv simulate reuse`. A command reads its arguments into a frozen dataclass, `..Options`, in a
function `parse`; every other function takes typed values.
"""
