"""The engine: turns requests into steps and steps into tokens.

Life of a request: `submit` checks it and queues a sequence; `step` asks the scheduler for a plan,
builds its arrays, runs the jitted step with the cache donated, and books the result: tokens are
appended, text is settled, finished sequences give their pages back. `abort` ends one in any state.
Not here: which sequence goes first (`scheduler`), what a step computes (`step`, `sampling`).
"""

import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

import numpy as np

from jaxkv.attention import preferred_layout
from jaxkv.cache import CacheSpec, get_format, group_layers, init_cache
from jaxkv.engine.config import EngineConfig
from jaxkv.engine.metrics import EngineMetrics
from jaxkv.engine.model import DecodeModel
from jaxkv.engine.request import (
    Completion,
    Delta,
    DetokenizerFactory,
    FinishReason,
    Request,
    RequestError,
    TokenLogprob,
)
from jaxkv.engine.sampling import SamplingInputs
from jaxkv.engine.scheduler import Scheduler, StepPlan
from jaxkv.engine.sequence import Sequence, mark_seen
from jaxkv.engine.step import ShapeTable, StepFunctions, StepResult, build_inputs
from jaxkv.engine.stopping import AnswerText
from jaxkv.prefix import PagePool, SequencePages


class Engine:
    """Continuous batching of one model over a paged KV cache.

    Attributes:
      config: sizes and choices.
      spec: of the cache.
      pools: page pool of each layer group.
      metrics: what was done so far.
    """

    def __init__(
        self,
        model: DecodeModel,
        config: EngineConfig | None = None,
        *,
        detokenizer: DetokenizerFactory | None = None,
    ):
        """Allocates the cache; nothing is compiled yet.

        Args:
          model: the decoder.
          config: sizes and choices; None takes the defaults.
          detokenizer: makes a detokenizer a request; None leaves answers without text, and
            refuses stop strings.

        Raises:
          ValueError: a value of `config` that cannot be used.
        """
        self.config = config or EngineConfig()
        self.config.check()
        self._model = model
        self._detokenizer = detokenizer
        self.spec = _cache_spec(model, self.config)
        self._cache = init_cache(self.spec)
        self.pools = [PagePool(n) for n in self.spec.num_pages]
        capacity = min(pool.capacity for pool in self.pools) * self.spec.page_size
        longest = min(self.config.max_length or model.max_positions, model.max_positions)
        self.max_length = min(longest, capacity)
        self._shapes = ShapeTable.plan(
            self.config.max_sequences,
            self.config.token_budget,
            deterministic=self.config.deterministic,
        )
        budget = min(self.config.token_budget, self._shapes.most_tokens)
        self._scheduler = Scheduler(self.config.max_sequences, budget)
        self._functions = StepFunctions(
            model, backend=self.config.backend, deterministic=self.config.deterministic
        )
        self._sequences: dict[int, Sequence] = {}
        self._parked: dict[int, list[Delta]] = {}  # of the requests of open streams
        self._next_id = 0
        self.metrics = EngineMetrics()

    @property
    def has_work(self) -> bool:
        """Some request is unfinished."""
        return bool(self._sequences)

    @property
    def kv_bytes_held(self) -> int:
        """Bytes of the pages that sequences hold now."""
        return sum(
            pool.num_held * self.spec.bytes_per_page(group) for group, pool in enumerate(self.pools)
        )

    def submit(self, request: Request) -> Completion:
        """Queues a request.

        Returns:
          Its completion, which later steps fill.

        Raises:
          RequestError: the request can never be served; nothing is queued.
        """
        request.check(self._model.vocab_size)
        if len(request.prompt) > self.max_length:
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens; the longest that fits is "
                f"{self.max_length} (the model takes {self._model.max_positions}, the cache "
                f"{min(p.capacity for p in self.pools) * self.spec.page_size})"
            )
        if request.stop_strings and self._detokenizer is None:
            raise RequestError("stop strings need an engine with a detokenizer")
        completion = Completion(self._next_id, len(request.prompt))
        if request.prompt_logprobs:
            completion.prompt_logprobs = np.full(len(request.prompt), np.nan, np.float32)
        sequence = Sequence(
            request=request,
            completion=completion,
            pages=SequencePages(self.pools, self.spec.page_size, self._max_pages),
            max_tokens=min(len(request.prompt) + request.max_new_tokens, self.max_length),
            tokens=list(request.prompt),
            text=self._answer_text(request),
            seen=self._seen(request),
            submitted=time.perf_counter(),
        )
        self._sequences[completion.request_id] = sequence
        self._next_id += 1
        self._scheduler.add(sequence)
        return completion

    def abort(self, request_id: int) -> None:
        """Ends a request in any state and frees its pages; one that has ended stays as it is."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.ABORT)

    def step(self) -> list[Delta]:
        """Runs one step.

        Returns:
          What it added, an entry a request that got a token or ended; empty when idle.
        """
        plan = self._scheduler.plan()
        if plan is None:
            return []
        start = time.perf_counter()
        self.metrics.peak_kv_bytes = max(self.metrics.peak_kv_bytes, self.kv_bytes_held)
        shape = self._shapes.fit(plan)
        inputs = build_inputs(plan, shape)
        sampling = self._sampling_inputs(plan, shape.num_sequences)
        result, self._cache = self._functions.run(self._cache, inputs, sampling, shape)
        deltas = self._book(plan, result)
        self._count(plan, time.perf_counter() - start)
        return deltas

    def stream(self, requests: Iterable[Request]) -> Iterator[Delta]:
        """Serves requests together, yielding what each step adds to them.

        A request that is refused yields one delta with finish reason `error`, and leaves the
        others alone. Several streams may run by turns on one engine: each yields its own requests
        alone. Leaving the iterator early aborts what is unfinished.
        """
        submitted: list[Completion] = []
        try:
            for request in requests:
                completion = self._submit_or_refuse(request)
                submitted.append(completion)
                self._parked[completion.request_id] = []
                if completion.error is not None:
                    yield Delta(completion, (), "")
            while True:
                for completion in submitted:
                    parked = self._parked[completion.request_id]
                    while parked:
                        yield parked.pop(0)
                if all(completion.finish_reason is not None for completion in submitted):
                    return
                self._step_and_park()
        finally:
            for completion in submitted:
                self.abort(completion.request_id)
                self._parked.pop(completion.request_id, None)

    def generate(self, requests: Seq[Request]) -> list[Completion]:
        """Serves requests together and returns their completions in order; see `stream`."""
        completions = [self._submit_or_refuse(request) for request in requests]
        try:
            while any(completion.finish_reason is None for completion in completions):
                self._step_and_park()
        finally:
            for completion in completions:
                self.abort(completion.request_id)
        return completions

    def _step_and_park(self) -> None:
        """Runs a step, keeping for each open stream what belongs to it."""
        for delta in self.step():
            parked = self._parked.get(delta.completion.request_id)
            if parked is not None:
                parked.append(delta)

    @property
    def _max_pages(self) -> int:
        return -(-self.max_length // self.spec.page_size)

    def _submit_or_refuse(self, request: Request) -> Completion:
        try:
            return self.submit(request)
        except RequestError as error:
            refused = Completion(
                self._next_id,
                len(request.prompt),
                finish_reason=FinishReason.ERROR,
                error=str(error),
            )
            self._next_id += 1
            return refused

    def _answer_text(self, request: Request) -> AnswerText | None:
        if self._detokenizer is None:
            return None
        return AnswerText(self._detokenizer(), request.stop_strings)

    def _seen(self, request: Request) -> np.ndarray | None:
        if request.sampling.repetition_penalty == 1.0:
            return None
        seen = np.zeros(-(-self._model.vocab_size // 8), np.uint8)
        mark_seen(seen, list(request.prompt))
        return seen

    def _sampling_inputs(self, plan: StepPlan, num_rows: int) -> SamplingInputs:
        sequences = [entry.sequence for entry in plan.entries]
        return SamplingInputs.build(
            [sequence.request.sampling for sequence in sequences],
            positions=[len(sequence.tokens) for sequence in sequences],
            seen=[sequence.seen for sequence in sequences],
            want_top=any(sequence.request.logprobs for sequence in sequences),
            num_rows=num_rows,
            vocab_size=self._model.vocab_size,
        )

    def _book(self, plan: StepPlan, result: StepResult) -> list[Delta]:
        """Applies a step's result to its sequences."""
        self._book_prompt_logprobs(plan, result)
        tokens = np.asarray(result.sampled.token)  # waits for the step
        deltas = []
        for row, entry in enumerate(plan.entries):
            sequence = entry.sequence
            completes = entry.completes
            sequence.num_computed += entry.num_tokens
            if not completes:
                continue
            if len(sequence.tokens) >= sequence.max_tokens:  # nothing was asked for, or fits
                self._finish(sequence, FinishReason.LENGTH)
                deltas.append(Delta(sequence.completion, (), ""))
                continue
            self._book_token(sequence, row, int(tokens[row]), result)
            deltas.append(self._settle(sequence, int(tokens[row])))
        return deltas

    def _book_token(self, sequence: Sequence, row: int, token: int, result: StepResult) -> None:
        completion, request = sequence.completion, sequence.request
        if completion.first_token_seconds is None:
            completion.first_token_seconds = time.perf_counter() - sequence.submitted
        sequence.append(token)
        self.metrics.generated_tokens += 1
        if request.logprobs is not None:
            sampled, n = result.sampled, request.logprobs
            top_tokens = np.asarray(sampled.top_tokens[row, :n]).tolist()
            top_logprobs = np.asarray(sampled.top_logprobs[row, :n]).tolist()
            top = tuple(zip(top_tokens, top_logprobs, strict=True))
            completion.logprobs.append(TokenLogprob(token, float(sampled.logprob[row]), top))
        if request.keep_logits:
            completion.logits.append(np.array(result.logits[row]))

    def _settle(self, sequence: Sequence, token: int) -> Delta:
        """Adds a token's text, and ends the sequence where it must."""
        is_stop = token in sequence.request.stop_ids
        text = ""
        if sequence.text is not None and not is_stop:
            text = sequence.text.push(token)
        reason = sequence.stop_reason()
        if reason is not None:
            if sequence.text is not None:
                text += sequence.text.finish()
                if sequence.text.stopped:
                    reason = FinishReason.STOP
            self._finish(sequence, reason)
        sequence.completion.text += text
        return Delta(sequence.completion, (token,), text)

    def _book_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        """Fills in the log-probabilities of the prompt tokens that follow computed ones."""
        targets = np.zeros(result.hidden.shape[0], np.int32)
        spans = []
        row = 0
        for entry in plan.entries:
            first = entry.sequence.num_computed + 1  # position of the first target
            labels = entry.sequence.request.prompt[first : first + entry.num_tokens]
            stored = entry.sequence.completion.prompt_logprobs
            if stored is not None and labels:
                targets[row : row + len(labels)] = labels
                spans.append((stored[first : first + len(labels)], row))
            row += entry.num_tokens
        if not spans:
            return
        logprobs = self._functions.prompt_logprobs(result.hidden, targets)
        for span, row in spans:
            span[:] = logprobs[row : row + len(span)]

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """The one place where a request ends and its pages go back."""
        sequence.completion.finish_reason = reason
        self._scheduler.remove(sequence)
        del self._sequences[sequence.completion.request_id]

    def _count(self, plan: StepPlan, seconds: float) -> None:
        metrics = self.metrics
        is_prefill = any(entry.num_tokens > 1 for entry in plan.entries)
        metrics.add_step(plan.num_tokens, seconds, is_prefill=is_prefill)
        metrics.num_preemptions = self._scheduler.num_preemptions
        metrics.step_shapes = len(self._functions.shapes)


def _cache_spec(model: DecodeModel, config: EngineConfig) -> CacheSpec:
    """Sizes the cache: see `EngineConfig.pool_tokens`."""
    kv_format = get_format(config.kv_format)
    bytes_per_token = sum(
        kv_format.bytes_per_token(layer.kv_heads, layer.head_dim) for layer in model.layers
    )
    tokens = config.pool_tokens
    if tokens is None:
        longest = min(config.max_length or model.max_positions, model.max_positions)
        whole_pages = -(-longest // config.page_size) * config.page_size
        tokens = min(config.max_sequences * whole_pages, config.pool_bytes // bytes_per_token)
    num_pages = max(1, -(-tokens // config.page_size)) + 1  # and the null page
    return CacheSpec(
        layers=model.layers,
        page_size=config.page_size,
        num_pages=(num_pages,) * len(group_layers(model.layers)),
        format=kv_format,
        layout=preferred_layout(),
    )
