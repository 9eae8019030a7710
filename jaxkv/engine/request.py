"""What a user asks of the engine: plain values that check themselves when they are made.

What only an engine can know, such as the longest prompt that its cache holds, is checked by
`jaxkv.engine.admission` when the request is submitted.
"""

import math
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from types import UnionType

import numpy as np
from numpy.typing import NDArray

from jaxkv.compress.kept import MAX_SPANS
from jaxkv.errors import JaxkvError

MAX_TOP_LOGPROBS = 20
MAX_SAMPLES = 256


class RequestError(JaxkvError):
    """A request that cannot be served. The message is one line that names what is wrong."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a token is drawn from the logits. The steps are applied in the order of the fields.

    The default is greedy decoding.

    Example:
      >>> SamplingParams(temperature=0.7, top_p=0.9, seed=1)

    Attributes:
      repetition_penalty: positive logits of tokens that occur in the prompt or the answer are
        divided by it, negative ones multiplied (arXiv 1909.05858). 1 changes nothing.
      temperature: divides the logits. 0 takes the most likely token; of equally likely tokens it
        takes the one with the lowest id.
      top_k: keeps the k most likely tokens; 0 keeps all.
      top_p: keeps the fewest most likely tokens whose probabilities sum to at least this; 1 keeps
        all.
      min_p: keeps the tokens whose probability is at least this fraction of the highest one.
      seed: seeds the request's own random stream. A draw depends only on the seed, the position
        and the logits, not on the rest of the batch.

    Raises:
      RequestError: a value has the wrong type or is out of range; the message names the field.
    """

    repetition_penalty: float = 1.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("top_k", "seed"):
            _check_type(name, getattr(self, name), int)
        for name in ("repetition_penalty", "temperature", "top_p", "min_p"):
            _check_type(name, getattr(self, name), int | float)
        rules = {
            "repetition_penalty": (self.repetition_penalty > 0, "must be above 0"),
            "temperature": (self.temperature >= 0, "must be 0 or more"),
            "top_k": (self.top_k >= 0, "must be 0 (all) or more"),
            "top_p": (0 < self.top_p <= 1, "must be above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "must be between 0 and 1"),
            "seed": (0 <= self.seed < 1 << 32, "must be between 0 and 2^32 - 1"),
        }
        for name, (holds, rule) in rules.items():
            value = getattr(self, name)
            if not math.isfinite(value):
                raise RequestError(f"{name} must be finite, got {value}")
            if not holds:
                raise RequestError(f"{name} {rule}, got {value}")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to continue it.

    Example:
      >>> Request(
      ...     prompt=tokenizer.encode("The capital of France is"),
      ...     max_new_tokens=16,
      ...     sampling=SamplingParams(temperature=0.7, seed=1),
      ...     stop_strings=["\\n"],
      ... )

    Attributes:
      prompt: token ids, at least one: a list, a NumPy array or another sequence of integers. It is
        kept as a tuple.
      max_new_tokens: largest number of tokens to generate. 0 only computes the prompt. The longest
        sequence that the engine takes is a limit too.
      sampling: how tokens are drawn.
      stop_ids: token ids that end the answer. The one that did is in the completion's tokens, but
        not in its text.
      stop_strings: texts that end the answer. The text is cut before the first of them.
      logprobs: how many of the most likely tokens to report with each generated token; None
        reports no log-probabilities.
      prompt_logprobs: report the log-probability of each prompt token too. The tokens before
        `prompt_logprobs_from` may then come from the prefix cache, and all others are computed.
      prompt_logprobs_from: first prompt position whose log-probability is reported.
      keep_logits: keep the logits of each generated token (V floats per token).
      n: how many answers to draw. Answer i has seed `sampling.seed + i`. The prompt is computed
        once, except with `prompt_logprobs` or a score method.
      priority: if the engine schedules by priority, requests with a higher one start first. If
        pages run out, requests with a lower one are preempted first, whatever the schedule.
      cache_salt: only requests with the same salt share cached prefixes.
      context: for an engine that drops tokens by a score: how many tokens at the beginning of the
        prompt lose some before the rest is computed. None takes the whole prompt.
      protect: spans `(start, end)` of the context whose tokens are never dropped.

    Raises:
      RequestError: a value has the wrong type or is out of range; the message names the field.
    """

    prompt: Sequence[int] | NDArray[np.integer]
    max_new_tokens: int = 128
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: Collection[int] = frozenset()
    stop_strings: Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    prompt_logprobs_from: int = 1
    keep_logits: bool = False
    n: int = 1
    priority: int = 0
    cache_salt: str | None = None
    context: int | None = None
    protect: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        # A frozen dataclass can change its fields only this way.
        object.__setattr__(self, "prompt", _integers("prompt", self.prompt))
        object.__setattr__(self, "stop_ids", frozenset(_integers("stop_ids", self.stop_ids)))
        object.__setattr__(self, "stop_strings", _strings("stop_strings", self.stop_strings))
        object.__setattr__(self, "protect", _spans("protect", self.protect))
        _check_type("sampling", self.sampling, SamplingParams)
        for name in ("logprobs", "context"):
            _check_type(name, getattr(self, name), int | None)
        for name in ("max_new_tokens", "n", "priority", "prompt_logprobs_from"):
            _check_type(name, getattr(self, name), int)
        for name in ("prompt_logprobs", "keep_logits"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {getattr(self, name)!r}")
        _check_type("cache_salt", self.cache_salt, str | None)
        self._check_ranges()

    def _check_ranges(self) -> None:
        length = len(self.prompt)
        if not length:
            raise RequestError("the prompt is empty: at least one token is needed")
        if self.max_new_tokens < 0:
            raise RequestError(f"max_new_tokens must be 0 or more, got {self.max_new_tokens}")
        if not 1 <= self.n <= MAX_SAMPLES:
            raise RequestError(f"n must be 1 to {MAX_SAMPLES}, got {self.n}")
        if "" in self.stop_strings:
            raise RequestError("a stop string is empty")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(f"logprobs must be 0 to {MAX_TOP_LOGPROBS}, got {self.logprobs}")
        if not 1 <= self.prompt_logprobs_from <= length:
            raise RequestError(
                f"prompt_logprobs_from must be 1 to the prompt's {length}, got "
                f"{self.prompt_logprobs_from}"
            )
        if self.context is not None and not 1 <= self.context <= length:
            raise RequestError(f"context must be 1 to the prompt's {length}, got {self.context}")
        if len(self.protect) > MAX_SPANS:
            raise RequestError(f"protect has {len(self.protect)} spans; {MAX_SPANS} are the most")
        for start, end in self.protect:
            if not 0 <= start <= end <= (self.context or length):
                raise RequestError(
                    f"protect must be spans (start, end) of the context, got {(start, end)}"
                )


def _check_type(name: str, value: object, expected: type | UnionType) -> None:
    """Raises RequestError if a value has another type. A bool does not count as a number."""
    if not isinstance(value, expected) or isinstance(value, bool):
        wanted = getattr(expected, "__name__", str(expected))
        raise RequestError(f"{name} must be {wanted}, got {type(value).__name__}")


def _integers(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """Integers of any kind, NumPy's too, as Python's."""
    try:
        items = tuple(values)
        if isinstance(values, bytes) or bool in set(map(type, items)):
            raise TypeError
        return tuple(map(operator.index, items))
    except TypeError:
        message = f"{name} must be a sequence of integers, got {values!r:.60}"
        raise RequestError(message) from None


def _strings(name: str, values: Iterable[str]) -> tuple[str, ...]:
    try:
        items = tuple(values)
        if isinstance(values, str) or not all(isinstance(item, str) for item in items):
            raise TypeError
        return items
    except TypeError:
        message = f"{name} must be a sequence of strings, got {values!r:.60}"
        raise RequestError(message) from None


def _spans(name: str, values: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    try:
        spans = tuple(_integers(name, span) for span in values)
    except (TypeError, RequestError):
        spans = ((),)
    if any(len(span) != 2 for span in spans):
        raise RequestError(f"{name} must be spans (start, end) of the context, got {values!r:.60}")
    return spans
