"""The engine: turns requests into steps and steps into tokens.

submit   checks a request (`admission`) and queues a sequence
step     plans (`scheduler`), copies shared pages, runs the jitted step (`step`) with the cache
         donated, and books the result: tokens are appended, text is settled, computed pages
         enter the prefix index, and finished sequences give their pages back
abort    ends a request in any state
"""

import dataclasses
import time
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable

import jax
import numpy as np

from jaxkv.cache import format_id
from jaxkv.engine.admission import Admission
from jaxkv.engine.completion import Completion, Delta, FinishReason
from jaxkv.engine.config import EngineConfig
from jaxkv.engine.dropping import DropStage
from jaxkv.engine.host import HostSide
from jaxkv.engine.logprobs import book_logprobs, book_prompt_logprobs
from jaxkv.engine.metrics import EngineMetrics, PoolState
from jaxkv.engine.request import Request, RequestError
from jaxkv.engine.runner import StepRunner
from jaxkv.engine.sampling import SeenTokens
from jaxkv.engine.scheduler import Scheduler
from jaxkv.engine.sequence import Fork, Sequence
from jaxkv.engine.sizing import cache_capacity, longest_sequence, plan_cache
from jaxkv.engine.step import StepFunctions, StepResult
from jaxkv.engine.step_plan import StepPlan
from jaxkv.engine.stopping import AnswerText, DetokenizerFactory
from jaxkv.model import DecodeModel
from jaxkv.prefix import Event, Namespace


class Engine:
    """Continuous batching of one model over a paged KV cache.

    Example:
      >>> engine = Engine(load_model("smollm2-135m").model, EngineConfig(max_sequences=2))
      >>> engine.warm_up()
      >>> requests = [Request(prompt=[1, 2, 3], max_new_tokens=8), Request(prompt=[4, 5])]
      >>> for completion in engine.generate(requests):
      ...     print(completion.tokens)

    Attributes:
      config: its sizes and choices.
      spec: the shapes and formats of its cache.
      max_length: longest sequence that it takes, prompt and answer.
      pools: the page pool of each layer group.
      index: the index of cached prefixes; None if the config switches it off.
      pins: prefixes that stay in the index; None without an index.
      shapes: the shapes that a step may have. Each is compiled when it is first needed.
      steps: the compiled functions.
      metrics: counters of what it has done.
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
        """Allocates the cache. Nothing is compiled yet.

        Args:
          model: the decoder.
          config: sizes and choices; None takes the defaults.
          detokenizer: makes a detokenizer for each request. Without it answers have no text, and
            requests with stop strings are refused.
          page_events: called with an event for each page that the prefix index stores, changes
            or evicts.
          steps: the compiled functions of another engine with the same model, backend, determinism
            and sampler, so that each step is compiled once for both.

        Raises:
          ValueError: `config` does not fit the model, or `steps` do not fit both.
        """
        self.config = config or EngineConfig()
        self._model = model
        self._detokenizer = detokenizer
        self.spec = plan_cache(model, self.config)
        self.max_length = longest_sequence(model, self.config, self.spec)
        host = HostSide.build(self.spec, self.config, self.max_length, page_events)
        self.pools, self.index, self.pins = host.pools, host.index, host.pins
        self._tables, self._dropper = host.tables, host.dropper
        self._bytes_per_page = [self.spec.bytes_per_page(g) for g in range(len(self.pools))]
        self._runner = StepRunner(model, self.config, self.spec, self._tables, steps)
        self.shapes, self.steps = self._runner.shapes, self._runner.steps
        self._scheduler = Scheduler(
            self._tables,
            self.index,
            max_sequences=self.config.max_sequences,
            token_budget=min(self.config.token_budget, self.shapes.most_tokens),
            scheduling=self.config.scheduling,
        )
        self._dropping = self._make_dropping()
        self._admission = Admission(
            vocab_size=model.vocab_size,
            max_positions=model.max_positions,
            capacity=cache_capacity(self.spec, self.config),
            max_length=self.max_length,
            has_text=detokenizer is not None,
            budget=None if self._dropping is None else self._dropping.budget,
        )
        self._sequences: dict[int, Sequence] = {}
        self._followed: dict[int, deque[Delta]] = {}  # by request, the deltas to yield
        self._next_id = 0
        self.metrics = EngineMetrics()

    def _make_dropping(self) -> DropStage | None:
        compression = self.config.compression
        if compression is None or compression.is_window:
            return None
        return DropStage(compression, self._runner, self._scheduler, self._tables, self._dropper)

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
        """Free, cached and held pages of each layer group."""
        return [PoolState(pool.num_free, pool.num_cached, pool.num_held) for pool in self.pools]

    def namespace(self, cache_salt: str | None = None) -> Namespace:
        """Where the index keeps the prefixes of requests with this salt."""
        compression = self.config.compression
        window = compression if compression is not None and compression.is_window else None
        return Namespace(kv_format=format_id(self.spec.formats), window=window, salt=cache_salt)

    def warm_up(self) -> None:
        """Compiles every shape of step and the page copy, so that no request waits for a compiler.

        Each is run once on the null page. Cached prefixes, running requests and metrics stay as
        they are. What only some requests need is still compiled when it is first used: the
        log-probabilities of prompts, and dropping tokens.
        """
        self._runner.warm_up()
        self.metrics.step_shapes = self._runner.num_shapes

    def submit(self, request: Request, *, stepwise: bool = False) -> Completion:
        """Queues a request.

        Args:
          request: the request.
          stepwise: pause after each token until `resume` says with which token to go on. Such a
            request has no text.

        Returns:
          Its completion, which later steps fill. The completions of further answers (`Request.n`)
          are its `samples`.

        Raises:
          RequestError: the request can never be served; nothing is queued.
        """
        self._admission.check(request, stepwise=stepwise)
        first = self._queue(request, stepwise=stepwise)
        for i in range(1, request.n):
            seed = (request.sampling.seed + i) % (1 << 32)
            sampling = dataclasses.replace(request.sampling, seed=seed)
            sample = dataclasses.replace(request, sampling=sampling, n=1)
            first.completion.samples.append(self._queue(sample, parent=first).completion)
        return first.completion

    def step(self) -> list[Delta]:
        """Runs one step.

        Returns:
          An entry for each request that got a token or ended; empty if no request is unfinished.
        """
        start = time.perf_counter()
        plan = self._scheduler.plan()
        if plan is None:
            return self._refuse_stuck()
        self.metrics.peak_kv_bytes = max(self.metrics.peak_kv_bytes, self.kv_bytes_held)
        for sequence in plan.started:
            if not sequence.was_preempted:
                self.metrics.add_start(len(sequence.tokens), sequence.num_found)
        call = self._runner.prepare(plan)
        launched = time.perf_counter()
        result = self._runner.run(call)
        tokens = np.asarray(result.sampled.token).tolist()  # waits for the step
        done = time.perf_counter()
        deltas = self._book(plan, result, tokens)
        if self._dropping is not None:
            failed = self._dropping.after_step(plan.sequences)
            deltas += [self._finish(sequence, FinishReason.ERROR) for sequence in failed]
        end = time.perf_counter()
        self.metrics.host_seconds += launched - start + end - done
        self._count(plan, end - start)
        return deltas

    def stream(self, requests: Iterable[Request]) -> Generator[Delta, None, None]:
        """Serves requests together and yields what each step adds to them.

        A request that is refused yields one delta with finish reason `error`; the others are
        served. Further answers (`Request.n`) have completions of their own. Several streams may
        take turns on one engine: each yields only its own requests. If the iterator is closed
        early, its unfinished requests are aborted.
        """
        yield from self.follow(self.submit_all(requests))

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Serves requests together and returns their completions in order; see `stream`."""
        completions = self.submit_all(requests)
        for _ in self.follow(completions):
            pass
        return completions

    def submit_all(self, requests: Iterable[Request]) -> list[Completion]:
        """Queues requests; one that is refused has ended, with the reason as its `error`."""
        completions: list[Completion] = []
        try:
            for request in requests:
                try:
                    completions.append(self.submit(request))
                except RequestError as error:
                    refused = Completion(self._next_id, len(request.prompt), error=str(error))
                    refused.finish_reason = FinishReason.ERROR
                    completions.append(refused)
                    self._next_id += 1
        except BaseException:  # of the iterable
            self._abort_all(completions)
            raise
        return completions

    def follow(self, completions: Iterable[Completion]) -> Generator[Delta, None, None]:
        """Runs steps until submitted requests have ended, and yields what is new of them.

        The rules of `stream` hold.
        """
        served = [one for completion in completions for one in (completion, *completion.samples)]
        deltas = deque(Delta(one, (), "") for one in served if one.error is not None)
        self._followed |= {one.request_id: deltas for one in served}
        try:
            while True:
                while deltas:
                    yield deltas.popleft()
                if all(one.finish_reason is not None for one in served):
                    return
                for delta in self.step():
                    if delta.completion.request_id in self._followed:
                        self._followed[delta.completion.request_id].append(delta)
        finally:
            self._abort_all(served)
            for one in served:
                self._followed.pop(one.request_id)

    def abort(self, request_id: int) -> None:
        """Ends a request in any state; one that has ended stays as it is.

        Its row is free at once. What it computed stays cached.
        """
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.ABORT)

    def fork(self, request_id: int, *, last_token: int) -> Completion:
        """Starts a further request that goes on from what a stepwise one has generated so far.

        The two share pages up to there and are independent from then on.

        Args:
          request_id: id of a stepwise request that is paused after a token.
          last_token: replaces the token that was generated last.

        Raises:
          RequestError: no such request is paused, or the token is not in the vocabulary.
        """
        parent = self._paused(request_id, last_token)
        fork = self._queue(parent.request, parent=parent, stepwise=True)
        fork.completion.tokens = list(parent.completion.tokens)
        fork.completion.logprobs = list(parent.completion.logprobs)
        fork.resume(last_token)
        return fork.completion

    def resume(self, request_id: int, last_token: int) -> None:
        """Ends the pause of a stepwise request; `last_token` replaces the one it generated last.

        Raises:
          RequestError: no such request is paused, or the token is not in the vocabulary.
        """
        self._paused(request_id, last_token).resume(last_token)

    def reset_cache(self) -> None:
        """Forgets all cached prefixes, as after a change of the model's weights.

        Raises:
          ValueError: a request is unfinished, or a prefix is pinned; nothing is changed.
        """
        if self.index is not None:
            self.index.reset()

    def _queue(
        self, request: Request, *, parent: Sequence | None = None, stepwise: bool = False
    ) -> Sequence:
        """Queues a sequence for a checked request; it begins with the tokens of `parent`."""
        tokens = array("i", request.prompt if parent is None else parent.tokens)
        completion = Completion(self._next_id, len(request.prompt))
        self._next_id += 1
        fork = None
        if request.prompt_logprobs:
            completion.prompt_logprobs = np.full(len(request.prompt), np.nan, np.float32)
            completion.prompt_greedy = np.zeros(len(request.prompt), bool)
        elif parent is not None:
            fork = Fork(parent, len(tokens) - 1)
        text = seen = None
        if self._detokenizer is not None and not stepwise:
            text = AnswerText(self._detokenizer(), request.stop_strings)
        if request.sampling.repetition_penalty != 1.0:
            seen = SeenTokens(self._model.vocab_size, tokens)
        sequence = Sequence(
            request=request,
            completion=completion,
            namespace=self.namespace(request.cache_salt),
            max_tokens=min(len(request.prompt) + request.max_new_tokens, self.max_length),
            tokens=tokens,
            text=text,
            seen=seen,
            submitted=time.perf_counter(),
            fork=fork,
            stepwise=stepwise,
        )
        if self._dropping is not None:
            self._dropping.prepare(sequence)
        self._sequences[completion.request_id] = sequence
        self._scheduler.add(sequence)
        return sequence

    def _paused(self, request_id: int, last_token: int) -> Sequence:
        """A stepwise request that is paused after a token, which `last_token` may replace."""
        sequence = self._sequences.get(request_id)
        if sequence is None or not sequence.paused:
            raise RequestError(f"request {request_id} does not wait after a token")
        self._admission.check_token(last_token)
        return sequence

    def _abort_all(self, completions: list[Completion]) -> None:
        for completion in completions:
            for one in (completion, *completion.samples):
                self.abort(one.request_id)

    def _book(self, plan: StepPlan, result: StepResult, tokens: list[int]) -> list[Delta]:
        """Applies a step's result to its sequences."""
        book_prompt_logprobs(plan, result, self.steps)
        self._scheduler.advance(plan)
        sampled = jax.device_get(result.sampled) if plan.wants_logprobs else result.sampled
        now = time.perf_counter()
        deltas = []
        # `tokens` has an entry for padding after those of the sequences.
        for row, (sequence, token) in enumerate(zip(plan.sequences, tokens, strict=False)):
            if sequence.num_uncomputed:
                continue
            completion = sequence.completion
            if not sequence.request.max_new_tokens:  # no answer was asked for
                deltas.append(self._finish(sequence, FinishReason.LENGTH))
                continue
            if sequence.is_reported:
                book_logprobs(sequence, row, sampled, result.logits)
            if completion.first_token_seconds is None:
                completion.first_token_seconds = now - sequence.submitted
            text, reason = sequence.append(token)
            if reason is not None:
                self._finish(sequence, reason)
            deltas.append(Delta(completion, (token,), text))
        self.metrics.generated_tokens += sum([len(delta.tokens) for delta in deltas])
        return deltas

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Delta:
        """Ends a request: the only place that does. Returns a delta that says so."""
        sequence.completion.finish_reason = reason
        sequence.completion.seconds = time.perf_counter() - sequence.submitted
        self._scheduler.remove(sequence)
        del self._sequences[sequence.completion.request_id]
        return Delta(sequence.completion, (), "")

    def _refuse_stuck(self) -> list[Delta]:
        """Ends the first waiting request if it finds no pages although nothing else runs: pins
        or callers hold too many."""
        for sequence in self._scheduler.waiting_in_order():
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
                return [self._finish(sequence, FinishReason.ERROR)]
        return []

    def _count(self, plan: StepPlan, seconds: float) -> None:
        metrics = self.metrics
        metrics.add_step(plan.total_tokens, seconds, is_prefill=not plan.is_decode)
        metrics.copied_pages += len(plan.copies)
        metrics.num_preemptions = self._scheduler.num_preemptions
        metrics.step_shapes = self._runner.num_shapes
        if self.index is not None:
            metrics.evicted_pages = self.index.counters.evicted_pages
