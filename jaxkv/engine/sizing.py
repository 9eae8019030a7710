"""How large an engine's cache is, the longest sequence that it takes, and what its formats save.

A group with a window needs pages only for windows and chunks: pages before a window are freed while
their sequence runs. `config` has the values that a user may ask for.
"""

from dataclasses import dataclass, replace

from jaxkv.arith import ceil_div, round_up
from jaxkv.cache import CacheSpec, LayerGroup, choose_formats, format_id
from jaxkv.compress.compression import kept_layers
from jaxkv.engine.config import EngineConfig
from jaxkv.model import DecodeModel


def plan_cache(model: DecodeModel, config: EngineConfig) -> CacheSpec:
    """Sizes the cache: see `EngineConfig.pool_tokens`.

    A group with a window has pages for twice what the windows and chunks of all sequences take: the
    other half keeps windows that later requests continue from.

    Raises:
      ValueError: the formats do not fit the model (`jaxkv.cache.choose_formats`), or the method
        does not go with both (`jaxkv.compress.Compression.check`).
    """
    P = config.page_size
    formats = choose_formats(config.kv_format, model.layers, config.kv_ranges)
    layers, split_heads = kept_layers(config.compression, model.layers, formats)

    def most_pages(group: LayerGroup) -> int | None:
        if group.window is None:
            return None
        return 2 * config.max_sequences * _sliding_pages(group, config)

    num_tokens, nbytes = config.pool_tokens, None
    if num_tokens is None:
        num_tokens = config.max_sequences * round_up(_asked_length(model, config), P)
        nbytes = config.pool_bytes
    return CacheSpec.plan(
        layers,
        formats,
        page_size=P,
        num_tokens=num_tokens,
        nbytes=nbytes,
        split_heads=split_heads,
        most_pages=most_pages,
    )


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a cache's formats take, compared with bfloat16 in pages of the same size.

    Attributes:
      formats: their names.
      num_tokens: length of the sequence that the bytes are measured on.
      bytes_per_token: bytes of its pages, with parameters, partly filled pages and exact tokens.
      bf16_bytes_per_token: the same in bfloat16.
      memory: bytes.
      tokens_that_fit, bf16_tokens_that_fit: of one sequence, in that memory.
    """

    formats: str
    num_tokens: int
    bytes_per_token: float
    bf16_bytes_per_token: float
    memory: int
    tokens_that_fit: int
    bf16_tokens_that_fit: int

    @property
    def ratio(self) -> float:
        """Bytes per token, as a part of those in bfloat16."""
        return self.bytes_per_token / self.bf16_bytes_per_token


def footprint(spec: CacheSpec, *, num_tokens: int = 4096, memory: int = 1 << 30) -> Footprint:
    """Measures a cache's formats; see `Footprint`."""
    bf16 = replace(spec, formats=choose_formats("bf16", spec.layers))
    return Footprint(
        formats=format_id(spec.formats),
        num_tokens=num_tokens,
        bytes_per_token=spec.sequence_bytes(num_tokens) / num_tokens,
        bf16_bytes_per_token=bf16.sequence_bytes(num_tokens) / num_tokens,
        memory=memory,
        tokens_that_fit=spec.tokens_that_fit(memory),
        bf16_tokens_that_fit=bf16.tokens_that_fit(memory),
    )


def cache_capacity(spec: CacheSpec, config: EngineConfig) -> int | None:
    """Tokens of the longest sequence that a cache can hold; None where it sets no limit."""
    tokens = [
        (num_pages - 1) * spec.page_size
        for num_pages, group in zip(spec.num_pages, spec.groups, strict=True)
        if group.window is None or num_pages - 1 < _sliding_pages(group, config)
    ]
    return min(tokens, default=None)


def longest_sequence(model: DecodeModel, config: EngineConfig, spec: CacheSpec) -> int:
    """Tokens of the longest sequence, prompt and answer, that an engine takes."""
    capacity = cache_capacity(spec, config)
    longest = _asked_length(model, config)
    return longest if capacity is None else min(longest, capacity)


def _asked_length(model: DecodeModel, config: EngineConfig) -> int:
    asked = config.max_length or model.max_positions
    if config.compression is not None and config.compression.is_window:
        return asked  # no two tokens that see each other are farther apart than a window is wide
    return min(asked, model.max_positions)


def _sliding_pages(group: LayerGroup, config: EngineConfig) -> int:
    """Most pages that a window, a chunk and the sinks of one sequence touch."""
    assert group.window is not None
    lookback = 0 if config.compression is None else config.compression.lookback
    tokens = group.window + lookback + config.token_budget
    return ceil_div(tokens, config.page_size) + 1 + group.sink_pages
