"""Beam search over an engine: the most likely whole answers, extended by one token at a time.

A beam that continues in two ways is forked. The forks share its pages, and each copies the last one
before it writes to it. Other requests may run on the same engine at the same time.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from jaxkv.engine.completion import Completion
from jaxkv.engine.engine import Engine
from jaxkv.engine.request import MAX_TOP_LOGPROBS, Request, RequestError


@dataclass(frozen=True)
class Beam:
    """A hypothesis.

    Attributes:
      tokens: generated tokens, a stop id included.
      logprob: sum of their natural-log probabilities.
      finished: it ends with a stop id.
    """

    tokens: tuple[int, ...]
    logprob: float
    finished: bool

    def score(self, length_penalty: float) -> float:
        """Log-probability over length to the power of `length_penalty` (arXiv 1609.08144)."""
        return self.logprob / len(self.tokens) ** length_penalty


@dataclass(frozen=True)
class _Live:
    """An unfinished hypothesis, and the request that computes its next token."""

    beam: Beam
    completion: Completion


def beam_search(
    engine: Engine, request: Request, *, width: int = 4, length_penalty: float = 1.0
) -> list[Beam]:
    """Finds likely answers to a prompt.

    Example:
      >>> best, *others = beam_search(engine, Request(prompt=[1, 2, 3], max_new_tokens=16))
      >>> best.tokens, best.logprob

    Args:
      engine: if it runs fewer than `width` sequences at once, beams wait for each other.
      request: greedy, with `max_new_tokens` and `stop_ids`; its `n` and logprobs are ignored.
      width: number of hypotheses that are kept at each length.
      length_penalty: 0 ranks by probability, 1 by probability per token.

    Returns:
      At most `width` hypotheses, best first.

    Raises:
      RequestError: the request cannot be served, or the width is not 1 to MAX_TOP_LOGPROBS // 2.
    """
    if not 1 <= width <= MAX_TOP_LOGPROBS // 2:
        raise RequestError(f"width must be 1 to {MAX_TOP_LOGPROBS // 2}, got {width}")
    most = min(request.max_new_tokens, engine.max_length - len(request.prompt) - 1)
    # Beams end here, not in the engine: it could go on for one token more.
    asked = replace(
        request,
        n=1,
        logprobs=2 * width,
        stop_ids=frozenset(),
        stop_strings=(),
        max_new_tokens=most + 1,
    )
    live = [_Live(Beam((), 0.0, False), engine.submit(asked, stepwise=True))]
    done: list[Beam] = []
    kept: list[tuple[Beam, _Live]] = []
    try:
        for length in range(1, most + 1):
            while any(len(one.completion.tokens) < length for one in live):
                engine.step()
            grown = _grow(live, request.stop_ids)[: 2 * width]
            done += [beam for beam, _ in grown if beam.finished]
            kept = [pair for pair in grown if not pair[0].finished][:width]
            if len(done) >= width or length == most:
                break
            live = _branch(engine, live, kept)
    finally:
        for one in live:
            engine.abort(one.completion.request_id)
    if len(done) < width:
        done += [beam for beam, _ in kept]
    return sorted(done, key=lambda beam: -beam.score(length_penalty))[:width]


def _grow(live: list[_Live], stop_ids: Collection[int]) -> list[tuple[Beam, _Live]]:
    """All beams one token longer, likeliest first, each with the one that it goes on from."""
    grown = [
        (Beam((*one.beam.tokens, token), one.beam.logprob + logprob, token in stop_ids), one)
        for one in live
        for token, logprob in one.completion.logprobs[-1].top
    ]
    return sorted(grown, key=lambda pair: -pair[0].logprob)


def _branch(engine: Engine, live: list[_Live], kept: list[tuple[Beam, _Live]]) -> list[_Live]:
    """Continues the kept beams: the first beam of a request in its place, further ones in forks."""
    first: dict[int, Beam] = {}
    branches = []
    for beam, origin in kept:
        request_id = origin.completion.request_id
        if request_id not in first:
            first[request_id] = beam
        else:
            branches.append(_Live(beam, engine.fork(request_id, last_token=beam.tokens[-1])))
    for one in live:
        request_id = one.completion.request_id
        if request_id in first:
            engine.resume(request_id, first[request_id].tokens[-1])
            branches.append(_Live(first[request_id], one.completion))
        else:
            engine.abort(request_id)
    return branches
