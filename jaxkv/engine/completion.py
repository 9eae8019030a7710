"""What the engine answers: completions, and what each step adds to them."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop id or a stop string
    LENGTH = "length"  # max_new_tokens, or the longest sequence that the engine takes
    ABORT = "abort"
    ERROR = "error"  # refused; `Completion.error` says why


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probabilities at one generated token, from the model's own distribution.

    Penalties, temperature and filters do not change them.

    Attributes:
      token: the generated token.
      logprob: its log-probability.
      top: the most likely tokens with their log-probabilities, most likely first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Completion:
    """What a request has produced so far. It is complete once `finish_reason` is set.

    Example:
      >>> completion = engine.submit(Request(prompt=[1, 2, 3], max_new_tokens=4))
      >>> while completion.finish_reason is None:
      ...     engine.step()
      >>> completion.tokens
      [17, 4, 4, 80]

    Attributes:
      request_id: the number of the request, for `Engine.abort`, `Engine.fork`, `Engine.resume`.
      prompt_tokens: length of the prompt.
      tokens: generated token ids. If a stop id ended the answer, it is the last of them.
      text: their text without stop ids and stop strings. Empty if the engine has no detokenizer.
      finish_reason: why the request ended; None while it runs.
      logprobs: one entry per generated token, if the request asked for them.
      prompt_logprobs: `[prompt_tokens]` float32, NaN at position 0 and where the request did not
        ask for it; None if it asked for none.
      prompt_greedy: `[prompt_tokens]` bool, whether each prompt token is the most likely one at
        its position; None if the request asked for no prompt log-probabilities.
      logits: `[V]` float32 for each generated token, if the request asked for them.
      error: why the request was refused; None otherwise.
      queue_seconds: from submission to the first step; None before it.
      first_token_seconds: from submission to the first generated token; None before it.
      seconds: from submission to the end; None before it.
      cached_tokens: tokens that were in the prefix cache when the request started.
      computed_tokens: tokens that steps computed for the request. A token counts again each time
        that it is computed again after a preemption.
      dropped_tokens: tokens that compression has dropped so far: the mean over all KV heads of the
        layers that drop tokens. Tokens that left a sliding window do not count.
      samples: the completions of the further answers, if the request asked for more than one.
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
    """What one step added to one request.

    Example:
      >>> for delta in engine.stream([Request(prompt=[1, 2, 3])]):
      ...     print(delta.text, end="")

    Attributes:
      completion: the request's completion, up to date.
      tokens: the new tokens. Empty if the request ended without one.
      text: the new text. Text that may be the beginning of a stop string comes with a later delta.
    """

    completion: Completion
    tokens: tuple[int, ...]
    text: str
