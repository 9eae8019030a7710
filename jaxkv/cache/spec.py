"""The static description of a paged cache: layers, page size, pages, format, layout.

Not here: the arrays (`state`), nor which page belongs to whom (`jaxkv.prefix`).
"""

from dataclasses import dataclass
from functools import cached_property

from jaxkv.cache.formats import KVFormat
from pallas_kernels.pages import Layout


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What one layer keeps for each token.

    Attributes:
      kv_heads: K.
      head_dim: D.
      window: keys a query sees, itself included; None sees all.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True)
class LayerGroup:
    """Layers with the same window: they share one pool of page ids and one page table.

    Attributes:
      window: that window.
      layers: their indices.
    """

    window: int | None
    layers: tuple[int, ...]


def group_layers(layers: tuple[LayerSpec, ...]) -> tuple[LayerGroup, ...]:
    """Groups layers by window, in order of first appearance."""
    members: dict[int | None, list[int]] = {}
    for index, layer in enumerate(layers):
        members.setdefault(layer.window, []).append(index)
    return tuple(LayerGroup(window, tuple(indices)) for window, indices in members.items())


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """A paged cache.

    Attributes:
      layers: one entry a layer.
      page_size: P, tokens a page.
      num_pages: N of each layer group, the null page included.
      format: how values are stored.
      layout: physical layout of a page; the backend's choice.
    """

    layers: tuple[LayerSpec, ...]
    page_size: int
    num_pages: tuple[int, ...]
    format: KVFormat
    layout: Layout = "token_major"

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layer groups; `num_pages` has one entry for each."""
        return group_layers(self.layers)

    def bytes_per_page(self, group: int) -> int:
        """Bytes of one page id of a group, over all its layers."""
        return self.page_size * sum(
            self.format.bytes_per_token(self.layers[i].kv_heads, self.layers[i].head_dim)
            for i in self.groups[group].layers
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all page arrays."""
        return sum(n * self.bytes_per_page(g) for g, n in enumerate(self.num_pages))
