"""Decode prompts with a model through the paged cache.

Prompts are arguments, or lines of a file, or of standard input; all are decoded together. An
instruct model answers them through its chat template; `--raw` continues the bare text.

  jaxkv decode "What is a KV cache?"
  jaxkv decode --prompts questions.txt --max-new-tokens 64 --temperature 0.7 --seed 3
  echo "Once upon a time" | jaxkv decode --raw --json
  jaxkv decode --method snapkv --budget 50% --prompts long.txt

With `--json`, standard output is one JSON object a line: one for each prompt, in order, then one
with the totals.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxkv.cli import console
from jaxkv.cli.arguments.serving import (
    add_backend_argument,
    add_compression_arguments,
    add_format_arguments,
    add_sampling_arguments,
    compression,
    kv_ranges,
    make_engine,
    page_size,
    prompt_lines,
    sampling_params,
)
from jaxkv.engine import (
    Completion,
    Engine,
    EngineConfig,
    Request,
    RequestError,
    footprint,
)
from jaxkv.models.chat import render_chat
from jaxkv.models.errors import ModelError
from jaxkv.models.loading import LoadedModel
from jaxkv.models.tokenizer import StreamDecoder, Tokenizer

MIN_POOL_TOKENS = 1024


@dataclass
class Job:
    """A prompt on its way: its request or why there is none, then its completion."""

    prompt: str
    request: Request | None = None
    completion: Completion | None = None
    error: str | None = None


def parse(argv: list[str]) -> argparse.Namespace:
    """Returns the arguments."""
    parser = console.Parser("jaxkv decode", __doc__)
    add = parser.add_argument
    add("prompts", nargs="*", help="prompts; none: read --prompts or standard input")
    add("--prompts", dest="file", metavar="FILE", type=Path, help="a prompt a line, UTF-8")
    console.add_model_arguments(parser)
    add("--raw", action="store_true", help="no chat template: continue the bare text")
    add("--system", metavar="TEXT", help="system message for the chat template")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)")
    add(
        "--stop", action="append", default=[], metavar="TEXT", help="end an answer before this text"
    )
    add("--ignore-eos", action="store_true", help="go on past the model's own end token")
    add_sampling_arguments(parser, "prompt")
    add = parser.add_argument
    add("--logprobs", type=int, metavar="N", help="report log-probabilities and the N likeliest")
    cache = parser.add_argument_group("cache and batch")
    add = cache.add_argument
    add("--batch", type=int, default=8, metavar="B", help="most sequences a step (default: 8)")
    add("--chunk", type=int, default=512, metavar="T", help="most tokens a step (default: 512)")
    add(
        "--pool-tokens", type=int, metavar="N", help="tokens in the cache (default: what is needed)"
    )
    add_format_arguments(cache)
    add_compression_arguments(cache)
    add_backend_argument(cache)
    add("--deterministic", action="store_true", help="same bits whatever the batch; slower")
    parser.add_argument("--json", action="store_true", help="JSON lines on standard output")
    return parser.parse_args(argv)


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Returns the prompts of arguments, file or standard input; blank lines are left out."""
    if args.prompts and args.file:
        raise ModelError("give prompts as arguments or with --prompts, not both")
    if args.prompts:
        return args.prompts
    if args.file is None and sys.stdin is None:
        raise ModelError("there is no prompt: standard input is closed")
    name = str(args.file) if args.file else "standard input"
    if args.file is None and sys.stdin.isatty():
        print("type prompts, a line each; end with Ctrl-D", file=sys.stderr)
    data = args.file.read_bytes() if args.file else sys.stdin.buffer.read()
    return prompt_lines(data, name)


def encode(prompt: str, tokenizer: Tokenizer, args: argparse.Namespace) -> list[int]:
    """Token ids of a prompt, in the chat template unless it is taken raw or there is none."""
    if args.raw or tokenizer.chat_template is None:
        return tokenizer.encode(prompt)
    messages = [{"role": "user", "content": prompt}]
    if args.system:
        messages.insert(0, {"role": "system", "content": args.system})
    text = render_chat(
        tokenizer.chat_template,
        messages,
        add_generation_prompt=True,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def make_job(index: int, prompt: str, tokenizer: Tokenizer, args: argparse.Namespace) -> Job:
    """The job of prompt `index`; a prompt that cannot be encoded fails alone."""
    try:
        ids = encode(prompt, tokenizer, args)
        stop_ids = frozenset() if args.ignore_eos else tokenizer.stop_ids
        return Job(prompt, make_request(ids, stop_ids, index, args))
    except (ModelError, RequestError) as error:
        return Job(prompt, error=str(error))


def make_request(
    ids: list[int], stop_ids: frozenset[int], index: int, args: argparse.Namespace
) -> Request:
    """A request with the options of the command line."""
    return Request(
        prompt=tuple(ids),
        max_new_tokens=args.max_new_tokens,
        sampling=sampling_params(args, index),
        stop_ids=stop_ids,
        stop_strings=tuple(args.stop),
        logprobs=args.logprobs,
    )


def engine_config(args: argparse.Namespace, pool_tokens: int) -> EngineConfig:
    """The sizes and choices of the command line."""
    return EngineConfig(
        max_sequences=args.batch,
        token_budget=args.chunk,
        page_size=page_size(args),
        pool_tokens=pool_tokens if args.pool_tokens is None else args.pool_tokens,
        kv_format=args.kv_format,
        kv_ranges=kv_ranges(args),
        compression=compression(args),
        deterministic=args.deterministic,
        backend=args.backend,
    )


def check_options(args: argparse.Namespace) -> None:
    """Raises JaxkvError for an option that no prompt could be served with."""
    make_request([0], frozenset(), 0, args)
    engine_config(args, MIN_POOL_TOKENS)


def engine_for(
    loaded: LoadedModel, requests: Sequence[Request], args: argparse.Namespace
) -> Engine:
    """An engine whose cache holds the longest requests that may run at once."""
    tokenizer = loaded.require_tokenizer()
    longest = loaded.model.max_positions
    needs = sorted((min(len(r.prompt) + r.max_new_tokens, longest) for r in requests), reverse=True)
    # Whole pages each, then a power of two: runs of like size share their compiled steps.
    P = page_size(args)
    needed = sum(-(-need // P) * P for need in needs[: args.batch])
    config = engine_config(args, max(MIN_POOL_TOKENS, 1 << (needed - 1).bit_length()))
    return make_engine(loaded, config, lambda: StreamDecoder(tokenizer, continues=True))


def serve(engine: Engine, jobs: Sequence[Job], *, echo: bool) -> None:
    """Decodes all jobs; with `echo`, text appears on standard output as it is made."""
    served = [job for job in jobs if job.request is not None]
    requests = [job.request for job in served if job.request is not None]
    total = sum(request.max_new_tokens for request in requests)
    with console.progress(total, unit="token", description="starting", hide=echo) as bar:
        for delta in engine.stream(requests):
            bar.set_description("decoding", refresh=False)
            completion = delta.completion
            job = served[completion.request_id]  # a new engine counts from 0
            job.completion, job.error = completion, completion.error
            bar.update(len(delta.tokens))
            if echo:
                print(delta.text, end="", flush=True)
            if completion.finish_reason is not None:
                # An answer that ended early leaves nothing to wait for.
                bar.total -= requests[completion.request_id].max_new_tokens
                bar.total += len(completion.tokens)


def as_json(job: Job) -> str:
    """One line for a job."""
    record: dict[str, Any] = {"prompt": job.prompt}
    completion = job.completion
    if completion is not None and job.error is None:
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
    else:
        record["error"] = job.error
    return json.dumps(record)


def totals(engine: Engine) -> dict[str, float | str]:
    """Figures of a run: tokens, tokens a second, and bytes of K and V."""
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
    """The figures as people read them."""
    figures, kept = totals(engine), footprint(engine.spec)
    used, reserved = engine.metrics.peak_kv_bytes, engine.spec.nbytes
    return (
        f"prefill {figures['prefill_tokens']} tokens, "
        f"{figures['prefill_tokens_per_second']} tokens/s; "
        f"decode {figures['decode_tokens']} tokens, "
        f"{figures['decode_tokens_per_second']} tokens/s; "
        f"KV cache {console.format_bytes(used)} used of {console.format_bytes(reserved)} reserved\n"
        f"{kept.formats}: {kept.bytes_per_token:,.0f} bytes a token at {kept.num_tokens:,} tokens, "
        f"{kept.ratio:.3f} of bf16; {console.format_bytes(kept.memory)} holds "
        f"{kept.tokens_that_fit:,} tokens, in bf16 {kept.bf16_tokens_that_fit:,}"
    )


def main(argv: list[str]) -> int:
    """Decodes the prompts; returns 2 where any of them failed."""
    args = parse(argv)
    check_options(args)
    prompts = read_prompts(args)
    console.enable_compilation_cache()
    loaded = console.load_model(args)
    tokenizer = loaded.require_tokenizer()
    if args.system and (args.raw or tokenizer.chat_template is None):
        raise ModelError("--system needs a chat template, and here is none")
    jobs = [make_job(i, prompt, tokenizer, args) for i, prompt in enumerate(prompts)]
    engine = engine_for(loaded, [job.request for job in jobs if job.request is not None], args)
    echo = len(jobs) == 1 and not args.json
    serve(engine, jobs, echo=echo)
    if args.json:
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
    failed = [job for job in jobs if job.error is not None]
    for job in failed:
        start = job.prompt if len(job.prompt) <= 40 else job.prompt[:40] + "..."
        print(f"{start!r}: {job.error}", file=sys.stderr)
    return console.EXIT_USER_ERROR if failed else 0
