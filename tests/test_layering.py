"""Which package may import which, read from the source of every module.

Every import counts, also one in a function or under TYPE_CHECKING. Cycles count only among the
imports that run when a module is loaded.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Each top-level folder, and the name that its modules are imported by.
FOLDERS = {
    "pallas_kernels": "pallas_kernels",
    "jaxkv": "jaxkv",
    "models": "jaxkv.models",
    "scripts": "scripts",
}
OURS = ("pallas_kernels", "jaxkv", "models", "scripts", "tests")
NAMELESS = {"utils", "util", "common", "helpers", "misc"}

ANY = ("*",)
ARRAYS = ("jax", "jaxlib", "ml_dtypes", "numpy")
CHECKPOINTS = ("flax", "gguf", "jinja2", "optax", "orbax", "safetensors", "tokenizers", "tqdm")
# Plain Python that every package of jaxkv may import. They import only each other.
LEAVES = (
    "jaxkv.arith",
    "jaxkv.config_keys",
    "jaxkv.errors",
    "jaxkv.kept_pages",
    "jaxkv.kv_format",
    "jaxkv.printable",
)
# What a model may import: the cache and the engine, not the commands and the analysis.
LIBRARY = (
    "jaxkv.attention",
    "jaxkv.cache",
    "jaxkv.compress",
    "jaxkv.engine",
    "jaxkv.eval",
    "jaxkv.model",
    "jaxkv.models",
    "jaxkv.prefix",
    "pallas_kernels",
)


@dataclass(frozen=True)
class Rule:
    """Allowed imports of a unit, besides the standard library and the unit itself."""

    ours: tuple[str, ...]
    outside: tuple[str, ...]


# The longest name that a module's name starts with decides; a unit that is not here is a violation,
# so that each new package gets a rule. The name `jaxkv` is the package's own __init__.
RULES = {
    "pallas_kernels": Rule(ours=(), outside=ARRAYS),
    "jaxkv": Rule(ours=("jaxkv",), outside=()),
    **dict.fromkeys(LEAVES, Rule(ours=LEAVES, outside=())),
    "jaxkv.cache": Rule(ours=("pallas_kernels",), outside=ARRAYS),
    "jaxkv.attention": Rule(ours=("jaxkv.cache", "pallas_kernels"), outside=ARRAYS),
    "jaxkv.model": Rule(ours=("jaxkv.cache", "jaxkv.attention"), outside=ARRAYS),
    "jaxkv.ledger": Rule(ours=(), outside=("numpy",)),
    "jaxkv.prefix": Rule(ours=(), outside=("numpy",)),
    "jaxkv.replay": Rule(ours=("jaxkv.prefix", "jaxkv.ledger"), outside=("numpy",)),
    "jaxkv.compress": Rule(ours=("jaxkv.cache", "jaxkv.attention", "jaxkv.model"), outside=ARRAYS),
    "jaxkv.eval": Rule(
        ours=("jaxkv.cache", "jaxkv.attention", "jaxkv.compress", "jaxkv.engine", "jaxkv.model"),
        outside=ARRAYS,
    ),
    "jaxkv.engine": Rule(
        ours=(
            "jaxkv.cache",
            "jaxkv.prefix",
            "jaxkv.attention",
            "jaxkv.compress",
            "jaxkv.model",
        ),
        outside=ARRAYS,
    ),
    "jaxkv.conversation": Rule(ours=("jaxkv.models",), outside=()),
    "jaxkv.memory": Rule(ours=(), outside=()),
    "jaxkv.llm": Rule(
        ours=(*LIBRARY, "jaxkv.conversation", "jaxkv.memory"), outside=(*ARRAYS, "tqdm")
    ),
    # Importable only with the extra `eval`.
    "jaxkv.models.lm_eval_model": Rule(ours=LIBRARY, outside=("lm_eval", "tqdm")),
    "jaxkv.models": Rule(ours=LIBRARY, outside=ARRAYS + CHECKPOINTS),
    # Importable only with the extra `testing`; its suites need pytest too.
    "jaxkv.testing": Rule(ours=("jaxkv", "pallas_kernels"), outside=(*ARRAYS, "chex", "pytest")),
    "jaxkv.cli": Rule(ours=("jaxkv", "pallas_kernels"), outside=ANY),
    "scripts": Rule(ours=("jaxkv", "pallas_kernels"), outside=ANY),
}


@dataclass
class Module:
    """One source file: every module that it imports, and those it imports while it is loaded."""

    name: str
    imports: set[str] = field(default_factory=set)
    loads: set[str] = field(default_factory=set)


def read_modules(root: Path) -> dict[str, Module]:
    """Returns name -> module for every source file under the packages of `root`."""
    trees: dict[str, ast.Module] = {}
    packages: set[str] = set()
    for folder, package in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            inside = path.relative_to(root / folder).with_suffix("").parts
            parts = (*package.split("."), *inside)
            if parts[-1] == "__init__":
                parts = parts[:-1]
                packages.add(".".join(parts))
            trees[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    modules = {}
    for name, tree in trees.items():
        module = modules[name] = Module(name)
        for node, at_load in imports_in(tree, at_load=True):
            targets = set(targets_of(node, name, name in packages, trees))
            module.imports |= targets
            if at_load:
                module.loads |= targets
    return modules


def imports_in(
    node: ast.AST, *, at_load: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yields the import statements below `node`, each with whether it runs at load time."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_load
            continue
        later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        )
        yield from imports_in(child, at_load=at_load and not later)


def targets_of(
    node: ast.Import | ast.ImportFrom, name: str, is_package: bool, known: dict[str, ast.Module]
) -> Iterator[str]:
    """Yields the modules that a statement in module `name` imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        above = name.split(".")
        above = above[: len(above) - node.level + is_package]
        base = ".".join([*above, *filter(None, [base])])
    for alias in node.names:
        submodule = f"{base}.{alias.name}"
        yield submodule if submodule in known else base


def within(name: str, unit: str) -> bool:
    return name == unit or name.startswith(unit + ".")


def unit_of(name: str) -> str | None:
    """Returns the name of the rule that holds for a module."""
    units = [unit for unit in RULES if within(name, unit)]
    unit = max(units, key=len, default=None)
    return None if unit == "jaxkv" and name != "jaxkv" else unit


def violations(root: Path) -> list[str]:
    """Returns a sentence for each breach of the rules in the packages under `root`."""
    modules = read_modules(root)
    found = []
    for module in modules.values():
        if vague := NAMELESS & {part.strip("_") for part in module.name.split(".")}:
            found.append(f"{module.name}: a module is named for what it holds, not {min(vague)}")
        unit = unit_of(module.name)
        if unit is None:
            found.append(f"{module.name}: no rule says what it may import")
            continue
        found += [
            f"{module.name} may not import {target}"
            for target in sorted(module.imports)
            if not may_import(unit, target)
        ]
    try:
        TopologicalSorter({m.name: m.loads & modules.keys() for m in modules.values()}).prepare()
    except CycleError as error:
        found.append(f"modules load each other: {' <- '.join(error.args[1])}")
    return found


def may_import(unit: str, target: str) -> bool:
    rule, top = RULES[unit], target.split(".")[0]
    if top in OURS:
        leaves = LEAVES if within(unit, "jaxkv") else ()
        return any(within(target, allowed) for allowed in (unit, *rule.ours, *leaves))
    return top in sys.stdlib_module_names or rule.outside == ANY or top in rule.outside


def test_the_packages_keep_to_the_rules():
    assert violations(ROOT) == []


def test_every_module_of_the_packages_is_read():
    names = read_modules(ROOT).keys()
    assert {"jaxkv.models.errors", "scripts.__main__"} <= names
    assert len(names) == sum(len(list((ROOT / p).rglob("*.py"))) for p in FOLDERS)


ALLOWED = {
    "pallas_kernels/a.py": "import jax\nimport numpy as np\nimport functools",
    "jaxkv/__init__.py": "from jaxkv.cache import spec\nfrom jaxkv.engine import step as step",
    "jaxkv/cache/spec.py": "from pallas_kernels import a",
    "jaxkv/attention.py": "from jaxkv.cache.spec import x",
    "jaxkv/kv_format.py": "import math",
    "jaxkv/prefix/pool.py": "import numpy\nfrom jaxkv.kv_format import x",
    "jaxkv/replay/trace.py": "from jaxkv.prefix import pool",
    "jaxkv/engine/__init__.py": "",
    "jaxkv/engine/step.py": "from .. import attention\nfrom ..prefix import pool",
    "models/decoder.py": "from flax import nnx\nfrom jaxkv.engine.step import x",
    "jaxkv/cli/score.py": "import jaxkv.models.decoder\nimport transformers",
    "scripts/bench.py": "import jaxkv.cli.score",
}


def write_tree(root: Path, sources: dict[str, str]) -> Path:
    for name, source in sources.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


def test_a_tree_that_follows_every_arrow_is_clean(tmp_path):
    assert violations(write_tree(tmp_path, ALLOWED)) == []


@pytest.mark.parametrize(
    "module, source, complaint",
    [
        ("pallas_kernels.b", "import jaxkv.cache", " may not import jaxkv.cache"),
        ("pallas_kernels.b", "import flax", " may not import flax"),
        ("jaxkv.prefix.b", "import jax.numpy", " may not import jax.numpy"),
        ("jaxkv.prefix.b", "from jaxkv import attention", " may not import jaxkv.attention"),
        ("jaxkv.ledger", "from jaxkv.prefix import pool", " may not import jaxkv.prefix.pool"),
        ("jaxkv.kept_pages", "import jaxkv.attention", " may not import jaxkv.attention"),
        ("jaxkv.kept_pages", "import numpy", " may not import numpy"),
        ("pallas_kernels.b", "import jaxkv.kv_format", " may not import jaxkv.kv_format"),
        ("jaxkv.cache.b", "from ..engine import step", " may not import jaxkv.engine.step"),
        ("jaxkv.engine.b", "def f():\n  import jaxkv.models.c", " may not import jaxkv.models.c"),
        ("jaxkv.cli.b", "from scripts.bench import x", " may not import scripts.bench"),
        ("jaxkv.models.c", "import models.decoder", " may not import models.decoder"),
        ("jaxkv.models.b", "from jaxkv.cli.score import x", " may not import jaxkv.cli.score"),
        ("scripts.b", "import tests.conftest", " may not import tests.conftest"),
        ("jaxkv.news", "", ": no rule says what it may import"),
        ("jaxkv.models._utils", "", ": a module is named for what it holds, not utils"),
    ],
)
def test_a_broken_rule_is_named(tmp_path, module, source, complaint):
    path = module.replace(".", "/").replace("jaxkv/models", "models") + ".py"
    assert violations(write_tree(tmp_path, {**ALLOWED, path: source})) == [module + complaint]


@pytest.mark.parametrize(
    "back, is_cycle",
    [
        ("import jaxkv.models.a", True),
        ("class C:\n  from jaxkv.models import a", True),
        ("def f():\n  import jaxkv.models.a", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import jaxkv.models.a", False),
    ],
    ids=["top", "class body", "function", "type checking"],
)
def test_only_imports_that_run_at_load_time_make_a_cycle(tmp_path, back, is_cycle):
    root = write_tree(tmp_path, {"models/a.py": "import jaxkv.models.b", "models/b.py": back})
    found = violations(root)
    assert len(found) == is_cycle
    assert all(sentence.startswith("modules load each other: jaxkv.models.") for sentence in found)
