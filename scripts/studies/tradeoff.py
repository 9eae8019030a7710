"""Weighs three ways of shrinking the KV cache: fewer heads, coarser values, fewer tokens.

    python scripts tradeoff --text novel.txt --out study                    # under 40 minutes
    python scripts tradeoff --text novel.txt --out look --quick             # under 3
    python scripts tradeoff --text novel.txt --out study --heads 3 smollm2-mqa \\
        --formats f32 kivi4 --methods none snapkv streaming_llm --budgets 0.5 0.25

A row is a model, a format, a method and a budget; all combinations of what is named are measured:

    text    a context of --context tokens is computed, tokens are dropped from it, and the --tokens
            after it are scored: perplexity, bits per byte and, compared with the full float32 cache
            of the first model, KL (mean, p99) and how often the likeliest token is the same
    tasks   synthetic questions about a context from which tokens were dropped before the question,
            by length and depth (jaxkv.eval.ruler); greedy answers
    cost    bytes of all pages after the context, tokens that fit in 1 GiB, and the time of a decode
            step at two lengths, which gives a slope per cached token

--heads takes numbers of KV heads (pooled by their mean, not trained) and models that `uptrain`
wrote. A budget is the part that is kept; `ratio` in the results is the part that is removed.

The results of a row go to its own folder when it is done, in kvpress's layout (config.yaml,
predictions.csv, metrics.json). The same command continues a run that was stopped, and a command
with more rows extends the study. Another model, text or size in the same --out is refused. After
the last row, results.csv and results.json are written and, with the extra `plot`, plots and
report.html, for the rows that were asked for.
"""

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.cache import choose_formats
from jaxkv.cli import console
from jaxkv.cli.arguments.serving import read_text
from jaxkv.compress import METHODS, Budget, Compression, Window
from jaxkv.engine import Completion, Engine, EngineConfig, Request, RequestError
from jaxkv.eval import Comparison, Reading, Setting, TextFunctions, read
from jaxkv.eval.ruler import TASKS
from jaxkv.kv_format import preferred_page_size
from jaxkv.models.decode_model import FlaxDecodeModel
from jaxkv.models.errors import ModelError
from jaxkv.models.kv_heads import with_kv_heads
from jaxkv.models.loading import LoadedModel, load_model
from scripts.studies.folder import claim, model_sum, sum_of, text_sum
from scripts.studies.tradeoff_questions import Question, questions
from scripts.studies.tradeoff_report import table, write_report, write_results
from scripts.studies.tradeoff_rows import measured, scores, write_row

NONE = "none"
MEMORY = 1 << 30
STEPS = 16  # decode steps timed per length
QUICK = dict(
    formats=["f32", "int8"],
    methods=[NONE, "knorm", "snapkv"],
    budgets=["0.5"],
    tasks=[],
    context=256,
    tokens=128,
)


@dataclass(frozen=True)
class Setup:
    """One row of the study.

    Attributes:
      heads: number of KV heads, or a model, as in --heads.
      kv_format, method: names; `none` drops no tokens.
      budget: budget of the method; None without one.
      heads_sha256: checksum of the model that `heads` names; empty if it is a number.
    """

    heads: str
    kv_format: str
    method: str
    budget: str | None
    heads_sha256: str = ""

    def compression(self, num_tokens: int) -> Compression | None:
        """Returns the method for a context; a window's part becomes a number of tokens.

        Raises:
          ValueError: the method does not accept the budget.
        """
        if self.method == NONE or self.budget is None:
            return None
        budget = Budget(self.budget)
        if isinstance(METHODS[self.method], Window) and budget.is_part:
            budget = Budget(budget.keep(num_tokens))
        return Compression(method=self.method, budget=budget)

    def ratio(self, num_tokens: int) -> float:
        """Part of a context's tokens that is evicted."""
        if self.budget is None:
            return 0.0
        return float(1 - Fraction(Budget(self.budget).keep(num_tokens), num_tokens))

    @property
    def page_size(self) -> int:
        """Tokens per page for the format."""
        return preferred_page_size(self.kv_format)

    def folder(self, model: str, num_tokens: int) -> str:
        """Name of the row's folder, which no other row of the study has."""
        heads = f"kv{Path(self.heads).name}" + (self.heads_sha256 and f"-{self.heads_sha256}")
        kept = self.budget or "all"
        parts = ("ruler", str(num_tokens), Path(model).name, self.method, kept, self.kv_format)
        return "__".join((*parts, heads)).replace(",", "+").replace("=", "-")


@dataclass(frozen=True, kw_only=True)
class TradeoffOptions:
    """The command line; lists have no repeated values, and budgets one spelling."""

    model: console.ModelOptions
    text: Path
    out: Path
    heads: list[str] | None
    formats: list[str]
    methods: list[str]
    budgets: list[str]
    skip: int
    context: int
    tokens: int
    tasks: list[str]
    lengths: list[int]
    samples: int
    seed: int

    def distinct(self) -> "TradeoffOptions":
        """Returns the options without repeated values.

        Raises:
          ValueError: a budget is invalid.
        """
        lists = {
            name: list(dict.fromkeys(getattr(self, name) or ()))
            for name in ("heads", "formats", "methods", "tasks", "lengths")
        }
        return replace(self, **lists, budgets=list(dict.fromkeys(map(canonical, self.budgets))))


def parse(argv: list[str]) -> TradeoffOptions:
    """Reads the command line."""
    parser = console.Parser("python scripts tradeoff", __doc__)
    console.add_model_arguments(parser)
    add = parser.add_argument
    add("--text", type=Path, required=True, metavar="PATH", help="UTF-8 text")
    add("--out", type=Path, required=True, metavar="DIR", help="a folder for the results")
    add("--quick", action="store_true", help="few rows on a short text, no tasks")
    axes = parser.add_argument_group("values that are combined")
    add = axes.add_argument
    add("--heads", nargs="+", metavar="K", help="KV heads, or models (default: the model's own)")
    add("--formats", nargs="+", default=["f32", "int8", "kivi4"], metavar="F", help="KV formats")
    add(
        "--methods",
        nargs="+",
        default=[NONE, "streaming_llm", "knorm", "snapkv"],
        metavar="M",
        help=f"{NONE}, {', '.join(METHODS)}",
    )
    add(
        "--budgets",
        nargs="+",
        default=["0.5", "0.25"],
        metavar="B",
        help="parts (1.0: all), or numbers of tokens",
    )
    sizes = parser.add_argument_group("size of the measurement")
    add = sizes.add_argument
    add("--skip", type=int, default=2_000, metavar="N", help="tokens to skip (default: 2000)")
    add("--context", type=int, default=768, metavar="N", help="tokens (default: %(default)s)")
    add("--tokens", type=int, default=256, metavar="N", help="tokens scored (default: %(default)s)")
    add(
        "--tasks",
        nargs="*",
        default=["niah_single", "niah_multikey", "vt"],
        metavar="T",
        help=f"tasks: {', '.join(TASKS)}",
    )
    add(
        "--lengths",
        nargs="+",
        type=int,
        default=[512],
        metavar="N",
        help="of contexts, in tokens (default: 512)",
    )
    add(
        "--samples",
        type=int,
        default=2,
        metavar="N",
        help="samples per task, length and depth (default: 2)",
    )
    add("--seed", type=int, default=42, help="seed of the tasks (default: %(default)s)")
    if parser.parse_args(argv).quick:  # changes the defaults; options that are given stay
        parser.set_defaults(**QUICK)
    options = parser.read(TradeoffOptions, argv)
    parser.require_at_least(options, skip=0, context=8, tokens=2, samples=1, seed=0)
    if min(options.lengths) < 8:
        parser.error("--lengths must be at least 8")
    for name, known in (("methods", (NONE, *METHODS)), ("tasks", tuple(TASKS))):
        for given in getattr(options, name):
            if given not in known:
                parser.error(f"--{name}: no {given!r}; there are {', '.join(known)}")
    try:
        return options.distinct()
    except ValueError as error:
        parser.error(f"--budgets: {error}")


def canonical(budget: str) -> str:
    """Returns the one spelling of a budget: `0.5` for `50%`.

    Raises:
      ValueError: the text is not a budget.
    """
    kept = Budget(budget).kept
    return str(kept) if isinstance(kept, int) else np.format_float_positional(float(kept), trim="0")


def models_of(options: TradeoffOptions, loaded: LoadedModel) -> dict[str, FlaxDecodeModel]:
    """Loads the models by their names in --heads, in its order.

    Raises:
      ModelError: a name is no model, or the model cannot be compared with --model.
    """
    own = loaded.model
    models = {}
    for name in options.heads or [str(own.config.attention.num_kv_heads)]:
        if name.isdecimal():
            models[str(int(name))] = with_kv_heads(own, int(name))
            continue
        models[name] = load_model(name, console.DTYPES[options.model.dtype]).model
        if models[name].vocab_size != own.vocab_size:
            raise ModelError(f"--heads {name}: has another vocabulary than {loaded.name}")
    return models


def setups(options: TradeoffOptions, models: Mapping[str, FlaxDecodeModel]) -> list[Setup]:
    """Returns all rows: the full cache first, and each method with each budget."""
    sums = {
        name: "" if name.isdecimal() else sum_of([name.encode(), model_sum(model).encode()])
        for name, model in models.items()
    }
    rows = [
        Setup(heads, kv_format, method, budget, sums[heads])
        for heads, kv_format, method in product(models, options.formats, options.methods)
        for budget in (options.budgets if method != NONE else [None])
    ]
    first = next(iter(models))
    full = Setup(first, "f32", NONE, None, sums[first])
    return [full, *[row for row in rows if row != full]]


def check(options: TradeoffOptions, models: Mapping[str, FlaxDecodeModel], most: int) -> None:
    """Checks that all models have the formats, and room for the text and the lengths.

    Raises:
      ModelError: a model does not have them.
    """
    for kv_format, model in product(options.formats, models.values()):
        try:
            choose_formats(kv_format, model.layers)
        except ValueError as error:
            raise ModelError(f"--formats {kv_format}: {error}") from None
    sizes = {
        f"--context {options.context} and --tokens {options.tokens}": options.context
        + options.tokens
    }
    if options.tasks:
        sizes |= {f"--lengths {length}": length + STEPS for length in options.lengths}
    for option, n in sizes.items():
        if n > most:
            raise ModelError(f"{option}: {n} tokens; the model takes {most} at most")


def main(argv: list[str]) -> int:
    """Runs the study; returns its exit code."""
    options = parse(argv)
    text = read_text(options.text)
    console.enable_compilation_cache()
    loaded = console.load_model(options.model)
    tokenizer = loaded.require_tokenizer()
    whole = tokenizer.encode(text)
    tokens = whole[options.skip :][: options.context + options.tokens]
    if len(tokens) < options.context + options.tokens:
        raise ModelError(f"{options.text}: has too few tokens after --skip {options.skip}")
    models = models_of(options, loaded)
    most = min(model.max_positions for model in models.values())
    check(options, models, most)
    asked = list(
        questions(
            tokenizer,
            tasks=options.tasks,
            lengths=options.lengths,
            samples=options.samples,
            seed=options.seed,
            most=most,
        )
    )
    rows = setups(options, models)
    run = {
        "model": loaded.name,
        "dtype": options.model.dtype,
        "weights_sha256": model_sum(loaded.model),
        "text_sha256": text_sum(whole),
        "beside": f"{rows[0].heads} {rows[0].heads_sha256}".rstrip(),
    }
    for name in ("skip", "context", "tokens", "tasks", "lengths", "samples", "seed"):
        run[name] = getattr(options, name)
    command = shlex.join(["python", "scripts", "tradeoff", *argv])
    study = Study(options, loaded, models, tokens, asked, first=rows[0], run=run, command=command)
    claim(options.out, run, "*/metrics.json")
    with console.progress(len(rows), unit="row", description="tradeoff") as bar:
        results = []
        for setup in rows:
            bar.set_postfix_str(f"{setup.kv_format} {setup.method} {setup.budget or ''}")
            results.append(study.row(setup))
            bar.update()
    write_results(options.out, results)
    files = write_report(options.out, results, study.command)
    print(table(results))
    print(f"{options.out}: {len(results)} rows; {', '.join(file.name for file in files)}")
    return 0


class Study:
    """Data that all rows share: the models, the text, and the full cache's distributions."""

    def __init__(
        self,
        options: TradeoffOptions,
        loaded: LoadedModel,
        models: Mapping[str, FlaxDecodeModel],
        tokens: list[int],
        asked: Sequence[Question],
        *,
        first: Setup,
        run: dict[str, Any],
        command: str,
    ):
        """Creates the study of one text.

        Args:
          options: the command line.
          loaded: --model, with its tokenizer.
          models: all models, by their names in --heads.
          tokens: a context and the tokens after it.
          asked: the questions of the tasks.
          first: the row of the full cache.
          run: everything that determines the results.
          command: the command that continues the study.
        """
        self.options, self.loaded, self.tokens, self.command = options, loaded, tokens, command
        self._models, self._asked, self._first, self._run = models, asked, first, run
        self._tokenizer = loaded.require_tokenizer()
        # Compiled, by model:
        self._functions: dict[str, TextFunctions] = {}
        self._comparisons: dict[str, Comparison] = {}
        self._steps: dict[str, Any] = {}
        self._full: Reading | None = None
        after = self._tokenizer.decode(tokens[options.context + 1 :])
        self._num_bytes = len(after.encode())

    def row(self, setup: Setup) -> dict[str, Any]:
        """Returns the results of a row, from its folder or measured now.

        Raises:
          ModelError: the row of the full cache cannot be measured, or a row's file is invalid.
        """
        folder = self.options.out / setup.folder(self.loaded.name, self.options.context)
        config = asdict(setup) | self._run
        found = measured(folder / "metrics.json", config)
        if found is not None:
            return found
        metrics: dict[str, Any] = {"config": config, "command": self.command}
        metrics |= {"ratio": setup.ratio(self.options.context), "date": time.strftime("%Y-%m-%d")}
        predictions: list[dict[str, Any]] = []
        try:
            metrics |= self._text(setup)
            if self.options.tasks:
                predictions, cost = self._serve(setup)
                metrics |= cost | {"tasks": scores(predictions)}
        except ValueError as error:  # formats and methods refuse some combinations
            if setup == self._first:
                raise ModelError(str(error)) from None
            metrics["refused"] = str(error)
        write_row(folder, config, predictions, metrics)
        return metrics

    def _text(self, setup: Setup) -> dict[str, Any]:
        """Returns distances on the text, and bytes."""
        context = self.options.context
        own = self._reading(setup)
        if self._full is None:  # an earlier run may have measured the full cache
            self._full = own if setup == self._first else self._reading(self._first)
        if setup.heads not in self._comparisons:
            models = self._models[setup.heads], self._models[self._first.heads]
            self._comparisons[setup.heads] = Comparison(*models)
        targets = self.tokens[context + 1 :]
        quality = self._comparisons[setup.heads](own, self._full, targets)
        found = asdict(quality)
        found["bits_per_byte"] = (
            math.log2(quality.perplexity) * len(targets) / max(1, self._num_bytes)
        )
        a_token = quality.nbytes / len(self.tokens)
        return found | {"bytes_per_token": a_token, "tokens_per_gib": int(MEMORY / a_token)}

    def _reading(self, setup: Setup) -> Reading:
        context, model = self.options.context, self._models[setup.heads]
        if setup.heads not in self._functions:
            self._functions[setup.heads] = TextFunctions(model)
        functions = self._functions[setup.heads]
        formats = choose_formats(setup.kv_format, model.layers)
        setting = Setting(formats=formats, compression=setup.compression(context))
        size = setup.page_size
        return read(functions, self.tokens, setting, page_size=size, context=context, chunk=256)

    def _serve(self, setup: Setup) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Returns answers to the tasks, and the time of steps."""
        predictions, cost, model = [], {}, self._models[setup.heads]
        for length in self.options.lengths:
            engine = Engine(
                model,
                EngineConfig(
                    max_sequences=1,
                    token_budget=64,  # one shape of prefill: compiling takes most of a row's time
                    page_size=setup.page_size,
                    max_length=min(2 * length + 256, model.max_positions),
                    kv_format=setup.kv_format,
                    compression=setup.compression(length),
                ),
                steps=self._steps.get(setup.heads),
            )
            self._steps[setup.heads] = engine.steps
            for question in self._asked:
                if question.length != length:
                    continue
                sample, output = question.sample, self._answer(engine, question)
                predictions.append(
                    {
                        "task": sample.task,
                        "length": length,
                        "depth": sample.depth,
                        "seed": question.seed,
                        "answer": "|".join(sample.answers),
                        "predicted_answer": output,
                        "score": sample.score(output),
                    }
                )
            cost = self._times(engine, length, setup)
        return predictions, cost

    def _answer(self, engine: Engine, question: Question) -> str:
        compression = engine.config.compression
        drops = compression is not None and not compression.is_window
        request = Request(
            prompt=tuple(question.context + question.question),
            max_new_tokens=question.max_new_tokens,
            context=len(question.context) if drops else None,
        )
        return self._tokenizer.decode(served(engine, request).tokens)

    def _times(self, engine: Engine, length: int, setup: Setup) -> dict[str, Any]:
        """Times a prefill in seconds, and decode steps in ms at a quarter and all of a length.

        The steps are compiled already, because the engine has answered questions.
        """
        steps = {}
        seconds = 0.0
        for n in (length // 4, length):
            before = replace(engine.metrics)
            prompt = tuple(islice(cycle(self.tokens), n))
            salt = f"{n} tokens"  # no part of it is cached
            served(engine, Request(prompt=prompt, max_new_tokens=STEPS, cache_salt=salt))
            after = engine.metrics
            seconds = after.prefill_seconds - before.prefill_seconds
            decoded = after.decode_tokens - before.decode_tokens
            steps[n] = 1e3 * (after.decode_seconds - before.decode_seconds) / decoded
        (short, a), (long, b) = steps.items()
        return {
            "prefill_seconds": seconds,
            "decode_ms": b,
            "decode_us_per_cached_token": 1e3 * (b - a) / (long - short),
        }


def served(engine: Engine, request: Request) -> Completion:
    """Serves one request.

    Raises:
      RequestError: the engine could not serve it.
    """
    (completion,) = engine.generate([request])
    if completion.error is not None:
        raise RequestError(completion.error)
    return completion
