"""The radix tree's parts: nodes, and how token ids are stored in them.

A node is a run of tokens that every sequence below it shares, token-exact: a split may fall inside
a page. Pages belong to the node in which their last token lies, so that the pages along a path,
joined, are the logical pages 0, 1, .. of that prefix:

    P = 4          root ── "abcdef" pages [7] ─┬─ "ghij"  pages [3, 9]    logical pages 1, 2
                                               └─ "GH"    pages [5]       logical page 1
                                                  │
    logical page 1 of "abcdefgh" is 3, of "abcdefGH" it is 5: each branch has its own copy of "ef"

The last page of a leaf may be partly filled. An inner node has whole pages only: tokens after its
last whole page ("ef") stand in the first page of every branch below it. Not here: when nodes are
made and lost (`index`).
"""

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

TOKEN = 4  # bytes of a token id: int32, in the machine's order


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids, none of them negative, as the bytes that nodes have; they compare, slice and join
    at memory speed."""
    return array("I", tokens).tobytes()  # "i" and numpy take four times as long, struct twice


def unpack(data: bytes) -> list[int]:
    """The token ids in `data`."""
    return array("i", data).tolist()


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """What must be equal before two sequences may share pages.

    Attributes:
      model: whose K and V these are; another set of weights is another model.
      kv_format: how they are stored, rotation and scales included.
      method: what dropped tokens before they were computed, compared by value: a window, or of a
        snapshot its method, budget and interval; None where none were dropped.
      dropped_at: of a snapshot, the number of tokens when some were dropped; 0 where all are there.
      protect: of a snapshot, spans of tokens that were not to be dropped.
      adapter: of the weights, a name and a version; None is the bare model.
      salt: secret of a tenant, who then shares with nobody else; None is public.
    """

    model: str = ""
    kv_format: str = ""
    method: Hashable = None
    dropped_at: int = 0
    protect: tuple[tuple[int, int], ...] = ()
    adapter: tuple[str, int] | None = None
    salt: str | None = None


class Node:
    """A run of tokens in the tree.

    Attributes:
      parent: None for a root, or once the node is gone.
      start, end: position of its first token in the sequences that it is part of, and the
        position after its last.
      tokens: packed.
      pages: in each layer group its page ids; 0 where a sliding group has let one go.
      numbers: of its pages in the stream of events; empty where nobody listens.
      children: by their packed first token.
      hits: how often a match or an insert came through, for policies and display.
      priority: largest of the requests that came through.
      born, used: clock readings at its making and at the last touch, seconds.
    """

    __slots__ = (
        "born",
        "children",
        "end",
        "hits",
        "numbers",
        "pages",
        "parent",
        "priority",
        "start",
        "tokens",
        "used",
    )

    def __init__(self, parent: "Node | None", start: int, tokens: bytes, pages: list[list[int]]):
        self.parent = parent
        self.start = start
        self.end = start + len(tokens) // TOKEN
        self.tokens = tokens
        self.pages = pages
        self.numbers: list[int] = []
        self.children: dict[bytes, Node] = {}
        self.hits = 0
        self.priority = 0
        self.born = self.used = 0.0

    @property
    def num_pages(self) -> int:
        """Logical pages that it has."""
        return len(self.pages[0])

    @property
    def key(self) -> bytes:
        """What its parent knows it by."""
        return self.tokens[:TOKEN]

    def split(self, at: int, page_size: int) -> "Node":
        """Makes the tokens before position `at` a node of their own, above this one.

        Returns:
          The new node, this one's parent now.
        """
        parent = self.parent
        assert parent is not None and self.start < at < self.end
        cut = at // page_size - self.start // page_size
        tokens = self.tokens[: (at - self.start) * TOKEN]
        upper = Node(parent, self.start, tokens, [ids[:cut] for ids in self.pages])
        upper.numbers = self.numbers[:cut]
        upper.hits, upper.priority, upper.born = self.hits, self.priority, self.born
        parent.children[upper.key] = upper
        self.parent, self.start = upper, at
        self.tokens = self.tokens[len(upper.tokens) :]
        self.pages = [ids[cut:] for ids in self.pages]
        self.numbers = self.numbers[cut:]
        upper.children[self.key] = self
        return upper


class Root(Node):
    """The empty prefix of a namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace, num_groups: int):
        super().__init__(None, 0, b"", [[] for _ in range(num_groups)])
        self.namespace = namespace


def common_length(run: bytes, data: bytes, start: int, end: int) -> int:
    """How many tokens of `run` stand in `data` from position `start` on, before `end`."""
    if data.startswith(run, start * TOKEN, end * TOKEN):
        return len(run) // TOKEN
    n = min(len(run) // TOKEN, end - start)
    differs = np.frombuffer(run, np.int32, n) != np.frombuffer(data, np.int32, n, start * TOKEN)
    first = int(differs.argmax())
    return first if differs[first] else n


def prefix_of(node: Node) -> tuple[int, ...]:
    """All tokens up to the end of a node."""
    runs = []
    while node.parent is not None:
        runs.append(node.tokens)
        node = node.parent
    return tuple(unpack(b"".join(reversed(runs))))
