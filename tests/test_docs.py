"""What the README and docs/ name exists: paths, links, names, commands; their examples run."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import chex
import numpy as np
import pytest

from scripts.__main__ import known_commands

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DECISIONS = ROOT / "docs" / "decisions"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
SUFFIXES = "py|md|toml"


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=name)


def fenced(page: Path, language: str) -> list[str]:
    """The blocks of a page that are fenced as `language` ("" for none)."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    return [text for fence, text in blocks if fence == language]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def spans(page: Path) -> list[str]:
    """Returns the texts between backticks in the prose of a page."""
    return re.findall(r"`([^`\n]+)`", prose(page))


_, README_KERNEL_CALL = fenced(README, "python")


def examples() -> Iterator:
    """Every block of Python but the README's kernel call; one that loads a model is slow."""
    for page in PAGES:
        for code in fenced(page, "python"):
            if page == README and code == README_KERNEL_CALL:
                continue  # has a test of its own
            marks = [pytest.mark.slow] if re.search(r"load_model|LLM\(", code) else []
            yield pytest.param(code, id=name(page), marks=marks)


@pytest.mark.parametrize("code", list(examples()))
def test_an_example_of_the_docs_runs_as_it_stands(code):
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})


def test_the_first_program_of_the_readme_has_six_lines_and_prints():
    code = fenced(README, "python")[0]
    assert len(code.strip().splitlines()) <= 6 and "print(" in code and "LLM(" in code


def test_the_kernel_call_of_the_readme_runs_as_it_stands():
    names: dict = {"__name__": "__main__"}
    exec(compile(README_KERNEL_CALL, "example", "exec"), names)
    assert names["table"].tolist() == [[5, 2, 7], [5, 2, 3]]
    out, q, k, v = (np.asarray(names[x], np.float64) for x in ("out", "q", "k", "v"))
    rows = [*range(32), *range(48, 64)]  # of b: the pages it shares, then its own
    for i in (1, 2, 3):
        seen = rows[: int(names["kv_lens"][1]) - 3 + i]
        for head in range(8):
            weights = np.exp(k[seen, head // 4] @ q[i, head] / 8)
            naive = weights @ v[seen, head // 4] / weights.sum()
            chex.assert_trees_all_close(out[i, head], naive, rtol=1e-7, atol=1e-5)


def tree_paths() -> list[str]:
    """Every path that the README's tree names: what is indented lies in the folder above it."""
    (tree,) = [text for text in fenced(README, "") if text.startswith("pallas_kernels/")]
    paths, folders = [], [""]
    for line in tree.splitlines():
        entry, _, note = line.strip().partition(" ")
        folders[(len(line) - len(line.lstrip())) // 2 + 1 :] = []
        parent = "".join(folders)
        inside = parent + entry if entry.endswith("/") else parent
        paths += [parent + entry, *(inside + file for file in re.findall(r"\w+\.py\b", note))]
        folders.append(entry)
    return paths


def test_every_path_of_the_tree_exists():
    paths = tree_paths()
    assert {"jaxkv/engine/", "jaxkv/engine/step.py", "jaxkv/cli/decode.py"} <= set(paths)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_package_is_in_the_tree():
    packages = {
        name(folder) + "/"
        for top in ("jaxkv", "pallas_kernels", "models", "scripts")
        for folder in (ROOT / top, *(ROOT / top).iterdir())
        if not folder.is_symlink() and (folder / "__init__.py").exists()
    }
    assert packages - set(tree_paths()) == set()


@every_page
def test_every_path_that_is_named_exists(page):
    named = [s for s in spans(page) if re.fullmatch(rf"[\w.-]+(/[\w.-]+)+(\.({SUFFIXES})|/)", s)]
    assert [path for path in named if not (ROOT / path).exists()] == []


@every_page
def test_every_dotted_name_can_be_imported(page):
    for span in spans(page):
        if re.fullmatch(r"(jaxkv|pallas_kernels)(\.\w+)+", span):
            resolve(span)


def resolve(dotted: str) -> object:
    """Returns the module or attribute of that name; raises if there is none."""
    parts = dotted.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(dotted)


@every_page
def test_every_relative_link_resolves(page):
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", prose(page)):
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", prose(linked), re.M)
            slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in slugs


@every_page
def test_every_make_target_and_command_that_is_named_exists(page):
    text = page.read_text()
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert phony is not None
    targets = set(re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.M))
    assert targets <= set(phony[1].split())
    known = known_commands()
    pattern = r"(?:python scripts|^    jaxkv|`jaxkv) ([a-z]+(?: [a-z]+)?)"
    for words in re.findall(pattern, text, re.M):
        assert words in known or words.split()[0] in known, words


@every_page
def test_every_option_of_a_command_that_is_named_exists(page):
    folders = ROOT / "scripts", ROOT / "jaxkv" / "cli"
    sources = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text())) - {"--help"}
    assert {option for option in options if f'"{option}"' not in sources} == set()


def test_decisions_are_numbered_in_order_and_listed():
    pages = sorted(DECISIONS.glob("[0-9]*.md"))
    for number, page in enumerate(pages, start=1):
        text = page.read_text()
        assert page.name.startswith(f"{number:03}-")
        assert text.startswith(f"# {number:03} ")
        assert f"]({page.name})" in (DECISIONS / "README.md").read_text()
