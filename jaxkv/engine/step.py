"""The jitted step: a plan's arrays in, drawn tokens and the new cache out.

The cache is donated, so its pools are updated in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.attention import AttentionBackend, Backend, StepInputs
from jaxkv.cache import KVCache, copy_pages
from jaxkv.compress import ScoreMethod
from jaxkv.compress.compressor import Compressor
from jaxkv.engine.sampling import Sampled, Sampler, SamplingInputs, draw, sample
from jaxkv.engine.shapes import DETERMINISTIC_ROWS
from jaxkv.engine.step_arrays import StepLayout
from jaxkv.engine.step_plan import PageCopy
from jaxkv.model import DecodeModel


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepResult:
    """What a step leaves on the device.

    Attributes:
      sampled: a token for each sequence, drawn after its last computed token.
      logits: `[B, V]` float32, from which it was drawn.
      hidden: `[T, E]`, for `StepFunctions.prompt_logprobs`.
    """

    sampled: Sampled
    logits: jax.Array
    hidden: jax.Array


class StepChoices(NamedTuple):
    """What is compiled into a step besides the model; see `EngineConfig`."""

    backend: str | Backend | None = None
    deterministic: bool = False
    sampler: Sampler = draw


class StepFunctions:
    """The compiled functions of one model. Several engines may share them."""

    def __init__(self, model: DecodeModel, choices: StepChoices):
        """Compiles nothing yet."""
        self._model = model
        self._choices = choices
        self._step: Callable[..., tuple[StepResult, KVCache]] = jax.jit(
            partial(_step, model, choices), donate_argnames="cache", static_argnames="layout"
        )
        self._copy: Callable[..., KVCache] = jax.jit(_copy, donate_argnames="cache")
        self._prompt_logprobs: Callable[..., tuple[jax.Array, jax.Array]] = jax.jit(
            partial(_prompt_logprobs, model)
        )
        self._compressors: dict[ScoreMethod, Compressor] = {}

    def compressor(self, method: ScoreMethod, cache: KVCache) -> Compressor:
        """The functions that drop tokens by a method; made once per method."""
        if method not in self._compressors:
            backend = self._choices.backend
            self._compressors[method] = Compressor(self._model, cache, method, backend=backend)
        return self._compressors[method]

    def check(self, model: DecodeModel, choices: StepChoices) -> None:
        """Raises ValueError if an engine with this model and these choices needs others."""
        if model is not self._model or choices != self._choices:
            raise ValueError(
                "steps of another model, backend, determinism or sampler cannot be shared"
            )

    def run(
        self, cache: KVCache, buffer: np.ndarray, seen: jax.Array | np.ndarray, layout: StepLayout
    ) -> tuple[StepResult, KVCache]:
        """Runs a step.

        Args:
          cache: the cache. It is donated and must not be used again.
          buffer: `[layout.size]` int32, of `plan_buffer`.
          seen: `[B, ceil(V / 8)]` uint8, see `SamplingInputs`.
          layout: layout of the buffer.
        """
        return self._step(self._model.params, cache, buffer, seen, layout=layout)

    def copy(self, cache: KVCache, copies: Sequence[PageCopy], max_copies: int) -> KVCache:
        """Copies pages. Up to `max_copies` per layer group are one call, which reads all sources
        before it writes.

        Args:
          cache: the cache, donated.
          copies: what to copy.
          max_copies: static size of a call; the rest is padding.
        """
        num_groups = len(cache.spec.groups)
        groups = [[(c.source, c.target) for c in copies if c.group == g] for g in range(num_groups)]
        for start in range(0, max(1, *map(len, groups)), max_copies):
            ids = np.zeros((num_groups, 2, max_copies), np.int32)
            for g, pairs in enumerate(groups):
                part = pairs[start : start + max_copies]
                if part:
                    ids[g, :, : len(part)] = np.transpose(part)
            cache = self._copy(cache, ids)
        return cache

    def prompt_logprobs(
        self, hidden: jax.Array, targets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of given tokens.

        Args:
          hidden: `[T, E]`, hidden states.
          targets: `[T]` int32, a token id for each.

        Returns:
          `[T]` float32, the log-probability of token `targets[t]` after row t; and `[T]` bool,
          whether it is the most likely token.
        """
        logprobs, greedy = self._prompt_logprobs(self._model.params, hidden, targets)
        return np.asarray(logprobs), np.asarray(greedy)


def _step(
    model: DecodeModel,
    choices: StepChoices,
    params: Any,
    cache: KVCache,
    buffer: jax.Array,
    seen: jax.Array,
    layout: StepLayout,
) -> tuple[StepResult, KVCache]:
    arrays = layout.split(buffer)
    inputs = StepInputs(
        tokens=arrays.tokens,
        seq_lens=arrays.seq_lens,
        query_starts=arrays.query_starts,
        page_tables=tuple(arrays.page_tables),
        kv_lens=arrays.kv_lens,
    )
    attention = AttentionBackend(name=choices.backend, query_tile=layout.shape.query_tile)
    hidden, cache = model.forward(params, cache, inputs, attention)
    B = layout.shape.num_sequences
    rows = jnp.maximum(inputs.query_starts[1:] - 1, 0)  # the last row of each sequence
    if choices.deterministic:
        rows = jnp.pad(rows, (0, max(0, DETERMINISTIC_ROWS - B)))
    logits = model.logits(params, hidden[rows])[:B]
    sampling = SamplingInputs.unpack(arrays.controls, seen, arrays.want_top[0] != 0)
    return StepResult(sample(logits, sampling, choices.sampler), logits, hidden), cache


def _copy(cache: KVCache, ids: jax.Array) -> KVCache:
    """Copies pages; `ids [groups, 2, n]` int32 has sources and targets."""
    for group in range(len(cache.spec.groups)):
        cache = copy_pages(cache, group, ids[group, 0], ids[group, 1])
    return cache


def _prompt_logprobs(
    model: DecodeModel, params: Any, hidden: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `StepFunctions.prompt_logprobs`. Works in blocks of rows, since the logits of a whole
    chunk would be larger than the model."""
    T, E = hidden.shape
    padding = -T % DETERMINISTIC_ROWS
    blocks = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, DETERMINISTIC_ROWS, E)
    labels = jnp.pad(targets, (0, padding)).reshape(-1, DETERMINISTIC_ROWS)

    def block_logprobs(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits, label = model.logits(params, block[0]), block[1]
        chosen = jnp.take_along_axis(logits, label[:, None], axis=-1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1), logits.argmax(axis=-1) == label

    logprobs, greedy = jax.lax.map(block_logprobs, (blocks, labels))
    return logprobs.reshape(-1)[:T], greedy.reshape(-1)[:T]
