"""A text's log-probabilities through paged caches of several settings, beside the full one's.

One sequence is computed in chunks, in every cache alike: what the engine does with a long prompt.
Where tokens are dropped, the first part of the text is the context that loses them, and what
follows is measured.
Distances are those that the field reports for caches: perplexity, KL(full || compressed) of each
next-token distribution, and how often the likeliest token is the same. Not here: text, models,
tables (the scripts have them).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.attention import AttentionBackend, StepInputs, preferred_layout
from jaxkv.cache import (
    CacheSpec,
    KVCache,
    KVFormat,
    KVRanges,
    choose_formats,
    gather_dense,
    group_pages,
    init_cache,
    layer_pages,
)
from jaxkv.compress import Compression, Compressor, Row
from jaxkv.engine.model import DecodeModel

LOGIT_ROWS = 64  # at once: those of a chunk would be larger than the model


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a cache keeps a text.

    Attributes:
      formats: of each layer.
      compression: which tokens are dropped; None keeps all. Score methods drop once.
    """

    formats: tuple[KVFormat, ...]
    compression: Compression | None = None


@dataclass(frozen=True)
class Quality:
    """How one cache does on a text of n tokens, c of them context (0 where there is none).

    Attributes:
      perplexity: exp of the mean negative log-probability of tokens c + 1 .. n - 1.
      stderr: of that mean, nats.
      kl_mean, kl_p99, kl_max: KL(full || this) of the distributions after tokens c .. n - 2, nats.
      top1: share of them with the same likeliest token as the full cache's.
      nbytes: of all pages that the sequence holds at its end, parameters included.
    """

    perplexity: float
    stderr: float
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1: float
    nbytes: int


class PagedText:
    """One sequence in a cache of its own, computed chunk by chunk."""

    def __init__(
        self,
        model: DecodeModel,
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
        layers, split_heads = model.layers, False
        if setting.compression is not None:
            setting.compression.check(layers, setting.formats)
            layers = setting.compression.layers(layers)
            split_heads = setting.compression.splits_heads
        pages = layer_pages(layers, setting.formats, split_heads=split_heads)
        groups = group_pages(pages)
        N = -(-num_tokens // page_size) + 1
        self.spec = CacheSpec(
            layers=layers,
            page_size=page_size,
            num_pages=(N,) * len(groups),
            formats=setting.formats,
            layout=preferred_layout(),
            split_heads=split_heads,
        )
        self.cache = init_cache(self.spec)
        self.tables = np.stack([np.arange(1, N) + group.head * N for group in groups])
        self.tables = self.tables.astype(np.int32)
        self.dropped = np.zeros(len(groups), np.int32)
        self._length, self._chunk, self._model = 0, chunk, model
        self._compression = setting.compression

        def step(params: Any, cache: KVCache, inputs: StepInputs) -> tuple[jax.Array, KVCache]:
            return model.forward(params, cache, inputs, AttentionBackend())

        self._step: Callable[..., tuple[jax.Array, KVCache]] = jax.jit(
            step, donate_argnames="cache"
        )

    def push(self, tokens: Sequence[int]) -> jax.Array:
        """Computes the next tokens, at most a chunk; returns their hidden states `[chunk, E]`."""
        n = len(tokens)
        padded = np.zeros(self._chunk, np.int32)
        padded[:n] = tokens
        self._length += n
        inputs = StepInputs(
            tokens=jnp.asarray(padded),
            kv_lens=jnp.array([self._length], jnp.int32),
            query_starts=jnp.array([0, n], jnp.int32),
            page_tables=tuple(jnp.asarray(self.tables[:, None])),
            dropped=jnp.asarray(self.dropped[:, None]) if self.drops else None,
        )
        hidden, self.cache = self._step(self._model.params, self.cache, inputs)
        return hidden

    @property
    def drops(self) -> bool:
        """The setting drops tokens of a context."""
        return self._compression is not None and not self._compression.is_window

    def drop(self, tokens: Sequence[int]) -> None:
        """Drops some of the tokens so far, which are `tokens`, where the setting does."""
        if self._compression is None or self._compression.is_window:
            return
        keep = self._compression.budget.keep(len(tokens))
        if keep == len(tokens):
            return
        compressor = Compressor(self._model, self.cache, self._compression.score_method())
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


def measure(
    model: DecodeModel,
    tokens: Sequence[int],
    choices: Mapping[str, Setting],
    *,
    page_size: int,
    context: int = 0,
    chunk: int = 64,
    on_chunk: Callable[[int], object] = lambda num_tokens: None,
) -> dict[str, Quality]:
    """Measures caches on a text, beside one of float32.

    Args:
      model: the decoder.
      tokens: of the text, two at least.
      choices: settings by a name.
      page_size: P.
      context: tokens that lose some where a setting says so, and are not measured.
      chunk: tokens that are computed at once.
      on_chunk: called with the number of tokens of each chunk that is done.

    Returns:
      By the names of `choices`, and `f32` for the full cache.

    Raises:
      ValueError: fewer than two tokens behind the context, or more than the model takes, or a
        setting that does not fit.
    """
    if len(tokens) - context < 2:
        raise ValueError("a text of two tokens at least is needed")
    _check_length(model, tokens)
    sizes = dict(num_tokens=len(tokens), page_size=page_size, chunk=chunk)
    full = Setting(formats=choose_formats("f32", model.layers))
    texts = {
        name: PagedText(model, setting, **sizes)
        for name, setting in ({"f32": full} | dict(choices)).items()
    }

    @jax.jit
    def distances(
        params: Any, own: jax.Array, full: jax.Array, targets: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        own, full = (jax.nn.log_softmax(model.logits(params, rows)) for rows in (own, full))
        loss = -jnp.take_along_axis(own, targets[:, None], axis=-1)[:, 0]
        divergence = (jnp.exp(full) * (full - own)).sum(axis=-1)
        return loss, divergence, own.argmax(axis=-1) == full.argmax(axis=-1)

    found: dict[str, list[np.ndarray]] = {name: [] for name in texts}
    for start in range(0, context, chunk):
        part = tokens[start : min(start + chunk, context)]
        for text in texts.values():
            text.push(part)
        on_chunk(len(part))
    for text in texts.values() if context else ():
        text.drop(tokens[:context])
    for start in range(context, len(tokens), chunk):
        part, targets = tokens[start : start + chunk], tokens[start + 1 : start + chunk + 1]
        hidden = {name: text.push(part) for name, text in texts.items()}
        for first in range(0, len(targets), LOGIT_ROWS):
            labels = np.zeros(LOGIT_ROWS, np.int32)
            here = targets[first : first + LOGIT_ROWS]
            labels[: len(here)] = here
            for name, rows in hidden.items():
                pair = (_rows(x, first) for x in (rows, hidden["f32"]))
                result = distances(model.params, *pair, labels)
                found[name].append(np.array(result, np.float64)[:, : len(here)])
        on_chunk(len(part))
    return {
        name: _summary(np.concatenate(parts, axis=1), texts[name].nbytes)
        for name, parts in found.items()
    }


def kv_ranges(
    model: DecodeModel,
    tokens: Sequence[int],
    *,
    chunk: int = 64,
    on_chunk: Callable[[int], object] = lambda num_tokens: None,
) -> KVRanges:
    """The largest magnitudes of K and V that a model makes of a text, by layer and head.

    Raises:
      ValueError: no tokens, more than the model takes, or a range that none can be (`KVRanges`).
    """
    if not tokens:
        raise ValueError("a text of one token at least is needed")
    _check_length(model, tokens)
    setting, page_size = Setting(formats=choose_formats("f32", model.layers)), 64
    text = PagedText(model, setting, num_tokens=len(tokens), page_size=page_size, chunk=chunk)
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        text.push(part)
        on_chunk(len(part))
    largest = []
    for layer in range(len(model.layers)):
        table = jnp.asarray(text.tables[text.cache.groups[layer]][None])
        k, v = gather_dense(text.cache, layer, table)
        heads = [jnp.abs(x[0, : len(tokens)]).max(axis=(0, 2)) for x in (k, v)]
        largest.append(tuple(jnp.stack(heads, axis=1).reshape(-1).tolist()))
    return KVRanges(tuple(largest))


def _check_length(model: DecodeModel, tokens: Sequence[int]) -> None:
    if len(tokens) > model.max_positions:
        raise ValueError(f"{len(tokens)} tokens; the model takes {model.max_positions} at most")


def _rows(hidden: jax.Array, first: int) -> jax.Array:
    """LOGIT_ROWS rows from `first` on; past the end, padding."""
    rows = hidden[first : first + LOGIT_ROWS]
    return jnp.pad(rows, ((0, LOGIT_ROWS - rows.shape[0]), (0, 0)))


def _summary(found: np.ndarray, nbytes: int) -> Quality:
    loss, divergence, same = found
    return Quality(
        perplexity=float(np.exp(loss.mean())),
        stderr=float(loss.std() / np.sqrt(len(loss))),
        kl_mean=float(divergence.mean()),
        kl_p99=float(np.quantile(divergence, 0.99)),
        kl_max=float(divergence.max()),
        top1=float(same.mean()),
        nbytes=nbytes,
    )
