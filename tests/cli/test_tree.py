"""`python scripts tree`, and the tree as text, JSON and SVG."""

import io
import json
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from jaxkv.cli import console, tree
from jaxkv.cli.output.tree_view import NodeView, as_svg, as_text, view
from jaxkv.prefix import Namespace, PageTables, make_index, make_pool, pack
from tests.models.tiny_checkpoint import write_hf

P = 4
NAMESPACE = Namespace()
SVG = "{http://www.w3.org/2000/svg}"


def letters(ids: list[int]) -> str:
    return "".join(map(chr, ids))


class Host:
    """An index whose tokens are characters, by a clock that a test sets."""

    def __init__(self, windows: tuple[int | None, ...] = (None,)):
        self.now = 0.0
        pools = [make_pool(32, window) for window in windows]
        self.index = make_index(pools, P, windows, clock=lambda: self.now)
        self.tables = PageTables(
            pools, P, max_sequences=8, max_pages=24, windows=windows, index=self.index
        )

    def serve(self, text: str, *, hold: bool = False) -> None:
        tokens, row = pack([ord(c) for c in text]), self.tables.open()
        self.tables.match(row, tokens[:-4], NAMESPACE)
        self.tables.grow(row, len(text))
        self.tables.publish(row, tokens, NAMESPACE)
        if not hold:
            self.tables.close(row)

    def tops(self) -> list[NodeView]:
        return view(self.index, letters)


def all_of(nodes: list[NodeView]) -> list[NodeView]:
    return [found for node in nodes for found in (node, *all_of(node.children))]


def test_each_text_can_be_read_along_a_path_and_every_kept_page_stands_once():
    host, texts = Host(), ["the one", "the other", "the other one", "a"]
    for text in texts:
        host.serve(text)

    def paths(nodes: list[NodeView], above: str) -> set[str]:
        found = set()
        for node in nodes:
            assert node.start == len(above) and node.end == len(above + node.text)
            found |= {above + node.text} | paths(node.children, above + node.text)
        return found

    tops = host.tops()
    assert set(texts) <= paths(tops, "") | {"the other"}  # the longest of these has it inside
    pages = [page for node in all_of(tops) for page in node.pages[0]]
    kept = [page for page in range(1, 32) if host.index.pools[0].state(page)[0]]
    assert sorted(pages) == kept


def test_a_node_is_shared_where_it_branches_or_is_held_by_several():
    host = Host()
    host.serve("abcdefgh", hold=True)
    host.serve("abcdXYZW", hold=True)
    top, *rest = host.tops()
    assert not rest and top.text == "abcd" and top.is_shared and top.holders == [[2]]
    assert [child.holders for child in top.children] == [[[1]], [[1]]]
    assert [child.is_shared for child in top.children] == [False, False]


def test_ages_count_from_the_last_touch_and_hits_every_one():
    host = Host()
    host.serve("abcd")
    host.now = 7.0
    host.serve("abcdefgh")
    host.now = 9.5
    (top,) = host.tops()
    assert top.age_seconds == 2.5
    assert top.hits == next(node for _, node in host.index.nodes()).hits


def test_the_text_has_a_line_of_tokens_and_one_of_facts_a_node():
    host = Host()
    assert as_text(host.tops()) == "(the tree is empty)"
    host.serve("abcdefgh", hold=True)
    host.serve("abcdXYZW")
    lines = as_text(host.tops()).splitlines()
    assert lines[0] == '└─*"abcd"'
    assert lines[1].startswith("   │  tokens 0-3, pages 1, held by 1, ")
    assert lines[2] == '   ├─ "efgh"'
    assert lines[3].startswith("   │     tokens 4-7, pages 2, held by 1, ")
    assert lines[4] == '   └─ "XYZW"'
    assert "not held" in lines[5]
    assert len(lines) == 6


def test_pages_that_a_sliding_group_freed_are_dots_and_groups_are_separate():
    host = Host(windows=(None, 4))
    host.serve("abcdefghijklmnop", hold=True)
    (top,) = host.tops()
    assert "pages 1-4 | 1-4" in top.facts()
    host.tables.trim(np.array([0]), np.array([16]))
    host.tables.close(0)
    host.index.evict(1, 40)
    (top,) = host.tops()
    assert any(0 in group for group in top.pages[1:])
    assert " | ." in ", ".join(top.facts())


def test_no_control_character_or_markup_of_a_text_gets_into_a_drawing():
    host = Host()
    host.serve('<a b="&">\x1b[31m\x00\n' + "é" * 60)
    drawing = as_svg(host.tops(), "title <&>")
    root = ElementTree.fromstring(drawing)
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert any(text.startswith('"<a b="&">\\x1b[31m') for text in texts)
    assert "title <&>" in texts
    assert "\x1b" not in as_text(host.tops())


def test_a_drawing_has_a_box_a_node_an_edge_a_child_and_nothing_overlaps():
    host = Host()
    for text in ("abcdefgh", "abcdXYZW", "abcdefghijklm", "abcdefghIJKL", "q"):
        host.serve(text)
    nodes = all_of(host.tops())
    root = ElementTree.fromstring(as_svg(host.tops(), "t"))
    boxes = [element.find(f"{SVG}rect") for element in root.iter(f"{SVG}g")]
    corners = [(float(box.get("x")), float(box.get("y"))) for box in boxes if box is not None]
    assert len(corners) == len(nodes)
    assert len(list(root.iter(f"{SVG}path"))) == sum(len(node.children) for node in nodes)
    width, height = float(boxes[0].get("width")), float(boxes[0].get("height"))
    for i, (x, y) in enumerate(corners):
        assert x >= 0 and x + width <= float(root.get("width"))
        assert y >= 0 and y + height <= float(root.get("height"))
        for other_x, other_y in corners[:i]:
            assert abs(x - other_x) >= width or abs(y - other_y) >= height


def test_the_older_a_node_the_paler_its_box():
    host = Host()
    for now, text in enumerate(("a", "b", "c")):
        host.now = float(now)
        host.serve(text)
    root = ElementTree.fromstring(as_svg(host.tops(), "t"))
    fills = [element.find(f"{SVG}rect").get("fill") for element in root.iter(f"{SVG}g")]
    lightness = [sum(bytes.fromhex(fill[1:])) for fill in fills]
    assert lightness[0] > lightness[1] > lightness[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_hf(tmp_path_factory.mktemp("tree") / "model"))


@pytest.fixture
def run(model, monkeypatch, capsys):
    """Runs the command on the tiny model; returns exit code, standard output and error."""
    monkeypatch.setattr(console, "enable_compilation_cache", lambda: None)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        try:
            code = console.run(
                tree.main,
                ["--model", model, "--max-new-tokens", "3", "--pool-tokens", "256", *arguments],
            )
        except SystemExit as stop:  # argparse's way
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


PROMPTS = ("the one and the other", "the one and only")


def test_prompts_that_begin_alike_branch_where_they_differ(run, tmp_path):
    code, out, _ = run("--json", "--page-size", "8", *PROMPTS)
    record = json.loads(out)
    (top,) = record["tree"]
    assert code == 0
    assert top["text"] == "the one and"
    assert sorted(child["text"][:3] for child in top["children"]) == [" on", " th"]
    (pool,) = record["pools"]
    assert pool["held"] == 0 and sum(pool.values()) == 256 // 8
    assert all(n == 0 for n in top["holders"][0])


def test_while_running_the_pages_are_held_and_the_answers_not_there_yet(run, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(("", *PROMPTS)), encoding="utf-8")
    drawing = tmp_path / "tree.svg"
    code, out, err = run(
        "--page-size",
        "8",
        "--while-running",
        "--prompts",
        str(file),
        "--svg",
        str(drawing),
        "--json",
    )
    record = json.loads(out)
    (top,) = record["tree"]
    assert code == 0
    assert top["holders"] == [[2]]
    assert {top["text"] + child["text"] for child in top["children"]} == set(PROMPTS)
    assert record["pools"][0]["held"] > 0
    assert err.splitlines()[-1] == f"{drawing}: the tree is drawn"
    assert len(list(ElementTree.parse(drawing).iter(f"{SVG}g"))) == 3


def test_without_prompts_it_is_the_demos_conversation(run, monkeypatch):
    monkeypatch.setattr(tree, "DEMO_SYSTEM", "s")
    monkeypatch.setattr(tree, "DEMO_TURNS", ("the one",))
    code, out, _ = run()
    assert code == 0
    assert "held" in out.splitlines()[0]
    assert '─ "' in out.splitlines()[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--page-size", "0", "x"], "page_size", id="page size"),
        pytest.param(["--pool-tokens", "0", "x"], "pool_tokens", id="pool"),
        pytest.param(["--max-new-tokens", "0", "x"], "--max-new-tokens", id="new tokens"),
        pytest.param(["--prompts", "f", "x"], "not both", id="two sources"),
        pytest.param(["--prompts", "no-such-file"], "no-such-file", id="file"),
        pytest.param(["--model", "no-such-model", "x"], "no-such-model", id="model"),
        pytest.param(["x" * 300], "300 tokens", id="too long"),
        pytest.param([""], "empty", id="empty prompt"),
        pytest.param(["--svg", "/no/such/folder/t.svg", "x"], "/no/such/folder", id="drawing"),
    ],
)
def test_a_wrong_argument_is_one_line_and_code_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (console.EXIT_USER_ERROR, "")
    assert message in err
    assert len(err.splitlines()) == 1
