"""The parts of the radix tree: nodes, and the form in which they store token ids.

A node is a run of tokens that all sequences below it share. A run may begin and end inside a page.
A page belongs to the node that contains the page's last token, so that the pages along a path,
joined, are logical pages 0, 1, .. of that prefix:

    P = 4          root ── "abcdef" pages [7] ─┬─ "ghij"  pages [3, 9]    logical pages 1, 2
                                               └─ "GH"    pages [5]       logical page 1

    Logical page 1 of "abcdefgh" is page 3, and of "abcdefGH" it is page 5: each branch has its own
    copy of "ef".

The last page of a leaf may be partly filled. An inner node has whole pages only: the tokens after
its last whole page ("ef") are in the first page of every branch below it. `index` creates and
removes nodes.
"""

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxkv.prefix.eviction import Owner

TOKEN = 4  # bytes per token id: int32, in the byte order of the machine


def pack(tokens: Sequence[int]) -> bytes:
    """Packs token ids as the int32 bytes that the index takes.

    Packed tokens are compared, sliced and joined at memory speed.

    Args:
      tokens: token ids; none is negative.

    Example:
      >>> len(pack([5, 6, 7]))
      12
      >>> unpack(pack([5, 6, 7]))
      [5, 6, 7]
    """
    return array("I", tokens).tobytes()  # "i" and numpy take four times as long, struct twice


def unpack(data: bytes) -> list[int]:
    """Returns the token ids in packed tokens."""
    return array("i", data).tolist()


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """What must be equal before two sequences may share pages.

    The fields are compared one by one and never concatenated, so that different values cannot
    collide.

    Attributes:
      kv_format: how K and V are stored, including rotation and scales.
      window: the method that gave the model's full layers a window, which changes their K and V,
        compared by value; None for none.
      salt: secret of those who share; None for everyone.
    """

    kv_format: str = ""
    window: Hashable = None
    salt: str | None = None


class Node:
    """A run of tokens in the tree; an `Evictable`.

    Attributes:
      owner: the index.
      parent: None for a root, and for a node that was removed.
      start, end: position of the first token in the sequences that contain the node, and the
        position after the last one.
      tokens: packed.
      pages: in each layer group the page ids; 0 where a sliding group has lost the page.
      numbers: numbers of the pages in the stream of events; empty if there is no stream.
      children: by their packed first token.
      hits: how many matches and inserts came through.
      priority: largest priority of the requests that came through.
      born, used: clock at the creation and at the last touch, in seconds.
    """

    __slots__ = (
        "born",
        "children",
        "end",
        "hits",
        "numbers",
        "owner",
        "pages",
        "parent",
        "priority",
        "start",
        "tokens",
        "used",
    )

    def __init__(
        self,
        owner: Owner,
        parent: "Node | None",
        start: int,
        tokens: bytes,
        pages: list[list[int]],
    ):
        self.owner = owner
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
        """Logical pages of the node."""
        return len(self.pages[0])

    @property
    def key(self) -> bytes:
        """The node's key in `parent.children`."""
        return self.tokens[:TOKEN]

    def split(self, at: int, page_size: int) -> "Node":
        """Moves the tokens before position `at` to a new node above this one.

        Returns:
          The new node, which is now this one's parent.
        """
        parent = self.parent
        assert parent is not None and self.start < at < self.end
        cut = at // page_size - self.start // page_size
        tokens = self.tokens[: (at - self.start) * TOKEN]
        upper = Node(self.owner, parent, self.start, tokens, [ids[:cut] for ids in self.pages])
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

    def __init__(self, owner: Owner, namespace: Namespace, num_groups: int):
        super().__init__(owner, None, 0, b"", [[] for _ in range(num_groups)])
        self.namespace = namespace

    def walk(self, tokens: bytes) -> tuple[list[Node], int]:
        """Follows packed tokens down the tree.

        Returns:
          The nodes along the longest prefix that the tree has, topmost first, and the length of
          that prefix in tokens. It may end inside the last node.
        """
        path: list[Node] = []
        at, end = 0, len(tokens)
        node: Node | None = self
        while at < end:
            node = node.children.get(tokens[at : at + TOKEN])
            if node is None:
                break
            path.append(node)
            if not tokens.startswith(node.tokens, at):
                depth = at // TOKEN
                return path, depth + common_length(node.tokens, tokens, depth, end // TOKEN)
            at += len(node.tokens)
        return path, at // TOKEN


def joined_pages(path: Sequence[Node], group: int) -> list[int]:
    """Returns the pages of a group along a path."""
    joined: list[int] = []
    for node in path:
        joined += node.pages[group]
    return joined


def common_length(run: bytes, data: bytes, start: int, end: int) -> int:
    """Counts the first tokens of `run` that equal those of `data` from `start` on, before `end`."""
    if data.startswith(run, start * TOKEN, end * TOKEN):
        return len(run) // TOKEN
    n = min(len(run) // TOKEN, end - start)
    differs = np.frombuffer(run, np.int32, n) != np.frombuffer(data, np.int32, n, start * TOKEN)
    first = int(differs.argmax())
    return first if differs[first] else n


def prefix_of(node: Node) -> tuple[int, ...]:
    """Returns all tokens from the root to the end of a node."""
    runs = []
    while node.parent is not None:
        runs.append(node.tokens)
        node = node.parent
    return tuple(unpack(b"".join(reversed(runs))))
