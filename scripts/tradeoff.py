"""Weighs three ways of shrinking the KV cache: fewer heads, coarser values, fewer tokens.

    python scripts tradeoff --text novel.txt --out study                    # under 40 minutes
    python scripts tradeoff --text novel.txt --out look --quick             # under 3
    python scripts tradeoff --text novel.txt --out study --heads 3 smollm2-mqa \\
        --formats f32 kivi4 --methods none snapkv streaming_llm --budgets 0.5 0.25

A row is a model, a format, a method and a budget; all combinations of what is named are measured:

    text    a context of --context tokens is computed, tokens are dropped from it, and the --tokens
            behind it are scored: perplexity, bits a byte, and beside the full float32 cache of the
            first model KL (mean, p99) and how often the likeliest token is the same
    tasks   synthetic questions about a context that lost tokens before the question came, by length
            and depth (jaxkv.eval.ruler); greedy answers
    cost    bytes of all pages behind the context, tokens that fit in 1 GiB, and what a decode step
            takes: at two lengths, so with a slope a cached token

--heads takes numbers of KV heads (pooled by their mean, not trained) and models, as `uptrain`
writes them. A budget is what is kept, as everywhere; `ratio` in the results is what is removed.

Results of a row go to a folder of its own as it is done, named and laid out as kvpress does it
(config.yaml, predictions.csv, metrics.json): a run that was stopped goes on by the same command.
Behind the last row come results.csv and .json, and, with the extra `plot`, plots and report.html.
"""

import argparse
import csv
import json
import math
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import cycle, islice, product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from jaxkv.cache import choose_formats
from jaxkv.compress import METHODS, WINDOWS, Budget, Compression
from jaxkv.engine import Engine, EngineConfig, Request, RequestError
from jaxkv.eval import Comparison, Reading, Setting, TextFunctions, read
from jaxkv.eval.ruler import TASKS, Sample, make_sample
from models.errors import ModelError
from models.kv_heads import with_kv_heads
from models.loading import LoadedModel
from scripts import console
from scripts.serving import read_text
from scripts.tradeoff_report import table, write_report, write_results

NONE = "none"
MEMORY = 1 << 30
STEPS = 16  # decode steps that are timed at a length
ANSWER_TOKENS = 8  # for each text that an answer should have
DEPTHS = (0.1, 0.5, 0.9)
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
      heads: number of KV heads, or a model, as it was asked for.
      kv_format, method: names; `none` drops no tokens.
      budget: of the method; None without one.
    """

    heads: str
    kv_format: str
    method: str
    budget: str | None

    def compression(self, num_tokens: int) -> Compression | None:
        """The method at a context of so many tokens; a window's part becomes a number of them.

        Raises:
          ValueError: the method does not take the budget.
        """
        if self.method == NONE or self.budget is None:
            return None
        budget = Budget.parse(self.budget)
        if self.method in WINDOWS and budget.is_part:
            budget = Budget(budget.keep(num_tokens))
        return Compression(method=self.method, budget=budget)

    def ratio(self, num_tokens: int) -> float:
        """Part of a context's tokens that is removed."""
        if self.budget is None:
            return 0.0
        return float(1 - Fraction(Budget.parse(self.budget).keep(num_tokens), num_tokens))

    @property
    def page_size(self) -> int:
        """Tokens a page that suit the format."""
        return 32 if self.kv_format.startswith("kivi") else 16

    def folder(self, model: str, num_tokens: int) -> str:
        """Name of the row's folder."""
        parts = ("ruler", str(num_tokens), Path(model).name, self.method)
        parts += (f"{self.ratio(num_tokens):.2f}", self.kv_format, f"kv{Path(self.heads).name}")
        return "__".join(parts).replace(",", "+").replace("=", "-")


def parse(argv: list[str]) -> argparse.Namespace:
    """Returns the arguments."""
    parser = console.Parser("tradeoff", __doc__)
    console.add_model_arguments(parser)
    add = parser.add_argument
    add("--text", type=Path, required=True, metavar="PATH", help="UTF-8 text")
    add("--out", type=Path, required=True, metavar="DIR", help="a folder for the results")
    add("--quick", action="store_true", help="few rows on a short text, no tasks")
    axes = parser.add_argument_group("what is combined")
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
        help="parts (1.0: all), or tokens",
    )
    sizes = parser.add_argument_group("how much is measured")
    add = sizes.add_argument
    add("--skip", type=int, default=2_000, metavar="N", help="tokens of the text (default: 2000)")
    add("--context", type=int, default=768, metavar="N", help="(default: %(default)s)")
    add("--tokens", type=int, default=256, metavar="N", help="(default: %(default)s)")
    add(
        "--tasks",
        nargs="*",
        default=["niah_single", "niah_multikey", "vt"],
        metavar="T",
        help=f"of {', '.join(TASKS)}",
    )
    add("--lengths", nargs="+", type=int, default=[512], metavar="N", help="of contexts (512)")
    add("--samples", type=int, default=2, metavar="N", help="a task, length and depth (default: 2)")
    add("--seed", type=int, default=42, help="of the tasks (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.quick:
        for name, value in QUICK.items():
            if getattr(args, name) == parser.get_default(name):
                setattr(args, name, value)
    for name, least in (("skip", 0), ("context", 8), ("tokens", 2), ("samples", 1), ("seed", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}")
    if min(args.lengths) < 64:
        parser.error("--lengths must be at least 64")
    for name, known in (("methods", (NONE, *METHODS)), ("tasks", tuple(TASKS))):
        for given in getattr(args, name):
            if given not in known:
                parser.error(f"--{name}: no {given!r}; there are {', '.join(known)}")
    return args


def setups(args: argparse.Namespace, own_heads: int) -> list[Setup]:
    """All rows: the full cache first, and each method with each budget."""
    heads = [str(h) for h in args.heads or [own_heads]]
    rows = [
        Setup(own, kv_format, method, budget)
        for own, kv_format, method in product(heads, args.formats, args.methods)
        for budget in (args.budgets if method != NONE else [None])
    ]
    full = Setup(heads[0], "f32", NONE, None)
    return [full, *[row for row in rows if row != full]]


def main(argv: list[str]) -> int:
    """Runs the study; returns its exit code."""
    args = parse(argv)
    for budget in args.budgets:
        try:
            Budget.parse(budget)
        except ValueError as error:
            raise RequestError(str(error)) from None
    text = read_text(args.text)
    console.enable_compilation_cache()
    loaded = console.load_model(args)
    tokens = loaded.require_tokenizer().encode(text)[args.skip :][: args.context + args.tokens]
    if len(tokens) < args.context + args.tokens:
        raise ModelError(f"{args.text}: has too few tokens behind --skip {args.skip}")
    args.out.mkdir(parents=True, exist_ok=True)
    rows = setups(args, loaded.model.config.attention.num_kv_heads)
    command = shlex.join(["python", "scripts", "tradeoff", *argv])
    study = Study(args, loaded, tokens, first=rows[0], command=command)
    with console.progress(len(rows), unit="row", description="tradeoff") as bar:
        results = []
        for setup in rows:
            bar.set_postfix_str(f"{setup.kv_format} {setup.method} {setup.budget or ''}")
            results.append(study.row(setup))
            bar.update()
    write_results(args.out, results)
    files = write_report(args.out, results, study.command)
    print(table(results))
    print(f"{args.out}: {len(results)} rows; {', '.join(file.name for file in files)}")
    return 0


class Study:
    """What all rows share: the model, the text, and the full cache's reading of it."""

    def __init__(
        self,
        args: argparse.Namespace,
        loaded: LoadedModel,
        tokens: list[int],
        *,
        first: Setup,
        command: str,
    ):
        """Takes a text of a context and the tokens behind it, and the row of the full cache."""
        self.args, self.loaded, self.tokens, self.command = args, loaded, tokens, command
        self._first = first
        self._tokenizer = loaded.require_tokenizer()
        self._models = {str(loaded.model.config.attention.num_kv_heads): loaded.model}
        # Compiled, by model:
        self._functions: dict[str, TextFunctions] = {}
        self._comparisons: dict[str, Comparison] = {}
        self._steps: dict[str, Any] = {}
        self._full: Reading | None = None
        behind = self._tokenizer.decode(tokens[args.context + 1 :])
        self._num_bytes = len(behind.encode())

    def row(self, setup: Setup) -> dict[str, Any]:
        """The results of a row: what its folder has, or measured now."""
        folder = self.args.out / setup.folder(self.loaded.name, self.args.context)
        config = asdict(setup) | {
            "model": self.loaded.name,
            "context": self.args.context,
            "tokens": self.args.tokens,
            "skip": self.args.skip,
            "text": str(self.args.text),
            "tasks": self.args.tasks,
            "lengths": self.args.lengths,
            "samples": self.args.samples,
            "seed": self.args.seed,
        }
        found = measured(folder / "metrics.json", config)
        if found is not None:
            return found
        metrics: dict[str, Any] = {"config": config, "command": self.command}
        metrics |= {"ratio": setup.ratio(self.args.context), "date": time.strftime("%Y-%m-%d")}
        predictions: list[dict[str, Any]] = []
        try:
            metrics |= self._text(setup)
            if self.args.tasks:
                predictions, cost = self._serve(setup)
                metrics |= cost | {"tasks": scores(predictions)}
        except ValueError as error:  # formats and methods name the pairs that do not go together
            metrics["refused"] = str(error)
        write_row(folder, config, predictions, metrics)
        return metrics

    def _model(self, heads: str) -> Any:
        if heads not in self._models:
            if heads.isdigit():
                self._models[heads] = with_kv_heads(self.loaded.model, int(heads))
            else:
                from models.loading import load_model

                dtype = console.DTYPES[self.args.dtype]
                self._models[heads] = load_model(heads, dtype).model
        return self._models[heads]

    def _text(self, setup: Setup) -> dict[str, Any]:
        """Distances on the text, and bytes."""
        context = self.args.context
        own = self._reading(setup)
        if self._full is None:  # not by this row where the run goes on from an earlier one
            self._full = own if setup == self._first else self._reading(self._first)
        if setup.heads not in self._comparisons:
            models = self._model(setup.heads), self._model(self._first.heads)
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
        context, model = self.args.context, self._model(setup.heads)
        if setup.heads not in self._functions:
            self._functions[setup.heads] = TextFunctions(model)
        functions = self._functions[setup.heads]
        formats = choose_formats(setup.kv_format, model.layers)
        setting = Setting(formats=formats, compression=setup.compression(context))
        size = setup.page_size
        return read(functions, self.tokens, setting, page_size=size, context=context, chunk=256)

    def _serve(self, setup: Setup) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Answers to the tasks, and what steps take."""
        predictions, cost = [], {}
        for length in self.args.lengths:
            engine = Engine(
                self._model(setup.heads),
                EngineConfig(
                    max_sequences=1,
                    token_budget=64,  # one shape of prefill: compiling takes most of a row's time
                    page_size=setup.page_size,
                    max_length=min(2 * length + 256, self.loaded.model.max_positions),
                    kv_format=setup.kv_format,
                    compression=setup.compression(length),
                ),
                steps=self._steps.get(setup.heads),
            )
            self._steps[setup.heads] = engine.steps
            for sample, depth, seed in self._samples(length):
                output = self._answer(engine, sample, setup)
                predictions.append(
                    {
                        "task": sample.task,
                        "length": length,
                        "depth": depth,
                        "seed": seed,
                        "answer": "|".join(sample.answers),
                        "predicted_answer": output,
                        "score": sample.score(output),
                    }
                )
            cost = self._times(engine, length, setup)
        return predictions, cost

    def _samples(self, length: int) -> Iterator[tuple[Sample, float, int]]:
        def count(text: str) -> int:
            return len(self._tokenizer.encode(text))

        for task, depth, i in product(self.args.tasks, DEPTHS, range(self.args.samples)):
            seed = self.args.seed + i
            yield make_sample(task, length, depth, seed, count), depth, seed

    def _answer(self, engine: Engine, sample: Sample, setup: Setup) -> str:
        context = self._tokenizer.encode(sample.context)
        question = self._tokenizer.encode(sample.question, add_special_tokens=False)
        drops = setup.method not in (NONE, *WINDOWS)
        request = Request(
            prompt=tuple(context + question),
            max_new_tokens=ANSWER_TOKENS * len(sample.answers),
            context=len(context) if drops else None,
        )
        (completion,) = engine.generate([request])
        return self._tokenizer.decode(completion.tokens)

    def _times(self, engine: Engine, length: int, setup: Setup) -> dict[str, Any]:
        """Seconds of a prefill, and milliseconds of a decode step at a quarter and all of a length.

        The steps are compiled: the engine has answered questions.
        """
        steps = {}
        seconds = 0.0
        for n in (length // 4, length):
            before = replace(engine.metrics)
            prompt = tuple(islice(cycle(self.tokens), n))
            salt = f"{n} tokens"  # nothing of it is cached
            engine.generate([Request(prompt=prompt, max_new_tokens=STEPS, cache_salt=salt)])
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


def scores(predictions: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Mean and standard error of each task, in percent, in all and by depth."""
    found = {}
    for task in dict.fromkeys(row["task"] for row in predictions):
        own = [100 * row["score"] for row in predictions if row["task"] == task]
        depths = {
            str(depth): mean(
                100 * row["score"]
                for row in predictions
                if (row["task"], row["depth"]) == (task, depth)
            )
            for depth in DEPTHS
        }
        error = stdev(own) / math.sqrt(len(own)) if len(own) > 1 else 0.0
        found[task] = {"string_match": mean(own), "stderr": error, "n": len(own), "depths": depths}
    return found


def measured(file: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """A row's results by the same configuration; None where there are none, or they are torn."""
    try:
        found = json.loads(file.read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("config") == config else None


def write_row(
    folder: Path, config: dict[str, Any], predictions: list[dict[str, Any]], metrics: dict[str, Any]
) -> None:
    """Writes a row's folder; metrics.json comes last, and whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{name}: {json.dumps(value)}" for name, value in config.items()]
    (folder / "config.yaml").write_text("\n".join(lines) + "\n", "utf-8")
    with (folder / "predictions.csv").open("w", newline="", encoding="utf-8") as file:
        if predictions:
            writer = csv.DictWriter(file, fieldnames=list(predictions[0]))
            writer.writeheader()
            writer.writerows(predictions)
    new = folder / "metrics.json.new"
    new.write_text(json.dumps(metrics, indent=1) + "\n", "utf-8")
    os.replace(new, folder / "metrics.json")
