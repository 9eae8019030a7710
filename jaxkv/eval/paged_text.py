"""A text through a paged cache of its own, chunk by chunk, as the engine computes a long prompt.

Where tokens are dropped, the first part of the text is the context that loses them. Not here: what
the hidden states say (`quality`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.attention import AttentionBackend, StepInputs
from jaxkv.cache import (
    CacheSpec,
    KVCache,
    KVFormat,
    KVRanges,
    choose_formats,
    gather_dense,
    init_cache,
)
from jaxkv.compress import Compression, Compressor, Row, kept_layers
from jaxkv.model import DecodeModel

OnChunk = Callable[[int], object]  # gets the tokens of each chunk that is done


def nothing(num_tokens: int) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a cache keeps a text.

    Attributes:
      formats: of each layer.
      compression: which tokens are dropped; None keeps all. Score methods drop once.
    """

    formats: tuple[KVFormat, ...]
    compression: Compression | None = None


class TextFunctions:
    """The compiled functions of one model, for all texts and settings: compiling them takes longer
    than a text of a thousand tokens does.

    Attributes:
      model: the decoder.
      step: computes a chunk; its cache is donated.
    """

    def __init__(self, model: DecodeModel):
        """Compiles nothing yet."""

        def step(params: Any, cache: KVCache, inputs: StepInputs) -> tuple[jax.Array, KVCache]:
            return model.forward(params, cache, inputs, AttentionBackend())

        self.model = model
        self.step: Callable[..., tuple[jax.Array, KVCache]] = jax.jit(step, donate_argnames="cache")
        self._compressors: dict[str, Compressor] = {}

    def compressor(self, compression: Compression, cache: KVCache) -> Compressor:
        """The functions that drop tokens by a score method."""
        name = compression.method
        if name not in self._compressors:
            self._compressors[name] = Compressor(self.model, cache, compression.score_method())
        return self._compressors[name]


class PagedText:
    """One sequence in a cache of its own, computed chunk by chunk."""

    def __init__(
        self,
        functions: TextFunctions,
        setting: Setting,
        *,
        num_tokens: int,
        page_size: int,
        chunk: int,
    ):
        """Makes an empty cache for `num_tokens` tokens, to be computed `chunk` at a time.

        Raises:
          ValueError: the setting does not fit the model, or itself.
        """
        formats = setting.formats
        layers, split_heads = kept_layers(setting.compression, functions.model.layers, formats)
        self.spec = CacheSpec.plan(
            layers, formats, page_size=page_size, num_tokens=num_tokens, split_heads=split_heads
        )
        self.cache = init_cache(self.spec)
        heads, N = np.array([group.head for group in self.spec.groups]), self.spec.num_pages[0]
        self.tables = (np.arange(1, N)[None] + N * heads[:, None]).astype(np.int32)
        self.dropped = np.zeros(len(heads), np.int32)
        self._length, self._chunk, self._functions = 0, chunk, functions
        self._compression = setting.compression

    def push(self, tokens: Sequence[int]) -> jax.Array:
        """Computes the next tokens, at most a chunk; returns their hidden states `[n, E]`."""
        n = len(tokens)
        padded = np.zeros(self._chunk, np.int32)
        padded[:n] = tokens
        self._length += n
        inputs = StepInputs(
            tokens=jnp.asarray(padded),
            seq_lens=jnp.array([self._length], jnp.int32),
            query_starts=jnp.array([0, n], jnp.int32),
            page_tables=tuple(jnp.asarray(self.tables[:, None])),
            kv_lens=jnp.asarray(self._length - self.dropped[:, None]),
        )
        functions = self._functions
        hidden, self.cache = functions.step(functions.model.params, self.cache, inputs)
        return hidden[:n]

    def drop(self, tokens: Sequence[int]) -> None:
        """Drops some of the tokens so far, which are `tokens`, where the setting does."""
        if self._compression is None or self._compression.is_window:
            return
        keep = self._compression.budget.keep(len(tokens))
        if keep == len(tokens):
            return
        compressor = self._functions.compressor(self._compression, self.cache)
        row = Row(tables=self.tables, dropped=self.dropped, num_tokens=np.int32(len(tokens)))
        kept = compressor.choose(self.cache, row, tokens, keep)
        self.cache = compressor.move(self.cache, kept, row, self.tables)
        for group, left in kept.lens(self.cache, compressor.layers).items():
            self.dropped[group] = len(tokens) - left

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that the tokens so far take."""
        P = self.spec.page_size
        return sum(
            group.num_kept(self._length - int(dropped), P) * self.spec.bytes_per_page(g)
            for g, (group, dropped) in enumerate(zip(self.spec.groups, self.dropped, strict=True))
        )


@dataclass(frozen=True)
class Reading:
    """What a model makes of a text of n tokens, c of them context.

    Attributes:
      hidden: `[n - c, E]`, hidden states of the tokens behind the context.
      nbytes: of all pages that the sequence holds at its end, parameters included.
    """

    hidden: jax.Array
    nbytes: int


def read(
    functions: TextFunctions,
    tokens: Sequence[int],
    setting: Setting,
    *,
    page_size: int,
    context: int = 0,
    chunk: int = 64,
    on_chunk: OnChunk = nothing,
) -> Reading:
    """Computes a text.

    Args:
      functions: of the decoder.
      tokens: of the text.
      setting: of the cache.
      page_size: P.
      context: tokens that lose some where the setting says so.
      chunk: tokens that are computed at once.
      on_chunk: called with the number of tokens of each chunk that is done.

    Raises:
      ValueError: more tokens than the model takes, or a setting that does not fit.
    """
    _check_length(functions.model, tokens)
    text = PagedText(functions, setting, num_tokens=len(tokens), page_size=page_size, chunk=chunk)
    for start in range(0, context, chunk):
        part = tokens[start : min(start + chunk, context)]
        text.push(part)
        on_chunk(len(part))
    if context:
        text.drop(tokens[:context])
    parts = []
    for start in range(context, len(tokens), chunk):
        parts.append(text.push(tokens[start : start + chunk]))
        on_chunk(len(parts[-1]))
    return Reading(jnp.concatenate(parts), text.nbytes)


def kv_ranges(
    model: DecodeModel,
    tokens: Sequence[int],
    *,
    chunk: int = 64,
    on_chunk: OnChunk = nothing,
) -> KVRanges:
    """The largest magnitudes of K and V that a model makes of a text, by layer and head.

    Raises:
      ValueError: no tokens, more than the model takes, or a range that none can be (`KVRanges`).
    """
    if not tokens:
        raise ValueError("a text of one token at least is needed")
    _check_length(model, tokens)
    setting, page_size = Setting(formats=choose_formats("f32", model.layers)), 64
    functions = TextFunctions(model)
    text = PagedText(functions, setting, num_tokens=len(tokens), page_size=page_size, chunk=chunk)
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        text.push(part)
        on_chunk(len(part))
    largest = []
    for layer in range(len(model.layers)):
        (group,) = text.cache.groups_of(layer)
        table = jnp.asarray(text.tables[group][None])
        k, v = gather_dense(text.cache, layer, table)
        heads = [jnp.abs(x[0, : len(tokens)]).max(axis=(0, 2)) for x in (k, v)]
        largest.append(tuple(jnp.stack(heads, axis=1).reshape(-1).tolist()))
    return KVRanges(tuple(largest))


def _check_length(model: DecodeModel, tokens: Sequence[int]) -> None:
    if len(tokens) > model.max_positions:
        raise ValueError(f"{len(tokens)} tokens; the model takes {model.max_positions} at most")
