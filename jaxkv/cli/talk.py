"""A conversation whose turns are measured: how much of each prompt was cached, and what that saved.

Used by `chat` and `tree`; this is not a command.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxkv.engine import Completion, Engine, PoolState, Request, RequestError
from jaxkv.llm import LLM, make_engine

DEMO_SYSTEM = (
    "You are a patient teacher of how large language models are served. Your student is an "
    "engineer who knows programming, but not machine learning. Answer in one or two short "
    "sentences. Use plain words, no lists and no formulas. When a question refers to something "
    "that was said before, answer it from there."
)
DEMO_TURNS = (
    "What does a language model compute again for every word when it has no KV cache?",
    "What exactly is kept in a KV cache?",
    "What is the price of keeping it?",
    "How can the next turn of a conversation use what the last one has computed?",
    "Sum up this conversation in one sentence.",
)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one turn cost.

    Attributes:
      prompt_tokens: tokens of the conversation up to the answer.
      cached_tokens: prompt tokens that the prefix index had.
      generated_tokens: tokens of the answer, including the token that ended it.
      first_token_seconds: time to first token.
      uncached_seconds: time to first token without the index; None if it was not measured.
      pools: pages of each layer group just before the step that ended the answer, when the turn
        still held its own pages.
    """

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    first_token_seconds: float
    uncached_seconds: float | None
    pools: tuple[PoolState, ...]

    @property
    def recomputed_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def hit_rate(self) -> float:
        """Share of the prompt that was cached."""
        return self.cached_tokens / self.prompt_tokens


class Talker:
    """Serves turns with the prefix index, and optionally measures them without it, too.

    Attributes:
      engine: the engine with the index.
    """

    def __init__(self, llm: LLM, *, compare: bool):
        """Makes the second engine, if `compare` asks for one; the two share weights and steps."""
        self.engine = llm.engine
        self._without: Engine | None = None
        if compare:
            config = replace(llm.engine.config, prefix_cache=False)
            self._without = make_engine(llm.loaded.model, config, steps=llm.engine.steps)

    def say(self, request: Request, show: Callable[[str], object]) -> tuple[Completion, Turn]:
        """Serves a turn; `show` gets the answer's text as it is generated.

        Raises:
          RequestError: the prompt leaves no room for an answer.
        """
        engine, room = self.engine, self.engine.max_length
        if len(request.prompt) >= room:
            raise RequestError(
                f"the conversation has {len(request.prompt)} tokens and {room} fit with an answer: "
                "/reset starts a new one, and a larger --pool-tokens may hold more"
            )
        completion, pools = engine.submit(request), tuple(engine.pool_states)
        try:
            while completion.finish_reason is None:
                pools = tuple(engine.pool_states)
                for delta in engine.step():
                    show(delta.text)
        finally:
            engine.abort(completion.request_id)
        return completion, Turn(
            prompt_tokens=completion.prompt_tokens,
            cached_tokens=completion.cached_tokens,
            generated_tokens=len(completion.tokens),
            first_token_seconds=completion.first_token_seconds or 0.0,
            uncached_seconds=self._uncached_seconds(request),
            pools=pools,
        )

    def _uncached_seconds(self, request: Request) -> float | None:
        """Time to first token if the whole prompt is computed."""
        if self._without is None:
            return None
        first = Request(prompt=request.prompt, max_new_tokens=1, sampling=request.sampling)
        return self._without.generate([first])[0].first_token_seconds


def turn_line(number: int, turn: Turn) -> str:
    """The figures of a turn in one line."""
    without = ""
    if turn.uncached_seconds is not None:
        without = f", {turn.uncached_seconds:.3f} s without the index"
    return (
        f"[turn {number}: prompt {turn.prompt_tokens} = {turn.cached_tokens} hit + "
        f"{turn.recomputed_tokens} recomputed; {turn.generated_tokens} generated; "
        f"first token {turn.first_token_seconds:.3f} s{without}]"
    )


def trace(turns: Sequence[Turn]) -> str:
    """All turns as a table, and what the index saved."""
    head = (
        *("turn", "prompt", "hit", "recomputed", "generated", "hit rate", "first token, s"),
        *("without index, s", "pages free/cached/held"),
    )
    rows: list[tuple[str, ...]] = [head]
    for number, turn in enumerate(turns, 1):
        counts = turn.prompt_tokens, turn.cached_tokens, turn.recomputed_tokens
        rows.append(
            (
                *map(str, (number, *counts, turn.generated_tokens)),
                f"{turn.hit_rate:.1%}",
                f"{turn.first_token_seconds:.3f}",
                _seconds(turn.uncached_seconds),
                " + ".join(f"{pool.free}/{pool.cached}/{pool.held}" for pool in turn.pools),
            )
        )
    prompt = sum(turn.prompt_tokens for turn in turns)
    hit = sum(turn.cached_tokens for turn in turns)
    without = [turn.uncached_seconds for turn in turns if turn.uncached_seconds is not None]
    rows.append(
        (
            *("sum", str(prompt), str(hit), str(prompt - hit)),
            str(sum(turn.generated_tokens for turn in turns)),
            f"{hit / prompt:.1%}",
            f"{sum(turn.first_token_seconds for turn in turns):.3f}",
            _seconds(sum(without) if len(without) == len(turns) else None),
            "",
        )
    )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    saved = (
        f"{hit} of {prompt} prompt tokens were not computed again: {hit / prompt:.1%} of prefill"
    )
    return "\n".join([*lines, saved])


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"
