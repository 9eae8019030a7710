"""The host side of a cache: page pools, prefix index and page tables, made from spec and config."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxkv.arith import ceil_div
from jaxkv.cache import CacheSpec
from jaxkv.engine.config import EngineConfig
from jaxkv.prefix import (
    Event,
    PagePool,
    PageTables,
    Pins,
    PrefixIndex,
    TokenDropper,
    make_index,
    make_pool,
)


@dataclass(frozen=True)
class HostSide:
    """The parts of `jaxkv.prefix` that one engine uses.

    Attributes:
      pools: the page pool of each layer group.
      index: the index of cached prefixes; None if the config switches it off.
      pins: prefixes that stay in the index; None without an index.
      tables: a row of pages for each running sequence.
      dropper: drops tokens of rows.
    """

    pools: list[PagePool]
    index: PrefixIndex | None
    pins: Pins | None
    tables: PageTables
    dropper: TokenDropper

    @classmethod
    def build(
        cls,
        spec: CacheSpec,
        config: EngineConfig,
        max_length: int,
        page_events: Callable[[Event], None] | None,
    ) -> "HostSide":
        """Makes the parts; all pages are free.

        Args:
          spec: what the cache holds.
          config: sizes and choices.
          max_length: tokens of the longest sequence.
          page_events: called with an event for each page that the index stores, changes or evicts.
        """
        P, compression = spec.page_size, config.compression
        lookback = 0 if compression is None else compression.lookback
        pools = [
            make_pool(n, group.window, null=group.head * n)
            for n, group in zip(spec.num_pages, spec.groups, strict=True)
        ]
        # If a method observes queries again, windows keep the tokens that these queries see.
        windows = [
            group.window if group.window is None else group.window + lookback
            for group in spec.groups
        ]
        sink_pages = [group.sink_pages for group in spec.groups]
        index = pins = None
        if config.prefix_cache:
            index = make_index(
                pools, P, windows, sink_pages, eviction=config.eviction, events=page_events
            )
            pins = Pins(index)
        tables = PageTables(
            pools,
            P,
            max_sequences=config.max_sequences,
            max_pages=ceil_div(max_length, P),
            windows=windows,
            sink_pages=sink_pages,
            index=index,
            pins=pins,
        )
        return cls(pools, index, pins, tables, TokenDropper(tables, index))
