"""Computes a text through a paged cache of its own, chunk by chunk, as the engine computes a long
prompt. With a compression, the first part of the text is a context that drops tokens once.
"""

from collections.abc import Callable, Iterator, Sequence
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
from jaxkv.compress import Compression, ScoreMethod
from jaxkv.compress.compression import kept_layers
from jaxkv.compress.compressor import Compressor
from jaxkv.compress.kept import Row
from jaxkv.model import DecodeModel

OnChunk = Callable[[int], object]  # called with the number of tokens of each computed chunk


def ignore(num_tokens: int) -> None:
    """An `OnChunk` that does nothing."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a cache stores a text.

    Attributes:
      formats: the KV format of each layer.
      compression: which tokens are dropped; None keeps all. Score methods drop once, after the
        context: the interval is ignored.
    """

    formats: tuple[KVFormat, ...]
    compression: Compression | None = None


class TextFunctions:
    """The compiled functions of one model, for all texts and settings. Share one object: compiling
    takes longer than computing a text of a thousand tokens.

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
        self._compressors: dict[ScoreMethod, Compressor] = {}

    def compressor(self, method: ScoreMethod, cache: KVCache) -> Compressor:
        """Returns the functions that drop tokens by a score method."""
        if method not in self._compressors:
            self._compressors[method] = Compressor(self.model, cache, method)
        return self._compressors[method]


class PagedText:
    """One text in a cache of its own, computed chunk by chunk.

    Attributes:
      spec: what the cache holds.
      cache: the cache.
      tables: `[groups, M]` int32, page ids.
      dropped: `[groups]` int32, number of tokens that each layer group has dropped.
    """

    def __init__(
        self,
        functions: TextFunctions,
        setting: Setting,
        *,
        num_tokens: int,
        page_size: int,
        chunk: int,
    ):
        """Makes an empty cache for `num_tokens` tokens, which are computed `chunk` at a time.

        Raises:
          ValueError: the setting does not go with the model, or its parts not with each other.
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
        self._tokens: list[int] = []
        self._chunk, self._functions = chunk, functions
        self._compression = setting.compression

    def compute(self, tokens: Sequence[int], on_chunk: OnChunk = ignore) -> Iterator[jax.Array]:
        """Computes the next tokens; yields the hidden states `[n, E]` of each chunk of n."""
        for start in range(0, len(tokens), self._chunk):
            part = tokens[start : start + self._chunk]
            hidden = self._step(part)
            on_chunk(len(part))
            yield hidden

    def _step(self, tokens: Sequence[int]) -> jax.Array:
        n = len(tokens)
        self._tokens += tokens
        length = len(self._tokens)
        inputs = StepInputs(
            tokens=jnp.asarray(np.pad(np.asarray(tokens, np.int32), (0, self._chunk - n))),
            seq_lens=jnp.array([length], jnp.int32),
            query_starts=jnp.array([0, n], jnp.int32),
            page_tables=tuple(jnp.asarray(self.tables[:, None])),
            kv_lens=jnp.asarray(length - self.dropped[:, None]),
        )
        functions = self._functions
        hidden, self.cache = functions.step(functions.model.params, self.cache, inputs)
        return hidden[:n]

    def drop(self) -> None:
        """Drops tokens of the text so far, if the setting has a score method."""
        if self._compression is None or self._compression.is_window:
            return
        compressor = self._functions.compressor(self._compression.score_method(), self.cache)
        n = len(self._tokens)
        row = Row(tables=self.tables, dropped=self.dropped, num_tokens=np.int32(n))
        kept = compressor.choose(self.cache, row, self._tokens, self._compression.budget)
        if kept is not None:
            self.cache = compressor.move(self.cache, kept, row, self.tables)
            for group, length in compressor.lens(kept).items():
                self.dropped[group] = n - length

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that the text so far needs."""
        P, n = self.spec.page_size, len(self._tokens)
        return sum(
            group.num_kept(n - int(dropped), P) * self.spec.bytes_per_page(g)
            for g, (group, dropped) in enumerate(zip(self.spec.groups, self.dropped, strict=True))
        )


@dataclass(frozen=True)
class Reading:
    """What a model computes of a text of n tokens, the first c of them context.

    Attributes:
      hidden: `[n - c, E]`, hidden states of the tokens after the context.
      nbytes: bytes of all pages that the text holds at its end, parameters of formats included.
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
    on_chunk: OnChunk = ignore,
) -> Reading:
    """Computes a text in a cache of its own.

    Args:
      functions: the decoder's functions.
      tokens: tokens of the text.
      setting: how the cache is set up.
      page_size: tokens per page.
      context: number of first tokens; after them the cache drops tokens if the setting says so.
      chunk: tokens that are computed at once.
      on_chunk: called with the number of tokens of each computed chunk.

    Raises:
      ValueError: more tokens than the model takes, or a setting that does not go with the model.
    """
    _check_length(functions.model, tokens)
    text = PagedText(functions, setting, num_tokens=len(tokens), page_size=page_size, chunk=chunk)
    for _ in text.compute(tokens[:context], on_chunk):
        pass  # hidden states of the context are not needed
    if context:
        text.drop()
    parts = list(text.compute(tokens[context:], on_chunk))
    return Reading(jnp.concatenate(parts), text.nbytes)


def kv_ranges(
    model: DecodeModel,
    tokens: Sequence[int],
    *,
    chunk: int = 64,
    on_chunk: OnChunk = ignore,
) -> KVRanges:
    """Measures the largest magnitudes of K and V on a text, by layer and head.

    Raises:
      ValueError: no tokens, more than the model takes, or a value that is no range (`KVRanges`).
    """
    if not tokens:
        raise ValueError("the text must have at least one token")
    _check_length(model, tokens)
    setting = Setting(formats=choose_formats("f32", model.layers))
    functions = TextFunctions(model)
    text = PagedText(functions, setting, num_tokens=len(tokens), page_size=64, chunk=chunk)
    for _ in text.compute(tokens, on_chunk):
        pass
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
        raise ValueError(
            f"the text has {len(tokens)} tokens; the model takes at most {model.max_positions}"
        )
