"""The jitted step: a plan's arrays in, drawn tokens and the new cache out.

The cache is donated, so its pools are updated in place. Shapes come from a small set of buckets,
which bounds how often a step is compiled:

    decode   one token a sequence: T = B = a bucket of sequences
    mixed    chunks of prompts among others: T = a bucket of tokens, B = the most sequences

A deterministic step is always mixed and always of DETERMINISTIC_ROWS rows. In one program a row's
bits depend on that row alone, where the products have so many rows; programs of different T may
differ, since XLA sums a norm's squares in an order that it picks for each.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, starmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.attention import AttentionBackend, Backend, StepInputs
from jaxkv.cache import KVCache, copy_pages
from jaxkv.compress import Compressor, ScoreMethod
from jaxkv.engine.model import DecodeModel
from jaxkv.engine.sampling import (
    NUM_CONTROLS,
    POSITION,
    Sampled,
    SamplingInputs,
    sample,
)
from jaxkv.engine.scheduler import PageCopy, StepPlan, int32
from jaxkv.prefix import PageTables

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


def halve_widest_gaps(sizes: tuple[int, ...], least: int) -> tuple[int, ...]:
    """Adds sizes until there are MAX_BUCKETS, each in the middle of the widest gap, of equals the
    last; none where a gap would become smaller than `least`."""
    sizes = tuple(sorted(sizes))
    while len(sizes) < MAX_BUCKETS:
        gaps = list(pairwise(sizes))
        low, high = max(gaps, key=lambda gap: (gap[1] - gap[0], gap[1]), default=(0, 0))
        if high - low < 2 * least:
            break
        sizes = tuple(sorted((*sizes, (low + high) // 2)))
    return sizes


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
        mixed = halve_widest_gaps(mixed, MIN_MIXED_TOKENS)
        return cls(buckets(1, max_sequences), mixed, max_sequences)

    @property
    def most_tokens(self) -> int:
        """Tokens that a step can hold."""
        return self.mixed[-1]

    def fit(self, plan: StepPlan) -> StepShape:
        """The smallest shape that holds a plan."""
        num_sequences, num_tokens = len(plan.sequences), plan.total_tokens
        if self.decode and plan.is_decode:
            size = next(size for size in self.decode if size >= num_sequences)
            return StepShape(num_tokens=size, num_sequences=size, query_tile=1)
        return StepShape(
            num_tokens=next(size for size in self.mixed if size >= num_tokens),
            num_sequences=self.max_sequences,
            query_tile=MIXED_QUERY_TILE,
        )

    def __len__(self) -> int:
        return len(self.decode) + len(self.mixed)


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """Where a step's host arrays stand in one int32 buffer, so that they cross over as one.

    Attributes:
      shape: of the step.
      num_groups: layer groups.
      max_pages: M.
      shortens: sequences lose tokens (`StepInputs.dropped`).
    """

    shape: StepShape
    num_groups: int
    max_pages: int
    shortens: bool = False

    @property
    def size(self) -> int:
        """Entries of the buffer."""
        return self._spans[-1][1].stop

    def split(self, buffer: Any) -> dict[str, Any]:
        """The parts of a buffer `[size]`, views or traced slices.

        Returns:
          tokens `[T]`, kv_lens `[B]`, query_starts `[B + 1]`, controls `[B, NUM_CONTROLS]` of
          sampling, want_top `[1]`, page_tables `[num_groups, B, M]`, and where sequences lose
          tokens dropped `[num_groups, B]`.
        """
        return {name: buffer[span].reshape(shape) for name, span, shape in self._spans}

    @cached_property
    def _spans(self) -> list[tuple[str, slice, tuple[int, ...]]]:
        T, B = self.shape.num_tokens, self.shape.num_sequences
        shapes = {
            "tokens": (T,),
            "kv_lens": (B,),
            "query_starts": (B + 1,),
            "controls": (B, NUM_CONTROLS),
            "want_top": (1,),
            "page_tables": (self.num_groups, B, self.max_pages),
        }
        if self.shortens:
            shapes["dropped"] = (self.num_groups, B)
        ends = list(accumulate(map(math.prod, shapes.values()), initial=0))
        spans = starmap(slice, pairwise(ends))
        return [
            (name, span, shape) for span, (name, shape) in zip(spans, shapes.items(), strict=True)
        ]


def build_buffer(
    plan: StepPlan, layout: StepLayout, tables: PageTables, controls: np.ndarray
) -> np.ndarray:
    """A plan's arrays, padded to a layout.

    Args:
      plan: the plan.
      layout: of the buffer.
      tables: the rows of its sequences.
      controls: `[R + 1, NUM_CONTROLS]` int32, sampling parameters of each row, and of padding.

    Returns:
      `[layout.size]` int32.
    """
    buffer = np.zeros(layout.size, np.int32)
    parts = layout.split(buffer)
    n = len(plan.sequences)
    rows, lengths = plan.rows, plan.lengths
    parts["tokens"][: plan.total_tokens] = plan.tokens()
    parts["kv_lens"][:n] = lengths
    parts["query_starts"][1 : n + 1] = int32(accumulate(plan.num_tokens))
    parts["query_starts"][n + 1 :] = plan.total_tokens
    parts["controls"][:n] = controls[rows]
    parts["controls"][:n, POSITION] = lengths  # of a whole sequence; others draw nothing
    parts["controls"][n:] = controls[-1]
    parts["want_top"][0] = plan.wants_logprobs
    for part, table in zip(parts["page_tables"], tables.pages, strict=True):
        np.take(table, rows, axis=0, out=part[:n], mode="clip")
    if tables.dropped is not None:
        parts["dropped"][:, :n] = tables.dropped[:, rows]
    return buffer


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
    """The compiled functions of one model: `run`, `copy`, `prompt_logprobs` and `compressor`'s."""

    def __init__(self, model: DecodeModel, *, backend: str | Backend | None, deterministic: bool):
        min_rows = DETERMINISTIC_ROWS if deterministic else 1

        def step(
            params: Any, cache: KVCache, buffer: jax.Array, seen: jax.Array, layout: StepLayout
        ) -> tuple[tuple[Sampled, jax.Array, jax.Array], KVCache]:
            parts = layout.split(buffer)
            inputs = StepInputs(
                tokens=parts["tokens"],
                kv_lens=parts["kv_lens"],
                query_starts=parts["query_starts"],
                page_tables=tuple(parts["page_tables"]),
                dropped=parts.get("dropped"),
            )
            sampling = SamplingInputs.unpack(parts["controls"], seen, parts["want_top"][0] != 0)
            attention = AttentionBackend(name=backend, query_tile=layout.shape.query_tile)
            hidden, cache = model.forward(params, cache, inputs, attention)
            B = inputs.kv_lens.shape[0]
            last = jnp.maximum(inputs.query_starts[1:] - 1, 0)
            rows = jnp.pad(last, (0, max(0, min_rows - B)))
            logits = model.logits(params, hidden[rows])[:B]
            return (sample(logits, sampling), logits, hidden), cache

        def copy(cache: KVCache, copies: jax.Array) -> KVCache:
            for group in range(len(cache.windows)):
                cache = copy_pages(cache, group, copies[group, 0], copies[group, 1])
            return cache

        def prompt_logprobs(
            params: Any, hidden: jax.Array, targets: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            # In blocks: the logits of a whole chunk would be larger than the model.
            T = hidden.shape[0]
            block = DETERMINISTIC_ROWS
            padding = -T % block
            blocks = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, block, hidden.shape[1])

            def one(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                logits = model.logits(params, args[0])
                chosen = jnp.take_along_axis(logits, args[1][:, None], axis=-1)[:, 0]
                logprobs = chosen - jax.nn.logsumexp(logits, axis=-1)
                return logprobs, logits.argmax(axis=-1) == args[1]

            labels = jnp.pad(targets, (0, padding)).reshape(-1, block)
            logprobs, greedy = jax.lax.map(one, (blocks, labels))
            return logprobs.reshape(-1)[:T], greedy.reshape(-1)[:T]

        self._params = model.params
        self._step: Callable[..., Any] = jax.jit(
            step, donate_argnames="cache", static_argnames="layout"
        )
        self._copy: Callable[..., KVCache] = jax.jit(copy, donate_argnames="cache")
        self._prompt_logprobs: Callable[..., tuple[jax.Array, jax.Array]] = jax.jit(prompt_logprobs)
        self._choices = (backend, deterministic)
        self._model = model
        self._compressors: dict[str, Compressor] = {}

    def compressor(self, method: ScoreMethod, cache: KVCache) -> Compressor:
        """The functions that drop tokens by a method, made once."""
        if method.name not in self._compressors:
            backend = self._choices[0]
            compressor = Compressor(self._model, cache, method, backend=backend)
            self._compressors[method.name] = compressor
        return self._compressors[method.name]

    def check(self, model: DecodeModel, backend: str | Backend | None, deterministic: bool) -> None:
        """Raises ValueError where these are other functions than an engine needs."""
        if model is not self._model or (backend, deterministic) != self._choices:
            raise ValueError("steps of another model, backend or determinism cannot be shared")

    def run(
        self, cache: KVCache, buffer: np.ndarray, seen: jax.Array | np.ndarray, layout: StepLayout
    ) -> tuple[StepResult, KVCache]:
        """Runs a step; `cache` is donated and must not be used again.

        Args:
          cache: the cache.
          buffer: of `build_buffer`.
          seen: `[B, ceil(V / 8)]` uint8, see `SamplingInputs`.
          layout: of the buffer.
        """
        result, cache = self._step(self._params, cache, buffer, seen, layout=layout)
        return StepResult(*result), cache

    def copy(self, cache: KVCache, copies: Seq[PageCopy], most: int) -> KVCache:
        """Copies pages, reads before writes; `cache` is donated.

        Args:
          cache: the cache.
          copies: what to copy.
          most: copies that a group may ever ask for at once; the rest is padding.
        """
        ids = np.zeros((len(cache.windows), 2, most), np.int32)
        counts = [0] * len(cache.windows)
        for copy in copies:
            ids[copy.group, :, counts[copy.group]] = copy.source, copy.target
            counts[copy.group] += 1
        return self._copy(cache, ids)

    def prompt_logprobs(
        self, hidden: jax.Array, targets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-probability `[T]` float32 of token `targets[t]` after row t of `hidden [T, E]`, and
        whether it is the likeliest one, `[T]` bool."""
        logprobs, greedy = self._prompt_logprobs(self._params, hidden, targets)
        return np.asarray(logprobs), np.asarray(greedy)
