"""What a user asks of the engine and what comes back. Plain values, no device arrays."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from types import UnionType
from typing import NamedTuple, Protocol

import numpy as np

from jaxkv.compress.kept import MAX_SPANS

MAX_TOP_LOGPROBS = 20
MAX_SAMPLES = 256


class RequestError(ValueError):
    """A request that cannot be served; the message is one line that names what is at fault."""


class Detokenizer(Protocol):
    """Turns a growing sequence of token ids into text; one object a request."""

    def push(self, ids: list[int]) -> str:
        """Returns the text that these further tokens complete."""
        ...

    def flush(self) -> str:
        """Returns what is left, at the end."""
        ...


DetokenizerFactory = Callable[[], Detokenizer]


def _check_type(name: str, value: object, expected: type | UnionType) -> None:
    """Raises RequestError where a value has another type; a bool is no number here."""
    if not isinstance(value, expected) or isinstance(value, bool):
        wanted = getattr(expected, "__name__", str(expected))
        raise RequestError(f"{name} must be {wanted}, got {type(value).__name__}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a token is drawn from the logits, in this order of steps.

    Attributes:
      repetition_penalty: logits of tokens seen in prompt or answer are divided by it where
        positive and multiplied where negative (arXiv 1909.05858); 1 leaves them.
      temperature: divides the logits; 0 takes the most likely token (the lowest id of equals).
      top_k: keeps the k most likely tokens; 0 keeps all.
      top_p: keeps the fewest most likely tokens that reach this probability; 1 keeps all.
      min_p: keeps tokens of at least this fraction of the most likely one's probability.
      seed: of the request's own random stream: a draw depends on it and the position alone.
    """

    repetition_penalty: float = 1.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def check(self) -> None:
        """Raises RequestError, naming the field, where a value has no meaning."""
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

    Attributes:
      prompt: token ids, at least one.
      max_new_tokens: most tokens to generate; 0 only computes the prompt. The longest sequence
        that the engine takes bounds it too.
      sampling: how tokens are drawn.
      stop_ids: tokens that end the answer; the answer holds them, its text does not.
      stop_strings: texts that end the answer, which is cut before the first of them.
      logprobs: None, or how many most likely tokens are reported with each generated one.
      prompt_logprobs: report the log-probability of each prompt token too; the prompt is computed
        whole then, whatever is cached of it.
      prompt_logprobs_from: the first prompt token for which that is wanted: of those before it may
        be used what is cached.
      keep_logits: keep the whole logits row of each generated token (V floats each).
      n: answers to draw; the i-th has seed `sampling.seed + i`. The prompt is computed once.
      priority: requests of a higher one go first and stay longest, where the engine schedules by
        priority or pages run out.
      adapter: name and version of the weights' adapter; prefixes are shared within one alone.
      cache_salt: prefixes are shared with requests of the same salt alone.
      context: where the engine has a score method, the first so many tokens of the prompt, of which
        some are dropped before the rest is computed; None for the whole prompt.
      protect: spans `(start, end)` of the context whose tokens are never dropped.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int = 128
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    prompt_logprobs_from: int = 1
    keep_logits: bool = False
    n: int = 1
    priority: int = 0
    adapter: tuple[str, int] | None = None
    cache_salt: str | None = None
    context: int | None = None
    protect: tuple[tuple[int, int], ...] = ()

    def check(self, vocab_size: int) -> None:
        """Raises RequestError where the request has no meaning for a model of V tokens."""
        _check_type("prompt", self.prompt, tuple)
        _check_type("stop_ids", self.stop_ids, frozenset)
        _check_type("sampling", self.sampling, SamplingParams)
        _check_type("logprobs", self.logprobs, int | None)
        for name in ("prompt_logprobs", "keep_logits"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for token in (*self.prompt, *self.stop_ids):
            _check_type("a token id", token, int)
        _check_type("max_new_tokens", self.max_new_tokens, int)
        _check_type("stop_strings", self.stop_strings, tuple)
        _check_type("n", self.n, int)
        _check_type("priority", self.priority, int)
        _check_type("cache_salt", self.cache_salt, str | None)
        if self.adapter is not None:
            _check_type("adapter", self.adapter, tuple)
            if [type(part) for part in self.adapter] != [str, int]:
                raise RequestError(f"adapter must be (name, version), got {self.adapter}")
        _check_type("context", self.context, int | None)
        _check_type("protect", self.protect, tuple)
        if not self.prompt:
            raise RequestError("the prompt is empty: at least one token is needed")
        for token in (*self.prompt, *self.stop_ids):
            if not 0 <= token < vocab_size:
                raise RequestError(f"token id {token} is outside the vocabulary of {vocab_size}")
        if self.max_new_tokens < 0:
            raise RequestError(f"max_new_tokens must be 0 or more, got {self.max_new_tokens}")
        if not 1 <= self.n <= MAX_SAMPLES:
            raise RequestError(f"n must be 1 to {MAX_SAMPLES}, got {self.n}")
        if "" in self.stop_strings:
            raise RequestError("a stop string is empty")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(f"logprobs must be 0 to {MAX_TOP_LOGPROBS}, got {self.logprobs}")
        _check_type("prompt_logprobs_from", self.prompt_logprobs_from, int)
        if not 1 <= self.prompt_logprobs_from <= len(self.prompt):
            raise RequestError(
                f"prompt_logprobs_from must be 1 to the prompt's {len(self.prompt)}, got "
                f"{self.prompt_logprobs_from}"
            )
        self._check_context()
        self.sampling.check()

    def _check_context(self) -> None:
        length = len(self.prompt)
        if self.context is not None and not 1 <= self.context <= length:
            raise RequestError(f"context must be 1 to the prompt's {length}, got {self.context}")
        if len(self.protect) > MAX_SPANS:
            raise RequestError(f"protect has {len(self.protect)} spans; {MAX_SPANS} are the most")
        for span in self.protect:
            is_pair = isinstance(span, tuple) and [type(x) for x in span] == [int, int]
            if not is_pair or not 0 <= span[0] <= span[1] <= (self.context or length):
                raise RequestError(f"protect must be spans (start, end) of the context, got {span}")


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop id or stop string
    LENGTH = "length"  # max_new_tokens or the longest sequence
    ABORT = "abort"
    ERROR = "error"  # refused; the completion says why


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probabilities at one generated token, of the model's own distribution.

    Attributes:
      token: the generated token.
      logprob: its log-probability.
      top: the most likely tokens and theirs, most likely first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Completion:
    """What a request has produced so far; whole once `finish_reason` is set.

    Attributes:
      request_id: as `Engine.submit` returned it.
      prompt_tokens: length of the prompt.
      tokens: generated token ids, a stop id included.
      text: their text, without stops; empty where the engine has no detokenizer.
      finish_reason: None while it runs.
      logprobs: one entry a token, where the request asked for them.
      prompt_logprobs: `[prompt_tokens]` float32, NaN where none was asked for and at 0; None unless
        any was.
      prompt_greedy: `[prompt_tokens]` bool, which of these tokens are the likeliest ones; None as
        well.
      logits: `[V]` float32 of each token, where the request asked for them.
      error: why the request was refused.
      queue_seconds: from submission to the first step; None before it.
      first_token_seconds: from submission to the first token; None before it.
      seconds: from submission to the end; None before it.
      cached_tokens: tokens that were cached when the request started.
      computed_tokens: tokens that steps computed for it, those computed again included.
      dropped_tokens: of its tokens, how many each KV head lost so far, on average over the heads
        and layers that lose some; those behind windows are not counted.
      samples: the further answers, where the request asked for more than one.
    """

    request_id: int
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: np.ndarray | None = None
    prompt_greedy: np.ndarray | None = None
    logits: list[np.ndarray] = field(default_factory=list)
    error: str | None = None
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    seconds: float | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0
    dropped_tokens: float = 0.0
    samples: list["Completion"] = field(default_factory=list)


class Delta(NamedTuple):
    """What one step added to a request.

    Attributes:
      completion: the request's completion, up to date.
      tokens: the tokens that are new.
      text: the text that is new and can no longer become part of a stop string.
    """

    completion: Completion
    tokens: tuple[int, ...]
    text: str
