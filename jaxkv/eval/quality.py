"""A text's log-probabilities through paged caches of several formats, beside the full one's.

One sequence is computed in chunks, in every cache alike: what the engine does with a long prompt.
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

from jaxkv.attention import AttentionBackend, StepInputs, preferred_layout, stored_layers
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
from jaxkv.engine.model import DecodeModel

LOGIT_ROWS = 64  # at once: those of a chunk would be larger than the model


@dataclass(frozen=True)
class Quality:
    """How one cache does on a text of n tokens.

    Attributes:
      perplexity: exp of the mean negative log-probability of tokens 1 .. n - 1.
      stderr: of that mean, nats.
      kl_mean, kl_p99, kl_max: KL(full || this) of the distributions after tokens 0 .. n - 2, nats.
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
        formats: tuple[KVFormat, ...],
        *,
        num_tokens: int,
        page_size: int,
        chunk: int,
    ):
        """Makes an empty cache for `num_tokens` tokens, to be computed `chunk` at a time."""
        layers = stored_layers(model.layers)
        groups = group_pages(layer_pages(layers, formats))
        num_pages = -(-num_tokens // page_size)
        self.spec = CacheSpec(
            layers=layers,
            page_size=page_size,
            num_pages=(num_pages + 1,) * len(groups),
            formats=formats,
            layout=preferred_layout(),
        )
        self.cache = init_cache(self.spec)
        self.table = jnp.arange(1, num_pages + 1, dtype=jnp.int32)[None]
        self._length, self._chunk, self._model = 0, chunk, model

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
            page_tables=(self.table,) * len(self.spec.groups),
        )
        hidden, self.cache = self._step(self._model.params, self.cache, inputs)
        return hidden


def measure(
    model: DecodeModel,
    tokens: Sequence[int],
    choices: Mapping[str, tuple[KVFormat, ...]],
    *,
    page_size: int,
    chunk: int = 64,
    on_chunk: Callable[[int], object] = lambda num_tokens: None,
) -> dict[str, Quality]:
    """Measures caches on a text, beside one of float32.

    Args:
      model: the decoder.
      tokens: of the text, two at least.
      choices: the formats of each layer, by a name.
      page_size: P.
      chunk: tokens that are computed at once.
      on_chunk: called with the number of tokens of each chunk that is done.

    Returns:
      By the names of `choices`, and `f32` for the full cache.

    Raises:
      ValueError: fewer than two tokens, or more than the model takes.
    """
    if len(tokens) < 2:
        raise ValueError("a text of two tokens at least is needed")
    _check_length(model, tokens)
    sizes = dict(num_tokens=len(tokens), page_size=page_size, chunk=chunk)
    full = PagedText(model, choose_formats("f32", model.layers), **sizes)
    texts = {"f32": full} | {
        name: PagedText(model, formats, **sizes) for name, formats in choices.items()
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
    for start in range(0, len(tokens), chunk):
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
        name: _summary(np.concatenate(parts, axis=1), texts[name].spec.sequence_bytes(len(tokens)))
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
    formats, page_size = choose_formats("f32", model.layers), 64
    text = PagedText(model, formats, num_tokens=len(tokens), page_size=page_size, chunk=chunk)
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        text.push(part)
        on_chunk(len(part))
    largest = []
    for layer in range(len(model.layers)):
        k, v = gather_dense(text.cache, layer, text.table)
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
