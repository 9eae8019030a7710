"""Measures how close the output of a compressed cache is to that of the full cache.

The measures are those that papers report: perplexity, KL(full || compressed) of each next-token
distribution, and how often the likeliest token is the same. `paged_text` computes the text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import choose_formats
from jaxkv.eval.paged_text import OnChunk, Reading, Setting, TextFunctions, ignore, read
from jaxkv.model import DecodeModel

LOGIT_ROWS = 64  # per call: the logits of a whole chunk would be larger than the model


@dataclass(frozen=True)
class Quality:
    """Quality of one cache on a text of n tokens, the first c of them context (c may be 0).

    Attributes:
      perplexity: exp of the mean negative log-probability of tokens c + 1 .. n - 1.
      stderr: standard error of that mean, in nats.
      kl_mean, kl_p99, kl_max: mean, 99th percentile and maximum of KL(full || this) over the
        next-token distributions after tokens c .. n - 2, in nats.
      top1: fraction of these distributions whose likeliest token is that of the full cache.
      nbytes: bytes of all pages that the text holds at its end, parameters of formats included.
    """

    perplexity: float
    stderr: float
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1: float
    nbytes: int


def measure(
    model: DecodeModel,
    tokens: Sequence[int],
    choices: Mapping[str, Setting],
    *,
    page_size: int,
    context: int = 0,
    chunk: int = 64,
    on_chunk: OnChunk = ignore,
) -> dict[str, Quality]:
    """Measures the quality of caches on a text, compared with a full float32 cache.

    Args:
      model: the decoder.
      tokens: tokens of the text, at least two after the context.
      choices: the settings to measure, by name.
      page_size, context, chunk, on_chunk: see `read`.

    Returns:
      The quality by the names of `choices`, and under `f32` that of the full cache.

    Raises:
      ValueError: fewer than two tokens after the context, more than the model takes, or a setting
        that does not go with the model.
    """
    if len(tokens) - context < 2:
        raise ValueError("the text must have at least two tokens after the context")
    full = Setting(formats=choose_formats("f32", model.layers))
    functions, compare = TextFunctions(model), Comparison(model, model)
    readings = {
        name: read(
            functions,
            tokens,
            setting,
            page_size=page_size,
            context=context,
            chunk=chunk,
            on_chunk=on_chunk,
        )
        for name, setting in ({"f32": full} | dict(choices)).items()
    }
    targets = tokens[context + 1 :]
    return {name: compare(reading, readings["f32"], targets) for name, reading in readings.items()}


class Comparison:
    """Compares what two models compute of a text; compiled once.

    The models may be the same one with different caches, or differ; they have one vocabulary.
    """

    def __init__(self, own: DecodeModel, full: DecodeModel):
        """Takes the model that is measured and the reference model; compiles nothing yet."""

        def distances(
            params: tuple[Any, Any], hidden: tuple[jax.Array, jax.Array], labels: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            here, there = (
                jax.nn.log_softmax(model.logits(own_params, rows))
                for model, own_params, rows in zip((own, full), params, hidden, strict=True)
            )
            loss = -jnp.take_along_axis(here, labels[:, None], axis=-1)[:, 0]
            divergence = (jnp.exp(there) * (there - here)).sum(axis=-1)
            return loss, divergence, here.argmax(axis=-1) == there.argmax(axis=-1)

        self._params = own.params, full.params
        self._distances: Callable[..., tuple[jax.Array, ...]] = jax.jit(distances)

    def __call__(self, own: Reading, full: Reading, targets: Sequence[int]) -> Quality:
        """Compares a reading of a text with a reference reading of the same text.

        Args:
          own: the reading of the measured model.
          full: the reading of the reference model.
          targets: the tokens from the second one after the context on.
        """
        found = []
        for first in range(0, len(targets), LOGIT_ROWS):
            labels = np.zeros(LOGIT_ROWS, np.int32)
            here = targets[first : first + LOGIT_ROWS]
            labels[: len(here)] = here
            hidden = tuple(_rows(reading.hidden, first) for reading in (own, full))
            distances = self._distances(self._params, hidden, labels)
            found.append(np.array(distances, np.float64)[:, : len(here)])
        return _summary(np.concatenate(found, axis=1), own.nbytes)


def _rows(hidden: jax.Array, first: int) -> np.ndarray:
    """LOGIT_ROWS rows from `first` on, padded at the end. This runs on the host, since a slice on
    the device is compiled for each length."""
    rows = np.asarray(hidden)[first : first + LOGIT_ROWS]
    return np.pad(rows, ((0, LOGIT_ROWS - rows.shape[0]), (0, 0)))


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
