"""`LLM`: a model, its tokenizer and an engine in one object. Text in, text out."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, overload

import jax
from jax.typing import DTypeLike
from tqdm import tqdm

from jaxkv.conversation import Conversation
from jaxkv.engine import (
    Completion,
    Delta,
    Engine,
    EngineConfig,
    Request,
    RequestError,
    SamplingParams,
)
from jaxkv.engine.step import StepFunctions
from jaxkv.engine.stopping import DetokenizerFactory
from jaxkv.errors import JaxkvError, UsageError
from jaxkv.kv_format import preferred_page_size
from jaxkv.memory import free_memory
from jaxkv.models.decode_model import FlaxDecodeModel
from jaxkv.models.loading import LoadedModel, load_model, loading_bar
from jaxkv.models.tokenizer import StreamDecoder, Tokenizer

Prompt = str | Sequence[int]
MAX_CONVERSATIONS = 64  # whose token ids are remembered
BAR_DELAY = 2.0  # seconds before a progress bar is shown


class LLM:
    """A language model that generates text through the paged KV cache.

    Example:
      >>> from jaxkv import LLM, SamplingParams
      >>> with LLM("smollm2-135m", kv_format="int8") as llm:
      ...     answer = llm.generate("The capital of France is", max_new_tokens=8)
      ...     print(answer.text)
      ...     for text in llm.stream("Once upon a time", SamplingParams(temperature=0.7)):
      ...         print(text, end="", flush=True)

    One engine serves all calls, so a prompt that begins like an earlier one finds the K and V of
    that beginning in the cache.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel = "smollm2-135m",
        *,
        dtype: DTypeLike = "float32",
        memory_share: float = 0.5,
        **config: Any,
    ):
        """Loads the model and allocates the KV cache. Steps are compiled when they are first used.

        Args:
          model: a name (`smollm2-135m`, `gemma3-270m`), which is downloaded once; the path of a
            Hugging Face directory, of a `.gguf` file, or of a directory that `jaxkv convert` wrote;
            or a model that `jaxkv.models.loading.load_model` returned.
          dtype: type of the weight matrices: float32, bfloat16 or float16. A loaded model keeps
            its own.
          memory_share: the share of the free memory that the KV cache may take, above 0 and at most
            1. Free memory is that of the GPU or TPU after the model was loaded, or the main memory
            on a CPU. The cache is never larger than `max_sequences` sequences of `max_length` need.
            `pool_bytes` replaces the share, and `pool_tokens` replaces both limits.
          **config: any field of `EngineConfig`, such as `max_sequences`, `max_length`, `kv_format`
            or `compression`. `page_size` defaults to what suits the KV format.

        Raises:
          ModelError: there is no such model, or its files cannot be used.
          UsageError: an option is out of range, does not suit the model, or needs more memory than
            there is.
          TypeError: there is no such option.
        """
        if not 0 < memory_share <= 1:
            raise UsageError(f"memory_share must be above 0 and at most 1, got {memory_share}")
        if not isinstance(model, LoadedModel):
            with loading_bar() as show:
                model = load_model(str(model), dtype, progress=show)
        self._open: tuple[LoadedModel, Engine] | None = (
            model,
            self._make_engine(model, memory_share, config),
        )
        self._conversations: OrderedDict[tuple[tuple[str, str], ...], Conversation] = OrderedDict()

    @staticmethod
    def _make_engine(loaded: LoadedModel, memory_share: float, config: dict[str, Any]) -> Engine:
        if not {"pool_tokens", "pool_bytes"} & config.keys():
            free = free_memory(jax.devices()[0])
            config = config | {"pool_bytes": max(1, int(memory_share * free))}
        if config.get("page_size") is None:
            config = config | {"page_size": page_size_for(config.get("kv_format", "f32"))}
        tokenizer = loaded.tokenizer
        make_decoder = None
        if tokenizer is not None:
            make_decoder = partial(StreamDecoder, tokenizer, continues=True)
        return make_engine(loaded.model, EngineConfig(**config), detokenizer=make_decoder)

    @property
    def engine(self) -> Engine:
        """The engine that serves the calls: its `config`, `metrics`, `pool_states`, `index`."""
        return self._opened()[1]

    @property
    def loaded(self) -> LoadedModel:
        """The model with its tokenizer, name and source."""
        return self._opened()[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model.

        Raises:
          ModelError: the model's files have none.
        """
        return self.loaded.require_tokenizer()

    def warm_up(self) -> None:
        """Compiles every shape of step now, so that steps need no compiler later.

        Log-probabilities of prompts and dropping tokens are still compiled when they are first
        used.
        """
        self.engine.warm_up()

    def close(self) -> None:
        """Releases the cache and, if nothing else uses it, the model. Calls after this one fail."""
        self._open = None
        self._conversations.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]: a text is a sequence of texts
        self, prompts: Prompt, sampling: SamplingParams | None = None, **options: Any
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> Completion | list[Completion]:
        """Continues one prompt, or several together.

        A progress bar appears on stderr after two seconds, if stderr is a terminal.

        Args:
          prompts: text or a list of token ids, or a list of either. The text is continued as it is;
            `chat` puts it into the model's chat template.
          sampling: how tokens are drawn; None takes the most likely one. One `SamplingParams` is
            used for all prompts, with the seed `seed + i * n` for prompt i; a list has one entry
            per prompt, used as it is.
          **options: see `request`: `max_new_tokens`, `stop_ids`, `stop_strings`, `n`, `logprobs`
            and the other fields of `Request`.

        Returns:
          A `Completion` for one prompt, else a list of them in the order of the prompts. It has
          `text`, `tokens`, `finish_reason`, `cached_tokens` and more.

        Raises:
          ModelError: the text of a prompt is empty.
          RequestError: a prompt is too long, or an option is out of range. The message names the
            prompt by its number if there are several; the other prompts are aborted.

        Example:
          >>> llm.generate("Water boils at", max_new_tokens=4).text
          >>> [answer.text for answer in llm.generate(["One, two,", "Red, green,"])]
        """
        completions: list[Completion] = []
        for _ in self._served(self._requests(prompts, sampling, options), completions):
            pass  # the completions are filled in place
        return completions[0] if _is_one(prompts) else completions

    @overload
    def stream(  # pyright: ignore[reportOverlappingOverload]: a text is a sequence of texts
        self, prompts: Prompt, sampling: SamplingParams | None = None, **options: Any
    ) -> Iterator[str]: ...

    @overload
    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> Iterator[tuple[int, str]]: ...

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> Iterator[str] | Iterator[tuple[int, str]]:
        """Yields the text of answers while it is generated; arguments and errors as in `generate`,
        except that `n` must be 1.

        Leaving the loop early aborts what is unfinished. Several streams may be open at once.

        Yields:
          For one prompt, pieces of its answer. For several, pairs of the prompt's number, from 0,
          and a piece of its answer; the pieces of different answers alternate.

        Example:
          >>> for number, text in llm.stream(["One, two,", "Red, green,"]):
          ...     print(number, repr(text))
        """
        requests = self._requests(prompts, sampling, options)
        if any(request.n > 1 for request in requests):
            raise UsageError("stream gives one answer per prompt; use generate for n above 1")
        deltas = self._served(requests)
        if _is_one(prompts):
            return (delta.text for _, delta in deltas if delta.text)
        return ((number, delta.text) for number, delta in deltas if delta.text)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling: SamplingParams | None = None,
        *,
        on_text: Callable[[str], object] | None = None,
        **options: Any,
    ) -> Completion:
        """Answers the last message of a conversation, in the model's chat template.

        The token ids of the answer are remembered. If `messages` continues a conversation that was
        answered here before, the whole of it is found in the cache.

        Args:
          messages: each has a `role` (`system`, `user`, `assistant`) and a `content`; the last one
            is the user's. A model without a chat template gets a plain transcript.
          sampling: how tokens are drawn; None takes the most likely one.
          on_text: called with each piece of the answer while it is generated.
          **options: see `request`.

        Returns:
          The answer; append its `text` as a message of the assistant to go on.

        Raises:
          UsageError: a message has no role or text, or the last one is not the user's; `n` is
            not 1.
          ModelError: the text cannot be encoded, or the template refuses the messages.
          RequestError: the conversation is too long, or an option is out of range.

        Example:
          >>> messages = [{"role": "user", "content": "What is a KV cache?"}]
          >>> answer = llm.chat(messages)
          >>> messages += [{"role": "assistant", "content": answer.text},
          ...              {"role": "user", "content": "What does it cost?"}]
          >>> llm.chat(messages).cached_tokens
        """
        *before, last = _checked(messages)
        talk = self._conversations.get(_key(before))
        if talk is None:
            talk = Conversation(self.tokenizer, tuple(before))
        text = last["content"]
        prompt = talk.prompt(text)
        stops = _listed(options.pop("stop_strings", ()))
        request = self.request(
            prompt, sampling, stop_strings=(*stops, *talk.stop_strings), **options
        )
        if request.n != 1:
            raise UsageError(f"n must be 1 in a chat, got {request.n}")
        completions: list[Completion] = []
        for _, delta in self._served([request], completions):
            if on_text is not None and delta.text:
                on_text(delta.text)
        (answer,) = completions
        talk = talk.answered(text, prompt, answer.tokens, answer.text)
        self._conversations[_key(talk.messages)] = talk
        if len(self._conversations) > MAX_CONVERSATIONS:
            self._conversations.popitem(last=False)
        return answer

    def request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        stop_ids: Collection[int] | None = None,
        stop_strings: str | Sequence[str] = (),
        **options: Any,
    ) -> Request:
        """Makes a request for `engine` or `serve` from a prompt and options.

        Args:
          prompt: text or token ids.
          sampling: how tokens are drawn; None takes the most likely one.
          stop_ids: ids that end the answer; None takes the tokenizer's end-of-turn ids, an empty
            list takes none.
          stop_strings: texts that end the answer; it is cut before the first of them.
          **options: other fields of `Request`: `max_new_tokens`, `n`, `logprobs`, `priority`, ...

        Raises:
          ModelError: the text cannot be encoded, or there is no tokenizer.
          RequestError: the prompt has no token or is no list of ids, or an option is out of range.
        """
        if stop_ids is None:
            tokenizer = self.loaded.tokenizer
            stop_ids = () if tokenizer is None else tokenizer.stop_ids
        return Request(
            prompt=self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt,
            sampling=sampling or SamplingParams(),
            stop_ids=stop_ids,
            stop_strings=_listed(stop_strings),
            **options,
        )

    def serve(
        self,
        requests: Sequence[Request],
        completions: list[Completion] | None = None,
        *,
        progress: bool | None = None,
    ) -> Generator[tuple[int, Delta], None, None]:
        """Serves requests as `Engine.stream` does, under a progress bar.

        Args:
          requests: the requests, which `request` makes.
          completions: a list that gets the completion of each request, in order.
          progress: True shows the bar, False does not; None shows it after two seconds if stderr is
            a terminal.

        Yields:
          The number of a request, from 0, and what a step adds to it. A request that is refused
          yields one delta, whose completion has the reason as its `error`; the others are served.
        """
        completions = [] if completions is None else completions
        completions += self.engine.submit_all(requests)
        numbers = _numbers(completions)
        total = sum(request.max_new_tokens * request.n for request in requests)
        hide = None if progress is None else not progress
        delay = BAR_DELAY if progress is None else 0.0
        with (
            tqdm(total=total, unit="token", desc="generating", disable=hide, delay=delay) as bar,
            closing(self.engine.follow(completions)) as deltas,
        ):
            for delta in deltas:
                number = numbers[delta.completion.request_id]
                bar.update(len(delta.tokens))
                if delta.completion.finish_reason is not None:
                    # An answer that ended before its limit leaves no tokens to wait for.
                    bar.total -= requests[number].max_new_tokens - len(delta.completion.tokens)
                yield number, delta

    def _opened(self) -> tuple[LoadedModel, Engine]:
        if self._open is None:
            raise UsageError("this LLM was closed")
        return self._open

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        options: dict[str, Any],
    ) -> list[Request]:
        listed: Sequence[Any] = [prompts] if _is_one(prompts) else prompts
        if sampling is None or isinstance(sampling, SamplingParams):
            base, n = sampling or SamplingParams(), options.get("n", 1)
            seeds = [(base.seed + i * n) % (1 << 32) for i in range(len(listed))]
            drawn = [replace(base, seed=seed) for seed in seeds]
        else:
            drawn = list(sampling)
            if len(drawn) != len(listed):
                raise UsageError(
                    f"{len(drawn)} SamplingParams were given for {len(listed)} prompts"
                )
        requests = []
        for number, (prompt, params) in enumerate(zip(listed, drawn, strict=True)):
            try:
                requests.append(self.request(prompt, params, **options))
            except JaxkvError as error:
                raise type(error)(_numbered(number, len(listed), str(error))) from None
        return requests

    def _served(
        self, requests: list[Request], completions: list[Completion] | None = None
    ) -> Generator[tuple[int, Delta], None, None]:
        """As `serve`; a request that is refused raises RequestError and aborts the others."""
        with closing(self.serve(requests, completions)) as deltas:
            for number, delta in deltas:
                if delta.completion.error is not None:
                    error = _numbered(number, len(requests), delta.completion.error)
                    raise RequestError(error)
                yield number, delta


def make_engine(
    model: FlaxDecodeModel,
    config: EngineConfig,
    *,
    detokenizer: DetokenizerFactory | None = None,
    steps: StepFunctions | None = None,
) -> Engine:
    """An engine whose errors say what to change; the arguments are those of `Engine`.

    Raises:
      UsageError: a value of `config` is out of range or does not suit the model, or the cache does
        not fit into memory.
    """
    try:
        return Engine(model, config, detokenizer=detokenizer, steps=steps)
    except JaxkvError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from None
    except jax.errors.JaxRuntimeError as error:
        asked = config.pool_tokens
        size = f"{config.pool_bytes} bytes" if asked is None else f"{asked} tokens"
        reason = str(error).partition("\n")[0]
        raise UsageError(f"a cache of {size} cannot be allocated: {reason}") from None


def page_size_for(kv_format: object) -> int:
    """Tokens per page that suit a KV format; the default of `EngineConfig` for one of your own.

    Raises:
      UsageError: there is no format of that name.
    """
    return preferred_page_size(kv_format) if isinstance(kv_format, str) else EngineConfig.page_size


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether it is one prompt and not several: text, or a list of numbers."""
    return isinstance(prompts, str) or (len(prompts) > 0 and not hasattr(prompts[0], "__len__"))


def _listed(texts: str | Sequence[str]) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else tuple(texts)


def _numbered(number: int, count: int, error: str) -> str:
    return error if count == 1 else f"prompt {number}: {error}"


def _numbers(completions: Sequence[Completion]) -> dict[int, int]:
    """The number of the request that each completion answers, by request id."""
    return {
        one.request_id: number
        for number, completion in enumerate(completions)
        for one in (completion, *completion.samples)
    }


def _checked(messages: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """The messages, the last of which is the user's.

    Raises:
      UsageError: one has no role or no text, or the last is not the user's.
    """
    for number, message in enumerate(messages):
        for name in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(name), str):
                raise UsageError(f"message {number} needs a text as its {name!r}")
    if not messages or messages[-1]["role"] != "user":
        raise UsageError("the last message of a conversation must have the role 'user'")
    return list(messages)


def _key(messages: Sequence[Mapping[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((message["role"], message["content"]) for message in messages)
