"""A conversation as token ids, and what each of its turns took from the cache.

A chat template renders a conversation from text, and the text of an answer need not be encoded as
the tokens that were generated: then the cache, which compares ids, misses from there on. So what
was generated stays as it is, and only what the template puts between an answer and the next one is
rendered and encoded: where SmolLM2 writes `<|im_end|>`, a newline and the user's turn, that is all.
Templates that trim an answer, or leave its thinking out of later turns, can't take a hit away
either. Not a command; not here: whom the user talks to (`chat`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from jaxkv.cli.arguments.serving import make_engine
from jaxkv.engine import Completion, Engine, EngineConfig, PoolState, Request, RequestError
from jaxkv.models.chat import render_chat
from jaxkv.models.errors import ModelError
from jaxkv.models.loading import LoadedModel
from jaxkv.models.tokenizer import StreamDecoder, Tokenizer

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


class Conversation:
    """What was said so far, as text and as token ids.

    A model without a chat template gets a plain transcript, whose answers end with their line.

    Attributes:
      tokens: what the model has read and said, but for the token that ended its last answer.
      num_turns: answers so far.
      stop_strings: what ends an answer, beside the tokenizer's stop ids.
    """

    def __init__(self, tokenizer: Tokenizer, system: str | None = None):
        """Starts an empty conversation, with a system message or none."""
        self._tokenizer = tokenizer
        self._messages = [{"role": "system", "content": system}] if system else []
        self.num_turns = 0
        self.tokens: list[int] = []
        self.stop_strings = ("\n",) if tokenizer.chat_template is None else ()

    def prompt(self, text: str) -> list[int]:
        """Token ids of the conversation with a further turn of the user; changes nothing.

        They begin with `tokens`.

        Raises:
          ModelError: the text cannot be encoded, or the template is not one for conversations.
        """
        if self._tokenizer.chat_template is None:
            return self._plain(text)
        user = {"role": "user", "content": text}
        if not self.num_turns:
            return self._encode(self._render([*self._messages, user]))
        mark = _absent_from([text, *(message["content"] for message in self._messages)])
        answer = {"role": "assistant", "content": mark}
        parts = self._render([*self._messages[:-1], answer, user]).split(mark)
        if len(parts) != 2 or not parts[1]:
            raise ModelError("the chat template leaves answers out: it is none for conversations")
        return self.tokens + self._encode(parts[1])

    def add(self, text: str, prompt: list[int], completion: Completion) -> None:
        """Takes in a turn: the user's text, its prompt, and the answer."""
        answer = completion.tokens
        if answer and answer[-1] in self._tokenizer.stop_ids:
            answer = answer[:-1]  # the template writes the end of a turn
        self.tokens = prompt + answer
        self._messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": completion.text},
        ]
        self.num_turns += 1

    def _plain(self, text: str) -> list[int]:
        turn = f"User: {text}\nAssistant:"
        if not self.tokens:
            head = "".join(f"{message['content']}\n\n" for message in self._messages)
            return self._tokenizer.encode(head + turn)
        ended = self._tokenizer.decode(self.tokens[-1:]).endswith("\n")
        return self.tokens + self._encode(turn if ended else "\n" + turn)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        return render_chat(
            self._tokenizer.chat_template,
            messages,
            add_generation_prompt=True,
            bos_token=self._tokenizer.bos_token,
            eos_token=self._tokenizer.eos_token,
        )


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one turn cost.

    Attributes:
      prompt_tokens: the conversation up to the answer.
      cached_tokens: those of them that the index had.
      generated_tokens: of the answer, with the token that ended it.
      first_token_seconds: time to first token.
      uncached_seconds: the same without the index; None where it was not measured.
      pools: pages of each layer group before the step that ended the answer, which still held its
        own then.
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
        """Share of the prompt that the index had."""
        return self.cached_tokens / self.prompt_tokens


class Talker:
    """An engine for one conversation at a time, and one without the index to compare it with.

    Attributes:
      engine: with the index.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, *, compare: bool):
        """Makes the engines; they share the model's parameters.

        Args:
          loaded: with a tokenizer.
          config: of the engine with the index.
          compare: measure each turn's time to first token without the index, too.
        """
        tokenizer = loaded.require_tokenizer()

        def detokenizer() -> StreamDecoder:
            return StreamDecoder(tokenizer, continues=True)

        self.engine = make_engine(loaded, config, detokenizer)
        self._twin: Engine | None = None
        if compare:
            without = replace(config, prefix_cache=False)
            self._twin = make_engine(loaded, without, steps=self.engine.steps)

    def warm_up(self) -> None:
        """Runs each shape of step once, so that no turn waits for a compiler."""
        self.engine.warm_up()

    def say(self, request: Request, show: Callable[[str], object]) -> tuple[Completion, Turn]:
        """Serves a turn; `show` gets the answer's text as it is made.

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
        """Time to first token of a prompt that is computed whole."""
        if self._twin is None:
            return None
        alone = Request(prompt=request.prompt, max_new_tokens=1, sampling=request.sampling)
        return self._twin.generate([alone])[0].first_token_seconds


def _absent_from(texts: Sequence[str]) -> str:
    """A text that stands in none of them."""
    marks = ("\ue000" * n for n in count(1))
    return next(mark for mark in marks if not any(mark in text for text in texts))
