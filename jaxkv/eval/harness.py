"""What evaluation harnesses ask of a model: log-likelihoods of continuations and of whole texts,
and answers up to a stop, by an engine in any format and under any method that drops tokens.

Words are those of lm-evaluation-harness. Under a method that drops tokens of a context, the context
of a continuation loses them before the continuation is scored; a prompt to be answered loses them
at its end. Not here: the harness itself (`jaxkv.models.harness` is its side).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxkv.engine import Completion, Engine, Request, RequestError, SamplingParams

MAX_NEW_TOKENS = 256  # of an answer, where a task sets no limit
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Encoder(Protocol):
    """Turns text into token ids."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text of one character at least."""
        ...


class HarnessModel:
    """An engine as harnesses see it.

    Attributes:
      engine: with a detokenizer.
      encoder: of the engine's model.
      prefix_id: stands before the first token of a text that is scored from its beginning.
      stop_ids: end every answer.
    """

    def __init__(
        self, engine: Engine, encoder: Encoder, *, prefix_id: int, stop_ids: Iterable[int] = ()
    ):
        """Takes an engine without requests."""
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
          pairs: context, which may be empty, and continuation. What of a pair is longer than the
            engine takes is cut from the context's beginning.
          on_done: called with 1 as each is done.

        Returns:
          Of each the natural-log probability, and whether greedy decoding would give it.

        Raises:
          RequestError: a continuation is longer than the engine takes.
        """
        parts = [self._split(*pair) for pair in pairs]
        requests = []
        for before, behind in parts:
            cut = max(0, len(before) + len(behind) - self.engine.max_length)
            if cut >= len(before):
                raise RequestError(
                    f"{len(behind)} tokens to score; the engine takes {self.engine.max_length} "
                    "with one before them"
                )
            given = len(before) - cut
            context = given if self._drops else None
            requests.append(self._scored(before[cut:] + behind, given, context))
        return [_score(one) for one in self._serve(requests, on_done)]

    def loglikelihood_rolling(
        self, texts: Sequence[str], on_done: Callable[[int], object] = lambda n: None
    ) -> list[float]:
        """Log-probabilities of whole texts.

        Each token is scored once, in windows as long as the engine takes, the first one behind
        `prefix_id`, the last one with as much context as fits.

        Raises:
          RequestError: the engine drops tokens of a context alone, and a whole text has none.
        """
        if self._drops and self._interval is None:
            raise RequestError(
                f"{self.engine.config.compression}: a whole text has no context to drop tokens "
                "from; give an interval, or a window"
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
        for owner, one in zip(owners, self._serve(requests, on_done), strict=True):
            totals[owner] += _score(one)[0]
        return totals

    def generate_until(
        self,
        pairs: Sequence[tuple[str, Mapping[str, Any]]],
        on_done: Callable[[int], object] = lambda n: None,
    ) -> list[str]:
        """Answers to prompts.

        Args:
          pairs: prompt, and how to go on: `until` (texts that end the answer), `max_gen_toks`,
            `do_sample`, and with it fields of `SamplingParams`.
          on_done: called with 1 as each is done.

        Raises:
          RequestError: an option is not known.
        """
        requests = [self._answered(prompt, dict(options)) for prompt, options in pairs]
        return [one.text for one in self._serve(requests, on_done)]

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        return self.encoder.encode(text, add_special_tokens=special) if text else []

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both: those of the text as a whole, cut where the context's end."""
        if not context:
            return [self.prefix_id], self._encode(continuation)
        spaces = len(context) - len(context.rstrip())
        cut = len(context) - spaces  # a word's space goes with the word
        before = self._encode(context[:cut], special=True) or [self.prefix_id]
        whole = self._encode(context + continuation, special=True)
        return before, whole[len(before) :]

    def _scored(self, tokens: list[int], given: int, context: int | None) -> Request:
        """Scores the tokens behind the first `given`."""
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
        most = int(options.pop("max_gen_toks", MAX_NEW_TOKENS))
        drawn = {name: options.pop(name) for name in SAMPLING if name in options}
        if not options.pop("do_sample", drawn.get("temperature", 0) > 0):
            drawn["temperature"] = 0.0
        if options:
            raise RequestError(f"no such options of an answer: {', '.join(options)}")
        longest = self.engine.max_length
        most = max(1, min(most, longest - 1))
        tokens = self._encode(prompt, special=True) or [self.prefix_id]
        return Request(
            prompt=tuple(tokens[-(longest - most) :]),
            max_new_tokens=most,
            sampling=SamplingParams(**drawn),
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
    """Log-probability of all prompt tokens that were scored, and whether all are the likeliest."""
    assert completion.prompt_logprobs is not None and completion.prompt_greedy is not None
    scored = ~np.isnan(completion.prompt_logprobs)
    total = completion.prompt_logprobs[scored].sum(dtype=np.float64)
    return float(total), bool(completion.prompt_greedy[scored].all())
