"""Checks, on the host, of the page tables that a step reads the cache by.

They serve tests and the search for a fault; an engine does not call them. How each pool counts its
own pages is checked in `jaxkv.prefix`.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxkv.arith import ceil_div
from jaxkv.cache.spec import CacheSpec


class Holders(Protocol):
    """Knows who holds each page of a layer group; `jaxkv.prefix.PagePool` is one."""

    def state(self, page: int) -> tuple[int, int]:
        """Whether an index keeps a page, 0 or 1, and how many sequences hold it.

        Raises ValueError where the pool has no such page.
        """
        ...


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
      pools: one per layer group.
      spec: what the cache holds.

    Raises:
      ValueError: naming group, sequence and page.
    """
    for group, (table, lens, pool) in enumerate(zip(page_tables, kv_lens, pools, strict=True)):
        readers: dict[int, list[int]] = {}
        written: dict[int, int] = {}
        for b, (row, length, queries) in enumerate(zip(table, lens, query_lens, strict=True)):
            where = f"group {group}, sequence {b}"
            first_query = int(length) - int(queries)
            num_live = ceil_div(int(length), spec.page_size)
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
                    raise ValueError(f"{where}: page {page} is in use and no sequence holds it")
                readers.setdefault(page, []).append(b)
                if queries and place >= first_written:
                    written[page] = b
        for page, b in written.items():
            if len(readers[page]) > 1:
                raise ValueError(
                    f"group {group}, sequence {b}: page {page} is written, and is in the live "
                    f"ranges of sequences {readers[page]}"
                )
