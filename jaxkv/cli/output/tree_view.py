"""The radix tree of a prefix index as people read it: nested values, text, and an SVG drawing.

Each reads the index and changes nothing. Not a command; not here: how a tree comes about.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count
from typing import Any

from jaxkv.prefix import PrefixIndex
from jaxkv.prefix.node import Node, unpack

TEXT_WIDTH = 48

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """A node, as it was when it was looked at.

    Attributes:
      start, end: positions of its tokens in the sequences that it is part of.
      text: text of its tokens.
      pages: in each layer group its page ids, 0 where a sliding group has freed one.
      holders: how many sequences hold each of them.
      hits: how often a match or an insert came through.
      age_seconds: since the last one.
      children: what goes on from it.
    """

    start: int
    end: int
    text: str
    pages: list[list[int]]
    holders: list[list[int]]
    hits: int
    age_seconds: float
    children: "list[NodeView]"

    @property
    def most_holders(self) -> int:
        """Holders of the page that has most of them."""
        return max((n for group in self.holders for n in group), default=0)

    @property
    def is_shared(self) -> bool:
        """Several sequences begin with it."""
        return len(self.children) > 1 or self.most_holders > 1

    def label(self) -> str:
        """Its text in quotes on one line, the middle left out where it is long."""
        # No control character may reach a terminal or an SVG file.
        visible = (c if c.isprintable() else ascii(c)[1:-1] for c in self.text)
        return f'"{_shortened("".join(visible))}"'

    def facts(self) -> list[str]:
        """What is known of it, a phrase each."""
        return [
            f"tokens {self.start}-{self.end - 1}",
            "pages " + " | ".join(_ranges(group) for group in self.pages),
            f"held by {self.most_holders}" if self.most_holders else "not held",
            f"{self.hits} hits",
            f"{self.age_seconds:.1f} s old",
        ]

    def as_json(self) -> dict[str, Any]:
        """The node and all below it, for `json.dumps`."""
        return {
            "start": self.start,
            "end": self.end,
            "text": self.text,
            "pages": self.pages,
            "holders": self.holders,
            "hits": self.hits,
            "age_seconds": round(self.age_seconds, 3),
            "children": [child.as_json() for child in self.children],
        }


def view(index: PrefixIndex, decode: Decode) -> list[NodeView]:
    """What the roots of an index have below them, of all namespaces.

    Args:
      index: the index.
      decode: token ids to text.
    """
    now = index.clock()

    def look(node: Node) -> NodeView:
        holders = [
            [pool.state(page)[1] if page else 0 for page in ids]
            for pool, ids in zip(index.pools, node.pages, strict=True)
        ]
        return NodeView(
            start=node.start,
            end=node.end,
            text=decode(unpack(node.tokens)),
            pages=[list(ids) for ids in node.pages],
            holders=holders,
            hits=node.hits,
            age_seconds=now - node.used,
            children=[look(child) for child in node.children.values()],
        )

    return [look(child) for root in index.roots.values() for child in root.children.values()]


def as_text(tops: Sequence[NodeView]) -> str:
    """The tree with branches drawn in characters; a node that several share is marked."""
    return "\n".join(_branches(tops, "")) if tops else "(the tree is empty)"


def _branches(nodes: Sequence[NodeView], margin: str) -> Iterator[str]:
    for node in nodes:
        is_last = node is nodes[-1]
        mark = "*" if node.is_shared else " "
        yield f"{margin}{'└─' if is_last else '├─'}{mark}{node.label()}"
        below = margin + ("   " if is_last else "│  ")
        stem = "│" if node.children else " "
        yield f"{below}{stem}  {', '.join(node.facts())}"
        yield from _branches(node.children, below)


BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, EDGE = 350, 64, 46, 16, 24
LEGEND_HEIGHT = 84
YOUNG, OLD = (142, 184, 240), (246, 246, 246)  # red, green, blue
SHARED_STROKE, OWN_STROKE = 'stroke="#b3261e" stroke-width="3"', 'stroke="#555555"'
UNHELD_DASHES = ' stroke-dasharray="6 3"'


@dataclass
class _Place:
    """Where the box of a node stands; `row` counts leaves, and may lie between two."""

    node: NodeView
    column: int
    row: float
    children: "list[_Place]"

    @property
    def x(self) -> float:
        return EDGE + self.column * (BOX_WIDTH + GAP_X)

    @property
    def y(self) -> float:
        return EDGE + LEGEND_HEIGHT + self.row * (BOX_HEIGHT + GAP_Y)

    def all(self) -> "Iterator[_Place]":
        yield self
        for child in self.children:
            yield from child.all()


def as_svg(tops: Sequence[NodeView], title: str) -> str:
    """A drawing: a column for each depth, a row for each leaf, and a legend."""
    rows = count()
    places = [found for node in tops for found in _placed(node, 0, rows).all()]
    num_columns = max((place.column + 1 for place in places), default=0)
    width = 2 * EDGE + max(2, num_columns) * (BOX_WIDTH + GAP_X) - GAP_X
    height = 2 * EDGE + LEGEND_HEIGHT + next(rows) * (BOX_HEIGHT + GAP_Y)
    oldest = max((place.node.age_seconds for place in places), default=0.0)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *_legend(title, oldest),
            *(_edge(place, child) for place in places for child in place.children),
            *(_box(place, oldest) for place in places),
            "</svg>\n",
        ]
    )


def _placed(node: NodeView, column: int, rows: Iterator[int]) -> _Place:
    children = [_placed(child, column + 1, rows) for child in node.children]
    row = (children[0].row + children[-1].row) / 2 if children else next(rows)
    return _Place(node, column, row, children)


def _edge(parent: _Place, child: _Place) -> str:
    start, end = parent.x + BOX_WIDTH, child.x
    top, bottom, middle = parent.y + BOX_HEIGHT / 2, child.y + BOX_HEIGHT / 2, (start + end) / 2
    curve = f"M{start:g} {top:g} C{middle:g} {top:g} {middle:g} {bottom:g} {end:g} {bottom:g}"
    return f'<path d="{curve}" fill="none" stroke="#888888"/>'


def _box(place: _Place, oldest: float) -> str:
    node = place.node
    tokens, pages, held, hits, age = node.facts()
    stroke = SHARED_STROKE if node.is_shared else OWN_STROKE
    dashes = "" if node.most_holders else UNHELD_DASHES
    shade = _shade(node.age_seconds / oldest if oldest else 0.0)
    lines = (node.label(), _shortened(f"{tokens}, {pages}"), f"{held}, {hits}, {age}")
    return (
        f'<g><rect x="{place.x:g}" y="{place.y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" '
        f'rx="6" fill="{shade}" {stroke}{dashes}/>'
        + "".join(_line(place.x + 10, place.y + 20 + 17 * i, line) for i, line in enumerate(lines))
        + "</g>"
    )


def _legend(title: str, oldest: float) -> Iterator[str]:
    y = EDGE + 36
    yield f'<text x="{EDGE}" y="{EDGE + 8}" font-size="16">{escape(title)}</text>'
    x = EDGE
    for label, attributes in (
        ("several sequences begin with it", f'fill="#ffffff" {SHARED_STROKE}'),
        ("a sequence holds its pages", f'fill="#ffffff" {OWN_STROKE}'),
        ("cached, not held", f'fill="#ffffff" {OWN_STROKE}{UNHELD_DASHES}'),
        ("used just now", f'fill="{_shade(0)}" {OWN_STROKE}'),
        (f"{oldest:.1f} s ago", f'fill="{_shade(1)}" {OWN_STROKE}'),
    ):
        yield f'<rect x="{x}" y="{y - 12}" width="22" height="15" rx="3" {attributes}/>'
        yield _line(x + 28, y, label)
        x += 46 + 7 * len(label)
    yield _line(
        EDGE, y + 24, "pages: ids in the pool, in order; ids of another layer group after |"
    )


def _line(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _shade(age: float) -> str:
    """A colour between YOUNG at age 0 and OLD at 1."""
    channels = (round(a + (b - a) * age) for a, b in zip(YOUNG, OLD, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in channels)


def _shortened(text: str) -> str:
    """A text of at most TEXT_WIDTH characters, the middle left out where it is longer."""
    half = (TEXT_WIDTH - 3) // 2
    return text if len(text) <= TEXT_WIDTH else f"{text[:half]} … {text[-half:]}"


def _ranges(ids: Sequence[int]) -> str:
    """Page ids with neighbours joined: `3-7, 12`; 0, a page that is gone, as `.`."""
    runs: list[list[int]] = []
    for page in ids:
        if runs and page and runs[-1][-1] == page - 1 and runs[-1][-1]:
            runs[-1].append(page)
        else:
            runs.append([page])
    words = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0] or ".") for run in runs)
    return ", ".join(words) or "none"
