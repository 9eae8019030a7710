"""Score prompts and continue them greedily, for comparison with another implementation.

    echo '{"name": "paris", "text": "The capital of France is"}' > cases.jsonl
    jaxkv score --in cases.jsonl --out out.npz

Each line of --in is an object with a `name` and either `ids` (token ids) or `text` (encoded by
the model's own rule, with BOS if it has one). All cases run together through the engine
and its paged cache. For each case NAME, --out holds

    NAME/ids              int32 [n]    the prompt
    NAME/prompt_logprobs  float32 [n]  natural-log probability of each token given those before;
                                       NaN at 0
    NAME/logits_last      float32 [V]  logits after the prompt
    NAME/cont_ids         int32 [c]    greedy continuation, which stop tokens do not end
    NAME/cont_logprobs    float32 [c]
    NAME/cont_margin      float32 [c]  logit of the most likely token minus that of the next

where c is --new-tokens, or less if the continuation reaches the model's longest sequence.

A malformed line ends the run before the model is loaded. A case that the model cannot process (too
long, empty, an unknown id) is reported and left out; the others are written. In both cases the exit
code is 2.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxkv.arith import round_up
from jaxkv.cli import console
from jaxkv.cli.arguments.serving import add_backend_argument
from jaxkv.engine import Completion, Engine, EngineConfig, Request, RequestError
from jaxkv.errors import UsageError
from jaxkv.models.errors import ModelError

if TYPE_CHECKING:
    from jaxkv.models.loading import LoadedModel


@dataclass(frozen=True)
class Case:
    """One line of the input: a name, and a prompt as token ids or as text."""

    name: str
    prompt: tuple[int, ...] | str


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """The command line."""

    model: console.ModelOptions
    input: Path
    out: Path
    new_tokens: int
    page_size: int
    chunk: int
    batch: int
    backend: str | None
    deterministic: bool

    def config(self, lengths: Sequence[int]) -> EngineConfig:
        """Sizes for sequences of these lengths: the longest of a batch fit at the same time."""
        longest_first = sorted(lengths, reverse=True)
        page_size = max(self.page_size, 1)  # EngineConfig says what is wrong with it
        batch = longest_first[: max(self.batch, 1)]
        return EngineConfig(
            max_sequences=self.batch,
            token_budget=self.chunk,
            page_size=self.page_size,
            pool_tokens=sum(round_up(length, page_size) for length in batch),
            max_length=longest_first[0],
            deterministic=self.deterministic,
            backend=self.backend,
        )


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    options = _parse(argv)
    with _open(options.input) as file:
        cases = read_cases(file, str(options.input))
    console.enable_compilation_cache()
    loaded = console.load_model(options.model)
    prompts, problems = _encode(cases, loaded)
    completions: dict[str, Completion] = {}
    if prompts:
        completions = _run(loaded, prompts, options, problems)
    if completions:
        _save(options.out, prompts, completions)
    for name, problem in problems.items():
        print(f"case {name!r}: {problem}", file=sys.stderr)
    print(f"{options.out}: {len(completions)} of {len(cases)} cases")
    return console.EXIT_USER_ERROR if problems else 0


def _parse(argv: list[str]) -> ScoreOptions:
    parser = console.Parser("jaxkv score", __doc__)
    console.add_model_arguments(parser)
    add = parser.add_argument
    add("--in", dest="input", type=Path, required=True, metavar="FILE", help="- is stdin")
    add("--out", type=Path, required=True, metavar="FILE", help="an .npz file")
    add(
        "--new-tokens",
        type=int,
        default=64,
        metavar="N",
        help="tokens of each continuation (default: %(default)s)",
    )
    add(
        "--page-size",
        type=int,
        default=16,
        metavar="P",
        help="tokens per page, 8 to 256 (default: %(default)s)",
    )
    add("--chunk", type=int, default=512, metavar="T", help="most tokens per step (default: 512)")
    add("--batch", type=int, default=8, metavar="B", help="most sequences per step (default: 8)")
    add_backend_argument(parser)
    add(
        "--deterministic",
        action="store_true",
        help="logits whose bits do not depend on --batch, --chunk or --page-size",
    )
    options = parser.read(ScoreOptions, argv)
    parser.require_at_least(options, new_tokens=1)
    if not options.out.absolute().parent.is_dir():
        parser.error(f"--out: {options.out.absolute().parent} is no directory")
    try:
        options.config([1])
    except UsageError as error:
        parser.error(str(error))
    return options


def _open(path: Path) -> Any:
    if str(path) != "-":
        return open(path, "rb")
    if sys.stdin is None:
        raise UsageError("there is no case: standard input is closed")
    return sys.stdin.buffer


def read_cases(lines: Iterable[bytes], where: str) -> list[Case]:
    """Reads cases, one JSON object per line; blank lines are skipped.

    Raises:
      UsageError: a line is not a case, or two have one name; the message names the line.
    """
    cases: dict[str, Case] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                case = _case(line)
                if case.name in cases:
                    raise ValueError(f"the name {case.name!r} is taken by an earlier line")
            except ValueError as error:
                raise UsageError(f"{where}, line {number}: {error}") from None
            cases[case.name] = case
    if not cases:
        raise UsageError(f"{where}: holds no case")
    return list(cases.values())


def _case(line: bytes) -> Case:
    """The case of one line; raises ValueError, saying what is wrong."""
    try:
        raw = json.loads(line.decode())
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(raw, dict) or raw.keys() not in ({"name", "ids"}, {"name", "text"}):
        raise ValueError('must be {"name": ..., "ids": [...]} or {"name": ..., "text": "..."}')
    name = raw["name"]
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= 200
        or "/" in name
        or not name.isprintable()
    ):
        raise ValueError(f"name must be printable, short and without slashes, got {name!r:.40}")
    if "text" in raw:
        if not isinstance(raw["text"], str):
            raise ValueError(f"text must be a text, got {raw['text']!r:.40}")
        return Case(name, raw["text"])
    ids = raw["ids"]
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError("ids must be a list of integers")
    return Case(name, tuple(ids))


def _encode(
    cases: Sequence[Case], loaded: "LoadedModel"
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The prompts that are not too long, and what is wrong with the others, by name."""
    prompts: dict[str, tuple[int, ...]] = {}
    problems: dict[str, str] = {}
    limit = loaded.model.max_positions
    for case in cases:
        try:
            prompt = case.prompt
            if isinstance(prompt, str):
                prompt = tuple(loaded.require_tokenizer().encode(prompt))
        except ModelError as error:
            problems[case.name] = str(error)
            continue
        if len(prompt) >= limit:
            problems[case.name] = (
                f"has {len(prompt)} tokens; the model takes {limit}, one of them to come"
            )
        else:
            prompts[case.name] = prompt
    return prompts, problems


def _run(
    loaded: "LoadedModel",
    prompts: Mapping[str, tuple[int, ...]],
    options: ScoreOptions,
    problems: dict[str, str],
) -> dict[str, Completion]:
    """Completions by name; what the engine refuses goes to `problems`."""
    limit = loaded.model.max_positions
    lengths = [min(len(p) + options.new_tokens, limit) for p in prompts.values()]
    engine = Engine(loaded.model, options.config(lengths))
    completions: dict[str, Completion] = {}
    for name, prompt in prompts.items():
        try:
            request = Request(
                prompt=prompt,
                max_new_tokens=options.new_tokens,
                logprobs=2,
                prompt_logprobs=True,
                keep_logits=True,
            )
            completions[name] = engine.submit(request)
        except RequestError as error:
            problems[name] = str(error)
    total = options.new_tokens * len(completions)
    with console.progress(total, unit="tok", description="scoring") as bar:
        while engine.has_work:
            for delta in engine.step():
                del delta.completion.logits[1:]  # V floats per token; only the first row is kept
                bar.update(len(delta.tokens))
    return completions


def _save(
    path: Path, prompts: Mapping[str, tuple[int, ...]], completions: Mapping[str, Completion]
) -> None:
    arrays: dict[str, np.ndarray] = {}
    for name, completion in completions.items():
        assert completion.prompt_logprobs is not None  # was asked for
        tops = [entry.top for entry in completion.logprobs]
        values = {
            "ids": np.array(prompts[name], np.int32),
            "prompt_logprobs": completion.prompt_logprobs,
            "logits_last": completion.logits[0],
            "cont_ids": np.array(completion.tokens, np.int32),
            "cont_logprobs": np.array([e.logprob for e in completion.logprobs], np.float32),
            "cont_margin": np.array([top[0][1] - top[1][1] for top in tops], np.float32),
        }
        arrays |= {f"{name}/{key}": value for key, value in values.items()}
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    os.replace(partial, path)
