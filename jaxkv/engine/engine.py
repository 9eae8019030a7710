"""The engine: turns requests into steps and steps into tokens.

Life of a request: `submit` checks it and queues a sequence; `step` asks the scheduler for a plan,
copies the pages that are shared in part, runs the jitted step with the cache donated, and books the
result: tokens are appended, text is settled, what is computed becomes known to the prefix index,
finished sequences give their pages back. `abort` ends one in any state.
Not here: which sequence goes first (`scheduler`), what a step computes (`step`, `sampling`).
"""

import dataclasses
import time
from array import array
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np

from jaxkv.cache import KVCache, format_id, init_cache
from jaxkv.engine.config import EngineConfig
from jaxkv.engine.host import HostSide
from jaxkv.engine.metrics import EngineMetrics, PoolState
from jaxkv.engine.prompt_logprobs import book_prompt_logprobs
from jaxkv.engine.request import (
    Completion,
    Delta,
    DetokenizerFactory,
    FinishReason,
    Request,
    RequestError,
    TokenLogprob,
)
from jaxkv.engine.sampling import Sampled, SamplingRows
from jaxkv.engine.scheduler import PageCopy, Scheduler, StepPlan
from jaxkv.engine.sequence import Sequence, mark_seen
from jaxkv.engine.shortener import Shortener
from jaxkv.engine.sizing import cache_capacity, longest_sequence, plan_cache
from jaxkv.engine.step import (
    ShapeTable,
    StepFunctions,
    StepLayout,
    StepResult,
    StepShape,
    build_buffer,
)
from jaxkv.engine.stopping import AnswerText
from jaxkv.engine.streams import Streams
from jaxkv.model import DecodeModel
from jaxkv.prefix import Event, Namespace, ShortenedTables, pack


class Engine:
    """Continuous batching of one model over a paged KV cache.

    Attributes:
      config: sizes and choices.
      spec: of the cache.
      pools: page pool of each layer group.
      index: of cached prefixes; None where the config switches it off.
      pins: prefixes that stay in it; None as well.
      shapes: that a step may have, each compiled when it is first needed.
      steps: the compiled functions.
      metrics: what was done so far.
    """

    def __init__(
        self,
        model: DecodeModel,
        config: EngineConfig | None = None,
        *,
        detokenizer: DetokenizerFactory | None = None,
        page_events: Callable[[Event], None] | None = None,
        steps: StepFunctions | None = None,
    ):
        """Allocates the cache; nothing is compiled yet.

        Args:
          model: the decoder.
          config: sizes and choices; None takes the defaults.
          detokenizer: makes a detokenizer a request; None leaves answers without text, and
            refuses stop strings.
          page_events: called with each page that the prefix index stores or lets go.
          steps: of another engine with the same model, backend and determinism, so that two engines
            compile each step once.

        Raises:
          ValueError: a value of `config` that cannot be used, or other engine's steps.
        """
        self.config = config or EngineConfig()
        self.config.check()
        self._model = model
        self._detokenizer = detokenizer
        self.spec = plan_cache(model, self.config)
        self._cache = init_cache(self.spec)
        self.max_length = longest_sequence(model, self.config, self.spec)
        host = HostSide.build(self.spec, self.config, self.max_length, page_events)
        self.pools, self.index, self.pins = host.pools, host.index, host.pins
        self._tables = host.tables
        self._bytes_per_page = [self.spec.bytes_per_page(g) for g in range(len(self.pools))]
        self.shapes = ShapeTable.plan(
            self.config.max_sequences,
            self.config.token_budget,
            deterministic=self.config.deterministic,
        )
        self._scheduler = Scheduler(
            self._tables,
            self.index,
            max_sequences=self.config.max_sequences,
            token_budget=min(self.config.token_budget, self.shapes.most_tokens),
            scheduling=self.config.scheduling,
        )
        self.steps = steps or StepFunctions(
            model, backend=self.config.backend, deterministic=self.config.deterministic
        )
        self.steps.check(model, self.config.backend, self.config.deterministic)
        self._shortener = self._make_shortener()
        self._layouts: dict[StepShape, StepLayout] = {}  # of the shapes that were run
        self._sampling = SamplingRows(self.config.max_sequences, model.vocab_size)
        self._sequences: dict[int, Sequence] = {}
        self._streams = Streams()
        self._next_id = 0
        self.metrics = EngineMetrics()

    def _make_shortener(self) -> Shortener | None:
        compression = self.config.compression
        if compression is None or compression.is_window:
            return None
        assert isinstance(self._tables, ShortenedTables)
        compressor = self.steps.compressor(compression.score_method(), self._cache)
        parts = self._scheduler, self._tables, self.index
        return Shortener(compression, compressor, *parts, copy=self._copied)

    def _copied(self, cache: KVCache, copies: list[PageCopy]) -> KVCache:
        """The cache, which is donated, with pages copied, of whose number a step may have more."""
        most = self.config.max_sequences
        for start in range(0, len(copies), most):
            cache = self.steps.copy(cache, copies[start : start + most], most)
        return cache

    @property
    def has_work(self) -> bool:
        """Some request is unfinished."""
        return bool(self._sequences)

    @property
    def kv_bytes_held(self) -> int:
        """Bytes of the pages that sequences hold now."""
        return sum(
            pool.num_held * nbytes
            for pool, nbytes in zip(self.pools, self._bytes_per_page, strict=True)
        )

    @property
    def pool_states(self) -> list[PoolState]:
        """Pages that are free, cached and held, of each layer group."""
        return [PoolState(pool.num_free, pool.num_cached, pool.num_held) for pool in self.pools]

    def namespace(
        self, adapter: tuple[str, int] | None = None, cache_salt: str | None = None
    ) -> Namespace:
        """Where the index keeps the prefixes of requests with this adapter and salt."""
        compression = self.config.compression
        window = compression if compression is not None and compression.is_window else None
        formats = format_id(self.spec.formats)
        return Namespace(kv_format=formats, method=window, adapter=adapter, salt=cache_salt)

    def submit(self, request: Request, *, stepwise: bool = False) -> Completion:
        """Queues a request.

        Args:
          request: the request.
          stepwise: wait after each token until `resume` says with which one to go on. Such a
            request has no text.

        Returns:
          Its completion, which later steps fill; further answers (`Request.n`) are its `samples`.

        Raises:
          RequestError: the request can never be served; nothing is queued.
        """
        request.check(self._model.vocab_size)
        longest = self.max_length - min(1, request.max_new_tokens)  # a token of answer at least
        if len(request.prompt) > longest:
            capacity = cache_capacity(self.spec, self.config)
            cache = "" if capacity is None else f", the cache {capacity}"
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens; the longest that fits is {longest} "
                f"(the model takes {self._model.max_positions} with the answer{cache})"
            )
        if self._shortener is not None:
            self._shortener.check(request)
        elif request.context is not None or request.protect:
            raise RequestError(
                "context and protect need an engine with a score method (windows are none)"
            )
        if request.stop_strings and (stepwise or self._detokenizer is None):
            raise RequestError("stop strings need an engine with a detokenizer, and no stepwise")
        if request.n > 1 and stepwise:
            raise RequestError("a stepwise request has one answer: fork it for more")
        first = self._queue(request, stepwise=stepwise)
        for i in range(1, request.n):
            sampling = dataclasses.replace(
                request.sampling, seed=(request.sampling.seed + i) % (1 << 32)
            )
            other = dataclasses.replace(request, sampling=sampling, n=1)
            sample = self._queue(other, fork_of=first)
            first.completion.samples.append(sample.completion)
        return first.completion

    def submit_or_refuse(self, request: Request) -> Completion:
        """Queues a request as `submit`; one that is refused has ended, with the error."""
        try:
            return self.submit(request)
        except RequestError as error:
            refused = Completion(
                self._next_id,
                len(request.prompt) if isinstance(request.prompt, tuple) else 0,
                finish_reason=FinishReason.ERROR,
                error=str(error),
            )
            self._next_id += 1
            return refused

    def fork(self, request_id: int, *, last_token: int) -> Completion:
        """Starts a further request that goes on from what a stepwise one has generated so far.

        The two share pages up to there, and from then on have nothing to do with each other.

        Args:
          request_id: of a stepwise request that waits after a token.
          last_token: in place of the token that was generated last.

        Raises:
          RequestError: no such request waits, or the token is not in the vocabulary.
        """
        origin = self._paused(request_id, last_token)
        tokens = array("i", origin.tokens)
        sequence = self._queue(origin.request, fork_of=origin, tokens=tokens, stepwise=True)
        sequence.completion.tokens = list(origin.completion.tokens)
        sequence.completion.logprobs = list(origin.completion.logprobs)
        self._go_on(sequence, last_token)
        return sequence.completion

    def resume(self, request_id: int, last_token: int) -> None:
        """Lets a stepwise request go on, with `last_token` for the one it generated last.

        Raises:
          RequestError: no such request waits, or the token is not in the vocabulary.
        """
        self._go_on(self._paused(request_id, last_token), last_token)

    def abort(self, request_id: int) -> None:
        """Ends a request in any state; one that has ended stays as it is.

        Its row is free at once, and what it computed stays cached.
        """
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.ABORT)

    def step(self) -> list[Delta]:
        """Runs one step.

        Returns:
          What it added, an entry a request that got a token or ended; empty when idle.
        """
        start = time.perf_counter()
        plan = self._scheduler.plan()
        if plan is None:
            return self._refuse_stuck()
        self.metrics.peak_kv_bytes = max(self.metrics.peak_kv_bytes, self.kv_bytes_held)
        if plan.copies:
            self._cache = self.steps.copy(self._cache, plan.copies, self.config.max_sequences)
        layout = self._layout(self.shapes.fit(plan))
        for sequence in plan.started:
            self._sampling.set(sequence.row, sequence.request.sampling)
            if not sequence.was_preempted:
                self.metrics.prompt_tokens += len(sequence.tokens)
                self.metrics.cached_tokens += sequence.num_found
        buffer = build_buffer(plan, layout, self._tables, self._sampling.controls)
        seen = self._sampling.seen(plan.seen, layout.shape.num_sequences)
        launched = time.perf_counter()
        result, self._cache = self.steps.run(self._cache, buffer, seen, layout)
        tokens = np.asarray(result.sampled.token).tolist()  # waits for the step
        done = time.perf_counter()
        deltas = self._book(plan, result, tokens)
        if self._shortener is not None:
            self._cache, stuck = self._shortener.shorten(self._cache, plan.sequences)
            for sequence in stuck:
                self._finish(sequence, FinishReason.ERROR)
                deltas.append(Delta(sequence.completion, (), ""))
        end = time.perf_counter()
        self.metrics.host_seconds += launched - start + end - done
        self._count(plan, end - start)
        return deltas

    def reset_cache(self) -> None:
        """Forgets all cached prefixes, as after a change of the model's weights.

        Raises:
          ValueError: a request is unfinished, or a prefix is pinned; nothing is changed.
        """
        if self.index is not None:
            self.index.reset()

    def stream(self, requests: Iterable[Request]) -> Iterator[Delta]:
        """Serves requests together, yielding what each step adds to them.

        A request that is refused yields one delta with finish reason `error`, and leaves the
        others alone; further answers (`Request.n`) come with their own completions. Several streams
        may run by turns on one engine: each yields its own requests alone. Leaving the iterator
        early aborts what is unfinished.
        """
        return self._streams.serve(self, requests, [])

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Serves requests together and returns their completions in order; see `stream`."""
        completions: list[Completion] = []
        for _ in self._streams.serve(self, requests, completions):
            pass
        return completions

    def _queue(
        self,
        request: Request,
        *,
        fork_of: Sequence | None = None,
        tokens: array | None = None,
        stepwise: bool = False,
    ) -> Sequence:
        """Makes a sequence of a checked request and queues it.

        Args:
          request: the request.
          fork_of: a sequence to share pages with.
          tokens: what the sequence begins with; None for the prompt.
          stepwise: see `submit`.
        """
        if tokens is None:
            tokens = array("i", pack(request.prompt))
        completion = Completion(self._next_id, len(request.prompt))
        if request.prompt_logprobs:
            completion.prompt_logprobs = np.full(len(request.prompt), np.nan, np.float32)
            completion.prompt_greedy = np.zeros(len(request.prompt), bool)
        sequence = Sequence(
            request=request,
            completion=completion,
            namespace=self.namespace(request.adapter, request.cache_salt),
            max_tokens=min(len(request.prompt) + request.max_new_tokens, self.max_length),
            tokens=tokens,
            text=None if stepwise else self._answer_text(request),
            seen=self._seen(request, tokens),
            submitted=time.perf_counter(),
            fork_of=None if request.prompt_logprobs else fork_of,
            fork_at=len(tokens) - 1,
            stepwise=stepwise,
        )
        if self._shortener is not None:
            self._shortener.prepare(sequence)
        self._sequences[completion.request_id] = sequence
        self._next_id += 1
        self._scheduler.add(sequence)
        return sequence

    def _paused(self, request_id: int, last_token: int) -> Sequence:
        """A stepwise request that waits after a token, for which `last_token` may stand."""
        sequence = self._sequences.get(request_id)
        if sequence is None or not sequence.paused:
            raise RequestError(f"request {request_id} does not wait after a token")
        if not 0 <= last_token < self._model.vocab_size:
            raise RequestError(f"token id {last_token} is outside the vocabulary")
        return sequence

    def _go_on(self, sequence: Sequence, last_token: int) -> None:
        sequence.tokens[-1] = sequence.completion.tokens[-1] = last_token
        sequence.seen = self._seen(sequence.request, sequence.tokens)
        sequence.paused = False

    def _answer_text(self, request: Request) -> AnswerText | None:
        if self._detokenizer is None:
            return None
        return AnswerText(self._detokenizer(), request.stop_strings)

    def _seen(self, request: Request, tokens: array) -> np.ndarray | None:
        if request.sampling.repetition_penalty == 1.0:
            return None
        seen = np.zeros(-(-self._model.vocab_size // 8), np.uint8)
        mark_seen(seen, tokens.tolist())
        return seen

    def _book(self, plan: StepPlan, result: StepResult, tokens: list[int]) -> list[Delta]:
        """Applies a step's result to its sequences."""
        book_prompt_logprobs(plan, result, self.steps)
        self._scheduler.advance(plan)
        sampled = result.sampled
        if plan.wants_logprobs:
            sampled = jax.device_get(sampled)
        now = time.perf_counter()
        deltas = []
        # Behind the sequences' tokens come those of padding.
        for row, (sequence, token) in enumerate(zip(plan.sequences, tokens, strict=False)):
            if sequence.num_uncomputed:
                continue
            completion = sequence.completion
            if not sequence.request.max_new_tokens:  # no answer was asked for
                self._finish(sequence, FinishReason.LENGTH)
                deltas.append(Delta(completion, (), ""))
                continue
            if sequence.is_reported:
                self._report(sequence, row, sampled, result.logits)
            if completion.first_token_seconds is None:
                completion.first_token_seconds = now - sequence.submitted
            text, reason = sequence.append(token)
            if reason is not None:
                self._finish(sequence, reason)
            deltas.append(Delta(completion, (token,), text))
        self.metrics.generated_tokens += sum([len(delta.tokens) for delta in deltas])
        return deltas

    def _report(self, sequence: Sequence, row: int, sampled: Sampled, logits: jax.Array) -> None:
        """Adds what a request wants to know of a token, besides the token."""
        n, completion = sequence.request.logprobs, sequence.completion
        if n is not None:
            top_tokens, top_logprobs = sampled.top_tokens[row, :n], sampled.top_logprobs[row, :n]
            top = tuple(zip(top_tokens.tolist(), top_logprobs.tolist(), strict=True))
            logprob = TokenLogprob(int(sampled.token[row]), float(sampled.logprob[row]), top)
            completion.logprobs.append(logprob)
        if sequence.request.keep_logits:
            completion.logits.append(np.array(logits[row]))

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """The one place where a request ends."""
        sequence.completion.finish_reason = reason
        sequence.completion.seconds = time.perf_counter() - sequence.submitted
        self._scheduler.remove(sequence)
        del self._sequences[sequence.completion.request_id]

    def _refuse_stuck(self) -> list[Delta]:
        """Ends the first waiting request where not even it alone finds pages: others than
        sequences hold too many."""
        for sequence in self._scheduler.waiting.in_order():
            if not sequence.paused:
                held = [  # many groups say the same
                    f"of {pool.capacity} pages {pool.num_held} are held, "
                    f"{self.pins.num_pinned(g) if self.pins else 0} of them by pins"
                    for g, pool in enumerate(self.pools)
                ]
                sequence.completion.error = (
                    f"{len(sequence.tokens)} tokens need more pages than are left: "
                    + "; ".join(dict.fromkeys(held))
                )
                self._finish(sequence, FinishReason.ERROR)
                return [Delta(sequence.completion, (), "")]
        return []

    def _layout(self, shape: StepShape) -> StepLayout:
        if shape not in self._layouts:
            self._layouts[shape] = StepLayout(
                shape=shape,
                num_groups=len(self.pools),
                max_pages=self._tables.pages[0].shape[1],
            )
        return self._layouts[shape]

    def _count(self, plan: StepPlan, seconds: float) -> None:
        metrics = self.metrics
        metrics.add_step(plan.total_tokens, seconds, is_prefill=not plan.is_decode)
        metrics.copied_pages += len(plan.copies)
        metrics.num_preemptions = self._scheduler.num_preemptions
        metrics.step_shapes = len(self._layouts)
        if self.index is not None:
            metrics.evicted_pages = self.index.counters.evicted_pages
