"""Systems that serve conversations turn by turn and are timed: jaxkv's engine, and llama.cpp.

Each prompt is a whole conversation so far, and a system may have cached its beginning. The
conversations are made in `scripts/bench/chat.py`.
"""

import ctypes
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxkv.engine import Engine, EngineConfig, Request
from jaxkv.models.decode_model import FlaxDecodeModel
from scripts.bench.peers import LlamaCpp


@dataclass(frozen=True)
class Answer:
    """The answer to a prompt: tokens, seconds to the first, and prompt tokens not computed."""

    tokens: list[int]
    first_token_seconds: float
    cached_tokens: int


class Server(Protocol):
    """A system that is timed.

    Attributes:
      host_seconds: time on the host in each decode step while the device was idle; may be empty.
    """

    host_seconds: list[float]

    def serve(self, prompts: list[list[int]], num_new: int) -> list[Answer]:
        """Answers prompts, all submitted at once."""
        ...

    def forget(self) -> None:
        """Empties the cache."""
        ...


class JaxkvServer:
    """jaxkv's engine, including its host side."""

    def __init__(self, model: FlaxDecodeModel, config: EngineConfig):
        self._engine = Engine(model, config)
        self.host_seconds: list[float] = []

    def serve(self, prompts: list[list[int]], num_new: int) -> list[Answer]:
        engine, metrics = self._engine, self._engine.metrics
        requests = [Request(prompt=tuple(prompt), max_new_tokens=num_new) for prompt in prompts]
        running = [engine.submit(request) for request in requests]
        while engine.has_work:
            host, decoded = metrics.host_seconds, metrics.decode_tokens
            engine.step()
            if metrics.decode_tokens > decoded:
                self.host_seconds.append(metrics.host_seconds - host)
        return [Answer(c.tokens, c.first_token_seconds or 0.0, c.cached_tokens) for c in running]

    def warm_up(self) -> None:
        """Compiles all steps."""
        self._engine.warm_up()

    @property
    def num_shapes(self) -> int:
        """Number of step shapes run so far; each is compiled once."""
        return self._engine.metrics.step_shapes

    def forget(self) -> None:
        self._engine.reset_cache()
        self.host_seconds.clear()


class LlamaServer(LlamaCpp):
    """llama.cpp, greedy, one request after another; a conversation is a sequence of its cache.

    With `reuse`, a conversation continues from its own K and V, and a new one from the longest
    prefix that it shares with another. llama.cpp rounds differently in different batches, so
    answers may differ from those without reuse.
    """

    def __init__(self, gguf_path: Path, *, conversations: int, longest: int, reuse: bool):
        """Loads a model.

        Args:
          gguf_path: path of the GGUF file.
          conversations: largest number of conversations.
          longest: largest number of tokens of a conversation.
          reuse: whether to keep K and V between requests.
        """
        super().__init__(gguf_path, os.cpu_count() or 1)
        self.host_seconds: list[float] = []
        self._reuse = reuse
        self._most = conversations
        self._room = self._context(conversations * longest, conversations)
        self._llama = self._room.__enter__()
        self._memory = self._lib.llama_get_memory(self._llama)
        self._kept: list[list[int]] = []  # tokens of each sequence

    def close(self) -> None:
        """Frees the cache."""
        self._room.__exit__(None, None, None)

    def serve(self, prompts: list[list[int]], num_new: int) -> list[Answer]:
        return [self._serve(prompt, num_new) for prompt in prompts]

    def forget(self) -> None:
        self._lib.llama_memory_clear(self._memory, True)
        self._kept.clear()

    def _serve(self, prompt: list[int], num_new: int) -> Answer:
        start = time.perf_counter()
        sequence, cached = self._take_sequence(prompt)
        items = [(token, i, sequence) for i, token in enumerate(prompt)]
        self._decode_batch(self._llama, items[cached:])
        answer = [self._likeliest()]
        first_token_seconds = time.perf_counter() - start
        while len(answer) < num_new:
            position = len(prompt) + len(answer) - 1
            self._decode_batch(self._llama, [(answer[-1], position, sequence)])
            answer.append(self._likeliest())
        if self._reuse:
            self._kept[sequence] = prompt + answer[:-1]
        return Answer(answer, first_token_seconds, cached)

    def _take_sequence(self, prompt: list[int]) -> tuple[int, int]:
        """Returns the sequence for a prompt, and how many of its tokens are cached there."""
        lib, memory = self._lib, self._memory
        if not self._reuse:
            lib.llama_memory_clear(memory, True)
            return 0, 0
        shared = [_common_length(kept, prompt[:-1]) for kept in self._kept]
        best = int(np.argmax(shared)) if shared else 0
        cached = shared[best] if shared else 0
        if cached and cached == len(self._kept[best]):
            return best, cached
        sequence = len(self._kept)
        if sequence == self._most:
            raise RuntimeError(f"more than {self._most} conversations")
        self._kept.append([])
        if cached:
            lib.llama_memory_seq_cp(memory, best, sequence, 0, cached)
        return sequence, cached

    def _likeliest(self) -> int:
        logits = self._lib.llama_get_logits_ith(self._llama, -1)
        V = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model))
        row = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * V)).contents
        return int(np.frombuffer(row, np.float32).argmax())


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
