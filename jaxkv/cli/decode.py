"""Decode prompts with a model through the paged cache.

Prompts are arguments, or lines of a file, or lines of standard input. All are decoded together. An
instruct model answers them in its chat template; with `--raw` it continues the text as it is.

  jaxkv decode "What is a KV cache?"
  jaxkv decode --prompts questions.txt --max-new-tokens 64 --temperature 0.7 --seed 3
  echo "Once upon a time" | jaxkv decode --raw --json
  jaxkv decode --method snapkv --budget 50% --prompts long.txt

With `--json`, standard output has one JSON object per line: one for each prompt, in order, and then
one with the totals.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxkv.arith import ceil_div
from jaxkv.cli import console
from jaxkv.cli.arguments.serving import (
    CompressionOptions,
    FormatOptions,
    SamplingOptions,
    add_backend_argument,
    add_compression_arguments,
    add_format_arguments,
    add_sampling_arguments,
    prompt_lines,
)
from jaxkv.conversation import Conversation
from jaxkv.engine import Completion, Engine, EngineConfig, Request, RequestError, footprint
from jaxkv.errors import UsageError
from jaxkv.llm import LLM
from jaxkv.models.errors import ModelError
from jaxkv.models.loading import LoadedModel
from jaxkv.models.tokenizer import Tokenizer

MIN_POOL_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """The command line."""

    prompts: list[str]
    file: Path | None
    model: console.ModelOptions
    raw: bool
    system: str | None
    max_new_tokens: int
    stop: list[str]
    ignore_eos: bool
    logprobs: int | None
    sampling: SamplingOptions
    batch: int
    chunk: int
    pool_tokens: int | None
    formats: FormatOptions
    dropping: CompressionOptions
    backend: str | None
    deterministic: bool
    json: bool

    def request(self, ids: Sequence[int], stop_ids: frozenset[int], index: int) -> Request:
        """The request for the tokens of prompt number `index`."""
        return Request(
            prompt=ids,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling.params(index),
            stop_ids=frozenset() if self.ignore_eos else stop_ids,
            stop_strings=self.stop,
            logprobs=self.logprobs,
        )

    def config(self, pool_tokens: int) -> dict[str, Any]:
        """Fields of EngineConfig; the pool has `pool_tokens` unless its size was given."""
        return dict(
            max_sequences=self.batch,
            token_budget=self.chunk,
            page_size=self.formats.tokens_per_page(),
            pool_tokens=pool_tokens if self.pool_tokens is None else self.pool_tokens,
            kv_format=self.formats.kv_format,
            kv_ranges=self.formats.ranges(),
            compression=self.dropping.compression(),
            deterministic=self.deterministic,
            backend=self.backend,
        )

    def check(self) -> None:
        """Raises JaxkvError for an option that no prompt could be served with."""
        self.request([0], frozenset(), 0)
        EngineConfig(**self.config(MIN_POOL_TOKENS))


@dataclass
class Job:
    """A prompt with its request, then its completion; or the reason why it has none."""

    prompt: str
    request: Request | None = None
    completion: Completion | None = None
    error: str | None = None


def parse(argv: list[str]) -> DecodeOptions:
    """Reads the command line."""
    parser = console.Parser("jaxkv decode", __doc__)
    add = parser.add_argument
    add("prompts", nargs="*", help="prompts; without any, --prompts or standard input is read")
    add("--prompts", dest="file", metavar="FILE", type=Path, help="a UTF-8 file, one prompt a line")
    console.add_model_arguments(parser)
    add("--raw", action="store_true", help="continue the text as it is, without a chat template")
    add("--system", metavar="TEXT", help="system message for the chat template")
    add(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="N",
        help="most tokens of an answer (default: %(default)s)",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end an answer before this text; may be repeated",
    )
    add("--ignore-eos", action="store_true", help="do not stop at the model's own end tokens")
    add_sampling_arguments(parser, "prompt")
    add(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: the log-probability of each token, and the N most likely tokens",
    )
    cache = parser.add_argument_group("cache and batch")
    add = cache.add_argument
    add("--batch", type=int, default=8, metavar="B", help="most sequences per step (default: 8)")
    add("--chunk", type=int, default=512, metavar="T", help="most tokens per step (default: 512)")
    add(
        "--pool-tokens",
        type=int,
        metavar="N",
        help="tokens that the cache holds (default: what the prompts need)",
    )
    add_format_arguments(cache)
    add_compression_arguments(cache)
    add_backend_argument(cache)
    add(
        "--deterministic",
        action="store_true",
        help="logits have the same bits however the batch is composed; slower",
    )
    parser.add_argument("--json", action="store_true", help="JSON lines on standard output")
    return parser.read(DecodeOptions, argv)


def read_prompts(options: DecodeOptions) -> list[str]:
    """Returns the prompts of arguments, file or standard input; blank lines are left out."""
    if options.prompts and options.file:
        raise UsageError("give prompts as arguments or with --prompts, not both")
    if options.prompts:
        return options.prompts
    if options.file is not None:
        return prompt_lines(options.file.read_bytes(), str(options.file))
    if sys.stdin is None:
        raise UsageError("there is no prompt: standard input is closed")
    if sys.stdin.isatty():
        print("type prompts, one per line; end with Ctrl-D", file=sys.stderr)
    return prompt_lines(sys.stdin.buffer.read(), "standard input")


def make_jobs(prompts: Sequence[str], tokenizer: Tokenizer, options: DecodeOptions) -> list[Job]:
    """A job for each prompt; one that cannot be encoded has an error and does not stop the others.

    Raises:
      UsageError: a system message was given, and there is no chat template.
    """
    raw = options.raw or tokenizer.chat_template is None
    if options.system and raw:
        raise UsageError("--system needs a chat template, which --raw or this model does not have")
    talk = Conversation(tokenizer).with_system(options.system)
    jobs = []
    for index, prompt in enumerate(prompts):
        try:
            ids = tokenizer.encode(prompt) if raw else talk.prompt(prompt)
            jobs.append(Job(prompt, options.request(ids, tokenizer.stop_ids, index)))
        except (ModelError, RequestError) as error:
            jobs.append(Job(prompt, error=str(error)))
    return jobs


def open_llm(loaded: LoadedModel, jobs: Sequence[Job], options: DecodeOptions) -> LLM:
    """The model with a cache that holds the longest requests that may run at once."""
    longest, P = loaded.model.max_positions, options.formats.tokens_per_page()
    requests = [job.request for job in jobs if job.request is not None]
    lengths = [len(request.prompt) + request.max_new_tokens for request in requests]
    pages = sorted((ceil_div(min(length, longest), P) for length in lengths), reverse=True)
    # Rounded up to a power of two, so that runs of similar size share their compiled steps.
    tokens = sum(pages[: options.batch]) * P
    pool_tokens = max(MIN_POOL_TOKENS, 1 << (tokens - 1).bit_length())
    return LLM(loaded, **options.config(pool_tokens))


def serve(llm: LLM, jobs: Sequence[Job], *, echo: bool) -> None:
    """Decodes all jobs; with `echo`, text appears on standard output as it is generated."""
    served = [job for job in jobs if job.request is not None]
    requests = [job.request for job in served if job.request is not None]
    for number, delta in llm.serve(requests, progress=False if echo else None):
        job = served[number]
        job.completion, job.error = delta.completion, delta.completion.error
        if echo:
            print(delta.text, end="", flush=True)


def as_json(job: Job) -> str:
    """One line for a job."""
    record: dict[str, Any] = {"prompt": job.prompt}
    completion = job.completion
    if completion is None or job.error is not None:
        return json.dumps(record | {"error": job.error})
    record |= {
        "text": completion.text,
        "tokens": completion.tokens,
        "prompt_tokens": completion.prompt_tokens,
        "finish_reason": completion.finish_reason,
        "first_token_seconds": completion.first_token_seconds,
    }
    if completion.dropped_tokens:
        record["dropped_tokens"] = completion.dropped_tokens
    if completion.logprobs:
        record["logprobs"] = [asdict(entry) for entry in completion.logprobs]
    return json.dumps(record)


def totals(engine: Engine) -> dict[str, float | str]:
    """Figures of a run: tokens, tokens per second, and bytes of K and V."""
    metrics, kept = engine.metrics, footprint(engine.spec)

    def rate(tokens: int, seconds: float) -> float:
        return round(tokens / seconds, 1) if seconds > 0 else 0.0

    return {
        "prefill_tokens": metrics.prefill_tokens,
        "prefill_tokens_per_second": rate(metrics.prefill_tokens, metrics.prefill_seconds),
        "decode_tokens": metrics.decode_tokens,
        "decode_tokens_per_second": rate(metrics.decode_tokens, metrics.decode_seconds),
        "kv_bytes_used": metrics.peak_kv_bytes,
        "kv_bytes_reserved": engine.spec.nbytes,
        "kv_format": kept.formats,
        "kv_bytes_per_token": round(kept.bytes_per_token, 1),
        "kv_part_of_bf16": round(kept.ratio, 4),
        "kv_tokens_per_gib": kept.tokens_that_fit,
        "kv_tokens_per_gib_bf16": kept.bf16_tokens_that_fit,
    }


def report(engine: Engine) -> str:
    """The same figures as two lines of text."""
    figures, kept = totals(engine), footprint(engine.spec)
    used, reserved = engine.metrics.peak_kv_bytes, engine.spec.nbytes
    return (
        f"prefill {figures['prefill_tokens']} tokens, "
        f"{figures['prefill_tokens_per_second']} tokens/s; "
        f"decode {figures['decode_tokens']} tokens, "
        f"{figures['decode_tokens_per_second']} tokens/s; "
        f"KV cache {console.format_bytes(used)} used of {console.format_bytes(reserved)} reserved\n"
        f"{kept.formats}: {kept.bytes_per_token:,.0f} bytes per token at {kept.num_tokens:,} "
        f"tokens, {kept.ratio:.3f} of bf16; {console.format_bytes(kept.memory)} holds "
        f"{kept.tokens_that_fit:,} tokens, in bf16 {kept.bf16_tokens_that_fit:,}"
    )


def print_results(jobs: Sequence[Job], engine: Engine, *, as_lines: bool, echo: bool) -> None:
    """Prints answers and figures, and on stderr why prompts failed."""
    if as_lines:
        for job in jobs:
            print(as_json(job))
        print(json.dumps(totals(engine)))
    else:
        for job in jobs:
            if not echo and job.completion is not None and job.error is None:
                print(f"> {job.prompt}\n{job.completion.text.strip()}\n")
        if echo:
            print()
        if engine.metrics.num_steps:
            print(report(engine), file=sys.stderr)
    for job in jobs:
        if job.error is not None:
            start = job.prompt if len(job.prompt) <= 40 else job.prompt[:40] + "..."
            print(f"{start!r}: {job.error}", file=sys.stderr)


def main(argv: list[str]) -> int:
    """Decodes the prompts; returns 2 if any of them failed."""
    options = parse(argv)
    options.check()
    prompts = read_prompts(options)
    console.enable_compilation_cache()
    loaded = console.load_model(options.model)
    jobs = make_jobs(prompts, loaded.require_tokenizer(), options)
    llm = open_llm(loaded, jobs, options)
    echo = len(jobs) == 1 and not options.json
    serve(llm, jobs, echo=echo)
    print_results(jobs, llm.engine, as_lines=options.json, echo=echo)
    return console.EXIT_USER_ERROR if any(job.error is not None for job in jobs) else 0
