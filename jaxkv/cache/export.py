"""Pages taken out of a cache and put into another one, on another device or from a file."""

import dataclasses
from dataclasses import dataclass

import jax

from jaxkv.cache.choice import format_id
from jaxkv.cache.state import KVCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExportedPages:
    """Pages of one layer group taken out of a cache, for another device or a file.

    What a layer's pages hold depends on the formats of the layers before it, so that the formats of
    the whole cache are part of what the pages are.

    Attributes:
      layers: for each layer of the group its arrays by name, `[n, ...]`, pages first.
      group: number of the group; static.
      formats: names of the formats of all layers of the cache (`choice.format_id`); static.
      layout: physical layout; static.
    """

    layers: tuple[dict[str, jax.Array], ...]
    group: int = dataclasses.field(metadata=dict(static=True))
    formats: str = dataclasses.field(metadata=dict(static=True))
    layout: str = dataclasses.field(metadata=dict(static=True))


def export_pages(cache: KVCache, group: int, page_ids: jax.Array) -> ExportedPages:
    """Takes pages `page_ids` `[n]` of a group out of a cache; the cache stays as it is."""
    indices = cache.spec.groups[group].members
    return ExportedPages(
        layers=tuple(
            {name: x.at[page_ids].get(mode="clip") for name, x in cache.layers[i].paged.items()}
            for i in indices
        ),
        group=group,
        formats=format_id(cache.spec.formats),
        layout=cache.spec.layout,
    )


def import_pages(
    cache: KVCache, group: int, page_ids: jax.Array, exported: ExportedPages
) -> KVCache:
    """Puts exported pages into a cache, at `page_ids` `[n]` of a group.

    Raises:
      ValueError: another group, formats, layout, number of layers or page shape than the cache's.
    """
    indices = cache.spec.groups[group].members
    theirs = exported.formats, exported.layout, exported.group, len(exported.layers)
    ours = format_id(cache.spec.formats), cache.spec.layout, group, len(indices)
    if theirs != ours:
        words = "format {} ({}), group {}, {} layers"
        raise ValueError(
            f"pages of {words.format(*theirs)}, do not fit a cache of {words.format(*ours)}"
        )
    for index, arrays in zip(indices, exported.layers, strict=True):
        pages = cache.layers[index]
        own = pages.paged
        shapes = {name: array.shape for name, array in arrays.items()}
        expected = {name: (*page_ids.shape, *array.shape[1:]) for name, array in own.items()}
        if shapes != expected:
            raise ValueError(f"exported pages have shapes {shapes}, the group takes {expected}")
        put = {name: own[name].at[page_ids].set(arrays[name], mode="drop") for name in own}
        cache = cache.replace_layer(index, dataclasses.replace(pages, **put))
    return cache
