"""What evaluation harnesses ask of a model: log-likelihoods of continuations and of whole texts,
and answers up to a stop string. An engine computes them, in any KV format and with any compression.

The terms are those of lm-evaluation-harness. If the engine has a score method, the context of a
continuation drops tokens before the continuation is scored, and a prompt to be answered drops them
at its end. `jaxkv.models.lm_eval_model` connects this module to the harness.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxkv.engine import Completion, Engine, Request, RequestError, SamplingParams

MAX_NEW_TOKENS = 256  # of an answer, if the task sets no limit
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Encoder(Protocol):
    """Turns text into token ids."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text, which is not empty."""
        ...


class HarnessModel:
    """An engine as evaluation harnesses see it.

    Attributes:
      engine: an engine with a detokenizer.
      encoder: the tokenizer of the engine's model.
      prefix_id: token that is put before a text that is scored from its first token on.
      stop_ids: tokens that end every answer.
    """

    def __init__(
        self, engine: Engine, encoder: Encoder, *, prefix_id: int, stop_ids: Iterable[int] = ()
    ):
        """Takes an engine that has no requests."""
        self.engine, self.encoder = engine, encoder
        self.prefix_id, self.stop_ids = prefix_id, frozenset(stop_ids)
        compression = engine.config.compression
        self._drops = compression is not None and not compression.is_window
        self._interval = compression.interval if compression is not None else None

    def loglikelihood(
        self, pairs: Sequence[tuple[str, str]], on_done: Callable[[int], object] = lambda n: None
    ) -> list[tuple[float, bool]]:
        """Scores continuations of contexts.

        Args:
          pairs: context, which may be empty, and continuation. If a pair is longer than the engine
            takes, the beginning of its context is cut off.
          on_done: called with 1 when a pair is done.

        Returns:
          For each pair the log-probability of the continuation in nats, and whether greedy decoding
          would generate it.

        Raises:
          RequestError: a continuation is longer than the engine takes.
        """
        parts = [self._split(*pair) for pair in pairs]
        requests = []
        for before, after in parts:
            cut = max(0, len(before) + len(after) - self.engine.max_length)
            if cut >= len(before):
                raise RequestError(
                    f"{len(after)} tokens to score; the engine takes {self.engine.max_length} "
                    "including one token before them"
                )
            given = len(before) - cut
            context = given if self._drops else None
            requests.append(self._scored(before[cut:] + after, given, context))
        return [_score(done) for done in self._serve(requests, on_done)]

    def loglikelihood_rolling(
        self, texts: Sequence[str], on_done: Callable[[int], object] = lambda n: None
    ) -> list[float]:
        """Computes log-probabilities of whole texts, in nats.

        Each token is scored once, in windows as long as the engine takes. The first window starts
        with `prefix_id`; the last one has as much context as fits.

        Args:
          texts: the texts.
          on_done: called with 1 when a window is done.

        Raises:
          RequestError: the engine drops tokens only at the end of a context; a text has none.
        """
        if self._drops and self._interval is None:
            raise RequestError(
                f"{self.engine.config.compression}: a whole text has no context to drop tokens "
                "from; use an interval, or a window"
            )
        requests, owners = [], []
        for owner, text in enumerate(texts):
            tokens, done = [self.prefix_id, *self._encode(text)], 1
            while done < len(tokens):
                end = min(len(tokens), done + self.engine.max_length - 1)
                start = max(0, end - self.engine.max_length)
                context = min(self._interval or 0, end - start) if self._drops else None
                requests.append(self._scored(tokens[start:end], done - start, context))
                owners.append(owner)
                done = end
        totals = [0.0] * len(texts)
        for owner, completion in zip(owners, self._serve(requests, on_done), strict=True):
            totals[owner] += _score(completion)[0]
        return totals

    def generate_until(
        self,
        pairs: Sequence[tuple[str, Mapping[str, Any]]],
        on_done: Callable[[int], object] = lambda n: None,
    ) -> list[str]:
        """Generates answers to prompts.

        Args:
          pairs: prompt and options: `until` (strings that end the answer), `max_gen_toks`,
            `do_sample`, and for sampling the fields of `SamplingParams`.
          on_done: called with 1 when an answer is done.

        Raises:
          RequestError: an option is unknown.
        """
        requests = [self._answered(prompt, dict(options)) for prompt, options in pairs]
        return [completion.text for completion in self._serve(requests, on_done)]

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        return self.encoder.encode(text, add_special_tokens=special) if text else []

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of context and continuation: the ids of both as one text, cut after the ids of
        the context."""
        if not context:
            return [self.prefix_id], self._encode(continuation)
        spaces = len(context) - len(context.rstrip())
        cut = len(context) - spaces  # a space belongs to the word after it
        before = self._encode(context[:cut], special=True) or [self.prefix_id]
        whole = self._encode(context + continuation, special=True)
        return before, whole[len(before) :]

    def _scored(self, tokens: list[int], given: int, context: int | None) -> Request:
        """A request that scores the tokens after the first `given`."""
        return Request(
            prompt=tuple(tokens),
            max_new_tokens=0,
            prompt_logprobs=True,
            prompt_logprobs_from=given,
            context=context,
        )

    def _answered(self, prompt: str, options: dict[str, Any]) -> Request:
        until = options.pop("until", None) or []
        until = [until] if isinstance(until, str) else list(until)
        new_tokens = int(options.pop("max_gen_toks", MAX_NEW_TOKENS))
        sampling = {name: options.pop(name) for name in SAMPLING if name in options}
        if not options.pop("do_sample", sampling.get("temperature", 0) > 0):
            sampling["temperature"] = 0.0
        if options:
            raise RequestError(f"unknown generation options: {', '.join(options)}")
        longest = self.engine.max_length
        new_tokens = max(1, min(new_tokens, longest - 1))
        tokens = self._encode(prompt, special=True) or [self.prefix_id]
        return Request(
            prompt=tuple(tokens[-(longest - new_tokens) :]),
            max_new_tokens=new_tokens,
            sampling=SamplingParams(**sampling),
            stop_ids=self.stop_ids,
            stop_strings=tuple(text for text in until if text),
        )

    def _serve(
        self, requests: Sequence[Request], on_done: Callable[[int], object]
    ) -> list[Completion]:
        completions = [self.engine.submit(request) for request in requests]
        while self.engine.has_work:
            for delta in self.engine.step():
                if delta.completion.finish_reason is not None:
                    on_done(1)
        for completion in completions:
            if completion.error is not None:
                raise RequestError(completion.error)
        return completions


def _score(completion: Completion) -> tuple[float, bool]:
    """Sum of the log-probabilities of the scored tokens, and whether each is the likeliest one."""
    assert completion.prompt_logprobs is not None and completion.prompt_greedy is not None
    scored = ~np.isnan(completion.prompt_logprobs)
    total = completion.prompt_logprobs[scored].sum(dtype=np.float64)
    return float(total), bool(completion.prompt_greedy[scored].all())
