"""The static description of a paged cache: layers, page size, pages, formats, layout.

A layer has pages of its own, and where its format keeps some tokens exact, pages of another pool
for them (`formats.Exact`). Not here: the arrays (`state`), nor which page belongs to whom
(`jaxkv.prefix`).
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property

from jaxkv.cache.formats import EXACT, KVFormat
from pallas_kernels.checks import PAGE_SIZES
from pallas_kernels.pages import Layout

MAX_SINK_TOKENS = PAGE_SIZES[0]


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What one layer keeps for each token.

    Attributes:
      kv_heads: K.
      head_dim: D.
      window: keys a query sees, itself included; None sees all.
      sink_tokens: the sequence's first tokens, which the window does not move past; 0 to
        MAX_SINK_TOKENS, so that one page has them whatever its size. Queries see them as if all
        tokens between them and the window were not there (StreamingLLM, arXiv 2309.17453).
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    sink_tokens: int = 0


@dataclass(frozen=True)
class LayerPages:
    """Pages of one layer in one format, and which tokens of a sequence they keep.

    Attributes:
      layer: its index.
      kv_heads, head_dim: K of a page, and D.
      format: of the pages.
      window: tokens that are kept, the last one included; None keeps all.
      sink_pages: pages at the beginning that are kept, too.
      sink_tokens: see `LayerSpec`.
      heads_apart: where each KV head has pages of its own, of how many heads the array holds some;
        0 where a page holds all heads.
    """

    layer: int
    kv_heads: int
    head_dim: int
    format: KVFormat
    window: int | None
    sink_pages: int = 0
    sink_tokens: int = 0
    heads_apart: int = 0

    def bytes_per_page(self, page_size: int) -> int:
        """Bytes of one page."""
        return self.format.bytes_per_page(page_size, self.kv_heads, self.head_dim)


@dataclass(frozen=True)
class LayerGroup:
    """Pages that keep the same tokens: they share one pool of page ids and one page table.

    Attributes:
      window, sink_pages, sink_tokens: see `LayerPages`.
      members: their indices among `CacheSpec.pages`.
      head: the KV head of the one member whose tokens these are, where heads are apart; its pages
        are the head-th N of the array. 0 elsewhere.
    """

    window: int | None
    sink_pages: int
    sink_tokens: int
    members: tuple[int, ...]
    head: int = 0

    def first_page(self, num_tokens: int, page_size: int) -> int:
        """First page behind the sinks that a sequence of `num_tokens` still needs."""
        if self.window is None:
            return 0
        return max(0, num_tokens - self.window + 1) // page_size

    def num_kept(self, num_tokens: int, page_size: int) -> int:
        """Pages that a sequence of `num_tokens` holds, when its next token is awaited."""
        end, first = -(-num_tokens // page_size), self.first_page(num_tokens, page_size)
        return end - first + min(first, self.sink_pages)


def layer_pages(
    layers: tuple[LayerSpec, ...], formats: tuple[KVFormat, ...], *, split_heads: bool = False
) -> list[LayerPages]:
    """The pages of each layer, and behind them the exact ones of those layers that have some.

    With `split_heads` each KV head of a layer without a window has pages of its own.
    """
    pages, exact = [], []
    for index, (layer, kv_format) in enumerate(zip(layers, formats, strict=True)):
        dims = index, layer.kv_heads, layer.head_dim
        if split_heads and layer.window is None:
            apart = layer.kv_heads
            pages.append(LayerPages(index, 1, layer.head_dim, kv_format, None, heads_apart=apart))
            continue
        sinks = layer.sink_tokens
        pages.append(LayerPages(*dims, kv_format, layer.window, min(sinks, 1), sinks))
        if (kept := kv_format.exact) is not None:
            exact.append(LayerPages(*dims, EXACT, kept.recent + 1, kept.sink_pages))
    return pages + exact


def group_pages(pages: list[LayerPages]) -> tuple[LayerGroup, ...]:
    """Groups pages that keep the same tokens, in order of first appearance.

    Exact pages have groups of their own, even where a layer's window is as wide, and so has each KV
    head that is apart: those of a layer follow each other.
    """
    members: dict[tuple[LayerGroup, object], list[int]] = {}
    num_layers = 1 + max(one.layer for one in pages)
    for index, one in enumerate(pages):
        kind = ("apart", index) if one.heads_apart else index >= num_layers
        for head in range(max(1, one.heads_apart)):
            empty = LayerGroup(one.window, one.sink_pages, one.sink_tokens, (), head)
            members.setdefault((empty, kind), []).append(index)
    return tuple(replace(group, members=tuple(own)) for (group, _), own in members.items())


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """A paged cache.

    Attributes:
      layers: one entry a layer.
      page_size: P, tokens a page.
      num_pages: N of each layer group, the null page included.
      formats: of each layer, how values are stored.
      layout: physical layout of a page; the backend's choice.
      split_heads: see `layer_pages`.
    """

    layers: tuple[LayerSpec, ...]
    page_size: int
    num_pages: tuple[int, ...]
    formats: tuple[KVFormat, ...]
    layout: Layout = "head_major"
    split_heads: bool = False

    @cached_property
    def pages(self) -> list[LayerPages]:
        """All pages of the cache; those of layer i are number i, exact ones come behind them."""
        return layer_pages(self.layers, self.formats, split_heads=self.split_heads)

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layer groups; `num_pages` has one entry for each."""
        return group_pages(self.pages)

    def bytes_per_page(self, group: int) -> int:
        """Bytes of one page id of a group, over all its layers."""
        return sum(self.pages[i].bytes_per_page(self.page_size) for i in self.groups[group].members)

    @property
    def nbytes(self) -> int:
        """Bytes of all page arrays."""
        return sum(n * self.bytes_per_page(g) for g, n in enumerate(self.num_pages))

    def sequence_bytes(self, num_tokens: int) -> int:
        """Bytes of the pages that a sequence of `num_tokens` holds, when its next token is awaited:
        parameters, partly filled pages and exact ones included."""
        return sum(
            group.num_kept(num_tokens, self.page_size) * self.bytes_per_page(g)
            for g, group in enumerate(self.groups)
        )

    def tokens_that_fit(self, nbytes: int) -> int:
        """Tokens of the longest sequence whose pages take at most so many bytes; at most 2^30."""
        lengths = range(1, 2**30 + 1)
        return bisect_right(lengths, nbytes, key=self.sequence_bytes)
