"""The static description of a paged cache: layers, page size, number of pages, formats, layout.

A layer has pages of its own. Where its format keeps some tokens exact, the layer has a second set
of pages for them (`formats.Exact`). The arrays are made by `state.init_cache`; which sequence holds
which page is decided on the host (`jaxkv.prefix`).
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from jaxkv.arith import ceil_div
from jaxkv.cache.formats import EXACT, KVFormat
from jaxkv.cache.platform import preferred_layout, stored_head_dim
from jaxkv.kept_pages import first_kept_page, num_kept_pages
from jaxkv.kv_format import PAGE_SIZES
from pallas_kernels.pages import Layout

MAX_SINK_TOKENS = PAGE_SIZES[0]


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What one layer of a model keeps for each token, and which keys its queries see.

    Example: `LayerSpec(kv_heads=8, head_dim=128, window=4096)`.

    Attributes:
      kv_heads: K.
      head_dim: D.
      window: number of keys that a query sees, its own included; None for all.
      sink_tokens: number of first tokens of the sequence that the window never moves past; 0 to
        MAX_SINK_TOKENS, so that they fit into one page of any size. Queries see them as if the
        tokens between them and the window did not exist (StreamingLLM, arXiv 2309.17453).

    Raises:
      ValueError: a number is not a positive integer.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    sink_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("kv_heads", "head_dim", "window"):
            value = getattr(self, name)
            if (name, value) != ("window", None) and (type(value) is not int or value < 1):
                raise ValueError(f"{name} of a layer must be a positive integer, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Pages that keep the same tokens. They share one pool of page ids and one page table.

    Attributes:
      window: number of last tokens that are kept; None for all.
      sink_pages: number of first pages that are kept, too.
      members: indices of the pages among `CacheSpec.pages`.
      head: where each KV head of a layer has a group of its own, the number of the head. The
        group's page ids are those of the head-th N pages of the layer's array. 0 elsewhere.
    """

    window: int | None
    sink_pages: int
    members: tuple[int, ...] = ()
    head: int = 0

    def first_page(self, num_tokens: int, page_size: int) -> int:
        """First page after the sink pages that a sequence of `num_tokens` still needs."""
        return first_kept_page(num_tokens, self.window, page_size)

    def num_kept(self, num_tokens: int, page_size: int) -> int:
        """Number of pages that a sequence of `num_tokens` holds before its next token."""
        return num_kept_pages(num_tokens, self.window, self.sink_pages, page_size)


@dataclass(frozen=True, kw_only=True)
class LayerPages:
    """The pages of one layer in one format: one entry of `KVCache.layers`.

    Attributes:
      layer: index of the layer.
      kv_heads: K of a page.
      head_dim: D of a page.
      format: how values are stored.
      groups: numbers of the groups that the pages belong to. There is one, or one for each KV head
        where each head has pages of its own; the array then has `len(groups)` times N pages.
    """

    layer: int
    kv_heads: int
    head_dim: int
    format: KVFormat
    groups: range

    def bytes_per_page(self, page_size: int) -> int:
        """Bytes of one page."""
        return self.format.bytes_per_page(page_size, self.kv_heads, self.head_dim)


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """A paged cache, as a static value that can be hashed.

    Example: two layers, of which the second one has a window; `plan` counts the pages.

        layers = (
            LayerSpec(kv_heads=2, head_dim=64),
            LayerSpec(kv_heads=2, head_dim=64, window=512),
        )
        spec = CacheSpec.plan(layers, choose_formats("bf16", layers), page_size=16, num_tokens=4096)
        cache = init_cache(spec)

    Attributes:
      layers: one entry per layer.
      page_size: P, tokens per page.
      num_pages: N of each layer group, the null page included.
      formats: for each layer, how values are stored.
      layout: physical layout of a page; by default the one that this platform reads fastest.
      split_heads: each KV head of a layer without a window has pages of its own.
    """

    layers: tuple[LayerSpec, ...]
    page_size: int
    num_pages: tuple[int, ...]
    formats: tuple[KVFormat, ...]
    layout: Layout = field(default_factory=preferred_layout)
    split_heads: bool = False

    @classmethod
    def plan(
        cls,
        layers: tuple[LayerSpec, ...],
        formats: tuple[KVFormat, ...],
        *,
        page_size: int,
        num_tokens: int,
        nbytes: int | None = None,
        split_heads: bool = False,
        most_pages: Callable[[LayerGroup], int | None] = lambda group: None,
    ) -> "CacheSpec":
        """Counts the pages of a cache, with layout and D as they should be on this platform.

        Args:
          layers: one entry per layer, with the model's D.
          formats: one per layer.
          page_size: P.
          num_tokens: number of tokens that each group has pages for.
          nbytes: bound on the bytes of all arrays. The cache then has pages for as many tokens as
            fit, `num_tokens` at most and one page at least. None for no bound.
          split_heads: see `CacheSpec`.
          most_pages: bound on the pages of a group, the null page not included; None for no bound.
        """
        empty = cls(
            layers=tuple(replace(x, head_dim=stored_head_dim(x.head_dim)) for x in layers),
            page_size=page_size,
            num_pages=(),
            formats=formats,
            split_heads=split_heads,
        )
        bounds = [most_pages(group) for group in empty.groups]

        def with_pages(count: int) -> CacheSpec:
            counts = (count if most is None else min(count, most) for most in bounds)
            return replace(empty, num_pages=tuple(1 + n for n in counts))

        most = ceil_div(num_tokens, page_size)
        if nbytes is None:
            return with_pages(most)
        sizes = range(1, most + 1)
        return with_pages(max(1, bisect_right(sizes, nbytes, key=lambda n: with_pages(n).nbytes)))

    @cached_property
    def _pages_and_groups(self) -> tuple[tuple[LayerPages, ...], tuple[LayerGroup, ...]]:
        """Groups come in the order of their first member.

        Exact pages have groups of their own, even where a layer's window is as wide. So has each
        layer of which heads have pages of their own, one group per head.
        """
        pages: list[LayerPages] = []
        groups: list[LayerGroup] = []
        first_group: dict[object, int] = {}

        def add(
            index: int, kv_format: KVFormat, kept: LayerGroup, owner: object, heads: int = 1
        ) -> None:
            first = first_group.setdefault((kept, owner), len(groups))
            if first == len(groups):
                groups.extend(replace(kept, head=head) for head in range(heads))
            pages.append(
                LayerPages(
                    layer=index,
                    kv_heads=self.layers[index].kv_heads // heads,
                    head_dim=self.layers[index].head_dim,
                    format=kv_format,
                    groups=range(first, first + heads),
                )
            )

        formats = list(zip(self.layers, self.formats, strict=True))
        for index, (layer, kv_format) in enumerate(formats):
            kept = LayerGroup(window=layer.window, sink_pages=min(layer.sink_tokens, 1))
            if self.split_heads and layer.window is None:
                add(index, kv_format, kept, ("heads of", index), layer.kv_heads)
            else:
                add(index, kv_format, kept, "layers")
        for index, (_, kv_format) in enumerate(formats):
            if (exact := kv_format.exact) is not None:
                kept = LayerGroup(window=exact.recent + 1, sink_pages=exact.sink_pages)
                add(index, EXACT, kept, "exact")
        for g, group in enumerate(groups):
            members = tuple(i for i, one in enumerate(pages) if g in one.groups)
            groups[g] = replace(group, members=members)
        return tuple(pages), tuple(groups)

    @property
    def pages(self) -> tuple[LayerPages, ...]:
        """All pages of the cache: entry i for layer i, then the exact ones."""
        return self._pages_and_groups[0]

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layer groups; `num_pages` has one entry for each."""
        return self._pages_and_groups[1]

    def exact_pages(self, layer: int) -> int | None:
        """Which entry of `pages` keeps exact tokens of a layer; None where the layer has none."""
        L = len(self.layers)
        return next((i for i, one in enumerate(self.pages) if i >= L and one.layer == layer), None)

    def bytes_per_page(self, group: int) -> int:
        """Bytes of one page id of a group, over all its layers."""
        return sum(self.pages[i].bytes_per_page(self.page_size) for i in self.groups[group].members)

    @property
    def nbytes(self) -> int:
        """Bytes of all page arrays."""
        return sum(n * self.bytes_per_page(g) for g, n in enumerate(self.num_pages))

    def sequence_bytes(self, num_tokens: int) -> int:
        """Bytes of the pages that a sequence of `num_tokens` holds before its next token:
        parameters, partly filled pages and exact pages included."""
        return sum(
            group.num_kept(num_tokens, self.page_size) * self.bytes_per_page(g)
            for g, group in enumerate(self.groups)
        )

    def tokens_that_fit(self, nbytes: int) -> int:
        """Tokens of the longest sequence whose pages take at most `nbytes`; at most 2^30."""
        lengths = range(1, 2**30 + 1)
        return bisect_right(lengths, nbytes, key=self.sequence_bytes)

    def check(self) -> None:
        """Checks that there can be such a cache.

        Raises:
          ValueError: the spec has no layer; another number of formats than layers; another number
            of `num_pages` than groups; a group with no page but the null page; different numbers of
            pages for the KV heads of one layer; sink tokens without a window, with a format that
            keeps exact tokens, or more than MAX_SINK_TOKENS.
        """
        if not self.layers:
            raise ValueError("a cache needs at least one layer")
        if len(self.formats) != len(self.layers):
            raise ValueError(f"{len(self.formats)} formats for {len(self.layers)} layers")
        N = self.num_pages
        if len(N) != len(self.groups):
            raise ValueError(f"num_pages has {len(N)} entries for {len(self.groups)} layer groups")
        if min(N) < 2:
            raise ValueError(f"num_pages = {N}: a group needs the null page and one more")
        if any(len({N[group] for group in one.groups}) > 1 for one in self.pages):
            raise ValueError(f"num_pages = {N}: heads of one layer need the same number")
        for layer, kv_format in zip(self.layers, self.formats, strict=True):
            if not layer.sink_tokens:
                continue
            if layer.window is None or not 0 < layer.sink_tokens <= MAX_SINK_TOKENS:
                raise ValueError(
                    f"sink_tokens = {layer.sink_tokens}, window = {layer.window}: sinks are at "
                    f"most {MAX_SINK_TOKENS} and stand before a window"
                )
            if kv_format.exact is not None:
                raise ValueError(
                    f"format {kv_format.name} does not go with sink tokens before a window"
                )
