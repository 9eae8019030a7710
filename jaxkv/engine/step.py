"""The jitted step: a plan's arrays in, drawn tokens and the new cache out.

The cache is donated, so its pools are updated in place. Shapes come from a small set of buckets,
which bounds how often a step is compiled:

    decode   one token a sequence: T = B = a bucket of sequences
    mixed    chunks of prompts among others: T = a bucket of tokens, B = the most sequences

A deterministic step is always mixed and always of DETERMINISTIC_ROWS rows. In one program a row's
bits depend on that row alone, where the products have so many rows; programs of different T may
differ, since XLA sums a norm's squares in an order that it picks for each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.attention import AttentionBackend, StepInputs
from jaxkv.cache import KVCache
from jaxkv.engine.model import DecodeModel
from jaxkv.engine.sampling import Sampled, SamplingInputs, sample
from jaxkv.engine.scheduler import StepPlan

DETERMINISTIC_ROWS = 64
MIN_MIXED_TOKENS = 64
MAX_BUCKETS = 6  # of each kind
MIXED_QUERY_TILE = 64


def buckets(smallest: int, largest: int) -> tuple[int, ...]:
    """At most MAX_BUCKETS sizes from `smallest` up to `largest`, a fixed factor of 2^i apart."""
    for factor in (2**i for i in range(1, 64)):
        sizes = []
        size = smallest
        while size < largest:
            sizes.append(size)
            size *= factor
        if len(sizes) < MAX_BUCKETS:
            return (*sizes, largest)
    raise ValueError(f"no buckets from {smallest} to {largest}")


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Static shape of a step.

    Attributes:
      num_tokens: T.
      num_sequences: B.
      query_tile: rows of a query tile in attention.
    """

    num_tokens: int
    num_sequences: int
    query_tile: int


@dataclass(frozen=True)
class ShapeTable:
    """The shapes that an engine may compile.

    Attributes:
      decode: sizes of decode steps, ascending; empty where all steps are mixed.
      mixed: numbers of tokens of mixed steps, ascending.
      max_sequences: B of mixed steps.
    """

    decode: tuple[int, ...]
    mixed: tuple[int, ...]
    max_sequences: int

    @classmethod
    def plan(cls, max_sequences: int, token_budget: int, *, deterministic: bool) -> "ShapeTable":
        """The shapes for steps of up to `token_budget` tokens, or fewer where deterministic."""
        if deterministic:
            return cls((), (DETERMINISTIC_ROWS,), max_sequences)
        mixed = buckets(MIN_MIXED_TOKENS, max(token_budget, MIN_MIXED_TOKENS))
        return cls(buckets(1, max_sequences), mixed, max_sequences)

    @property
    def most_tokens(self) -> int:
        """Tokens that a step can hold."""
        return self.mixed[-1]

    def fit(self, plan: StepPlan) -> StepShape:
        """The smallest shape that holds a plan."""
        if self.decode and all(entry.num_tokens == 1 for entry in plan.entries):
            size = next(size for size in self.decode if size >= len(plan.entries))
            return StepShape(num_tokens=size, num_sequences=size, query_tile=1)
        return StepShape(
            num_tokens=next(size for size in self.mixed if size >= plan.num_tokens),
            num_sequences=self.max_sequences,
            query_tile=MIXED_QUERY_TILE,
        )

    def __len__(self) -> int:
        return len(self.decode) + len(self.mixed)


def build_inputs(plan: StepPlan, shape: StepShape) -> StepInputs:
    """A plan's arrays on the device, padded to a shape."""
    B, T = shape.num_sequences, shape.num_tokens
    tokens = np.zeros(T, np.int32)
    kv_lens = np.zeros(B, np.int32)
    query_starts = np.zeros(B + 1, np.int32)
    rows = [entry.sequence.pages.rows for entry in plan.entries]
    tables = tuple(np.zeros((B, len(row)), np.int32) for row in rows[0])
    start = 0
    for b, entry in enumerate(plan.entries):
        sequence = entry.sequence
        end = sequence.num_computed + entry.num_tokens
        tokens[start : start + entry.num_tokens] = sequence.tokens[sequence.num_computed : end]
        start += entry.num_tokens
        kv_lens[b], query_starts[b + 1] = end, start
        for table, row in zip(tables, rows[b], strict=True):
            table[b] = row
    query_starts[len(plan.entries) + 1 :] = start
    host = {
        "tokens": tokens,
        "kv_lens": kv_lens,
        "query_starts": query_starts,
        "page_tables": tables,
    }
    return StepInputs(**jax.device_put(host))


@dataclass(frozen=True)
class StepResult:
    """What a step leaves on the device.

    Attributes:
      sampled: a token for each sequence, drawn after its last computed token.
      logits: `[B, V]` float32 that it was drawn from.
      hidden: `[T, E]`, for `StepFunctions.prompt_logprobs`.
    """

    sampled: Sampled
    logits: jax.Array
    hidden: jax.Array


class StepFunctions:
    """The compiled functions of one model: `run` and `prompt_logprobs`."""

    def __init__(self, model: DecodeModel, *, backend: str | None, deterministic: bool):
        min_rows = DETERMINISTIC_ROWS if deterministic else 1

        def step(
            params: Any,
            cache: KVCache,
            inputs: StepInputs,
            sampling: SamplingInputs,
            query_tile: int,
        ) -> tuple[tuple[Sampled, jax.Array, jax.Array], KVCache]:
            attention = AttentionBackend(name=backend, query_tile=query_tile)
            hidden, cache = model.forward(params, cache, inputs, attention)
            B = inputs.kv_lens.shape[0]
            last = jnp.maximum(inputs.query_starts[1:] - 1, 0)
            rows = jnp.pad(last, (0, max(0, min_rows - B)))
            logits = model.logits(params, hidden[rows])[:B]
            return (sample(logits, sampling), logits, hidden), cache

        def prompt_logprobs(params: Any, hidden: jax.Array, targets: jax.Array) -> jax.Array:
            # In blocks: the logits of a whole chunk would be larger than the model.
            T = hidden.shape[0]
            block = DETERMINISTIC_ROWS
            padding = -T % block
            blocks = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, block, hidden.shape[1])

            def one(args: tuple[jax.Array, jax.Array]) -> jax.Array:
                logits = model.logits(params, args[0])
                chosen = jnp.take_along_axis(logits, args[1][:, None], axis=-1)[:, 0]
                return chosen - jax.nn.logsumexp(logits, axis=-1)

            labels = jnp.pad(targets, (0, padding)).reshape(-1, block)
            return jax.lax.map(one, (blocks, labels)).reshape(-1)[:T]

        self._params = model.params
        self._step: Callable[..., Any] = jax.jit(
            step, donate_argnames="cache", static_argnames="query_tile"
        )
        self._prompt_logprobs: Callable[..., jax.Array] = jax.jit(prompt_logprobs)
        self.shapes: set[StepShape] = set()

    def run(
        self, cache: KVCache, inputs: StepInputs, sampling: SamplingInputs, shape: StepShape
    ) -> tuple[StepResult, KVCache]:
        """Runs a step; `cache` is donated and must not be used again."""
        self.shapes.add(shape)
        result, cache = self._step(
            self._params, cache, inputs, sampling, query_tile=shape.query_tile
        )
        return StepResult(*result), cache

    def prompt_logprobs(self, hidden: jax.Array, targets: np.ndarray) -> np.ndarray:
        """Log-probability `[T]` float32 of token `targets[t]` after row t of `hidden [T, E]`."""
        return np.asarray(self._prompt_logprobs(self._params, hidden, targets))
