"""How near a cache's output is to the full one's: distances that the field reports for caches.

Perplexity, KL(full || compressed) of each next-token distribution, and how often the likeliest
token is the same. Not here: how a text is computed (`paged_text`), text, models, tables (the
scripts have them).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import choose_formats
from jaxkv.engine.model import DecodeModel
from jaxkv.eval.paged_text import OnChunk, Reading, Setting, TextFunctions, ignore, read

LOGIT_ROWS = 64  # at once: those of a chunk would be larger than the model


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
    """Measures caches on a text, beside one of float32.

    Args:
      model: the decoder.
      tokens: of the text, two behind the context at least.
      choices: settings by a name.
      page_size, context, chunk, on_chunk: see `read`.

    Returns:
      By the names of `choices`, and `f32` for the full cache.

    Raises:
      ValueError: fewer than two tokens behind the context, or more than the model takes, or a
        setting that does not fit.
    """
    if len(tokens) - context < 2:
        raise ValueError("a text of two tokens at least is needed")
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
    """Distance of what one model makes of a text from what another one does, compiled once."""

    def __init__(self, own: DecodeModel, full: DecodeModel):
        """Takes the model that is measured, and the one that it is measured against; they may
        differ, their vocabularies may not."""

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
        """Measures one reading of a text beside another one.

        Args:
          own: by the first model.
          full: by the second.
          targets: the tokens after the first one behind the context.
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
    """LOGIT_ROWS rows from `first` on; past the end, padding. On the host: a slice on the device is
    compiled for each length."""
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
