"""What must hold of a cache and of the tables that a step reads it by, checked on the host.

For tests and for finding a fault: nothing here is called while an engine runs. Not here: a pool's
own books (`jaxkv.prefix`), which are taken as they are.
"""

import functools
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np

from jaxkv.cache.spec import CacheSpec
from jaxkv.cache.state import KVCache


class Holders(Protocol):
    """Who holds each page of a layer group; `jaxkv.prefix.PagePool` is one."""

    def state(self, page: int) -> tuple[int, int]:
        """Whether an index keeps a page, 0 or 1, and how many sequences hold it.

        Raises ValueError where the pool has no such page.
        """
        ...


def check_cache(cache: KVCache, spec: CacheSpec) -> None:
    """Checks that the arrays of a cache are those that its spec describes.

    Raises:
      ValueError: a layer, named, has another shape, dtype, layout, window or format than the
        spec's.
    """
    if len(cache.layers) != len(spec.pages):
        raise ValueError(f"the cache has {len(cache.layers)} layers, the spec {len(spec.pages)}")
    for index, (got, want) in enumerate(zip(cache.formats, spec.formats, strict=True)):
        if got != want:
            raise ValueError(f"layer {index}: format is {got.name}, the spec's {want.name}")
    for g, group in enumerate(spec.groups):
        for index in group.members:
            one, pages = spec.pages[index], cache.layers[index]
            dims = spec.page_size, one.kv_heads, one.head_dim
            N = max(1, one.heads_apart) * spec.num_pages[g]
            want = jax.eval_shape(functools.partial(one.format.init_pages, N, *dims, spec.layout))
            facts: dict[str, tuple[object, object]] = {
                "layout": (pages.layout, spec.layout),
                "group": (cache.groups_of(index)[group.head], g),
                "window": (cache.windows[cache.groups[index]], one.window),
            }
            for name, array in want.paged.items():
                got = pages.paged[name]
                facts[f"shape of {name}"] = got.shape, array.shape
                facts[f"dtype of {name}"] = got.dtype, array.dtype
            for name, (got, want) in facts.items():
                if got != want:
                    raise ValueError(f"layer {index}: {name} is {got}, the spec says {want}")


def check_tables(
    page_tables: Sequence[np.ndarray],
    kv_lens: np.ndarray,
    query_lens: np.ndarray,
    pools: Sequence[Holders],
    spec: CacheSpec,
) -> None:
    """Checks that a step may read and write through its page tables.

    In every layer group, each page of the tokens that a sequence's query tokens see is a page of
    the pool that a sequence holds, and a page that the step writes (one with a slot of a query
    token) is in no other sequence's live range, nor twice in its own.

    Args:
      page_tables: for each layer group `[B, M]` int32.
      kv_lens: `[groups, B]` int32, tokens in the pages of each group after the step.
      query_lens: `[B]` int32, how many of them the step writes.
      pools: who holds what, one a layer group.
      spec: of the cache.

    Raises:
      ValueError: naming group, sequence and page.
    """
    for group, (table, lens, pool) in enumerate(zip(page_tables, kv_lens, pools, strict=True)):
        readers: dict[int, list[int]] = {}
        written: dict[int, int] = {}
        for b, (row, length, queries) in enumerate(zip(table, lens, query_lens, strict=True)):
            where = f"group {group}, sequence {b}"
            first_query = int(length) - int(queries)
            num_live = -(-int(length) // spec.page_size)
            if num_live > len(row):
                raise ValueError(f"{where}: {length} tokens need {num_live} pages, M = {len(row)}")
            first_written = first_query // spec.page_size
            first_seen = spec.groups[group].first_page(first_query, spec.page_size)
            sinks = min(spec.groups[group].sink_pages, first_seen)
            for place in (*range(sinks), *range(first_seen, num_live)):
                page = int(row[place])
                if page == 0:
                    raise ValueError(f"{where}: page {place} of its tokens is the null page")
                if pool.state(page)[1] == 0:
                    raise ValueError(f"{where}: page {page} is in use and nobody holds it")
                readers.setdefault(page, []).append(b)
                if queries and place >= first_written:
                    written[page] = b
        for page, b in written.items():
            if len(readers[page]) > 1:
                raise ValueError(
                    f"group {group}, sequence {b}: page {page} is written, and is in the live "
                    f"ranges of sequences {readers[page]}"
                )
