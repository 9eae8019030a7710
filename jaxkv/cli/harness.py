"""Run tasks of lm-evaluation-harness on the engine, in any KV format and with any method.

    pip install 'jaxkv[eval]'
    jaxkv harness --tasks my_task --include-path tasks --kv-format int8
    jaxkv harness --tasks my_task --include-path tasks --method snapkv --budget 50%

A task is a name that the harness knows, or the name in a YAML file in --include-path. A task with
`dataset_path: json` and `data_files` needs no network. The harness's table of results goes to
standard output, and all results to --out as JSON.
"""

import importlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxkv.cli import console
from jaxkv.cli.arguments.serving import (
    CompressionOptions,
    FormatOptions,
    add_compression_arguments,
    add_format_arguments,
)
from jaxkv.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class HarnessOptions:
    """The command line."""

    model: str
    tasks: list[str]
    include_path: Path | None
    formats: FormatOptions
    dropping: CompressionOptions
    batch: int
    max_length: int | None
    num_fewshot: int | None
    limit: int | None
    out: Path | None


def parse(argv: list[str]) -> HarnessOptions:
    """Reads the command line."""
    parser = console.Parser("jaxkv harness", __doc__)
    add = parser.add_argument
    add("--model", default="smollm2-135m", metavar="M", help="a model, as `jaxkv decode` takes it")
    add("--tasks", nargs="+", required=True, metavar="NAME", help="tasks to run")
    add("--include-path", type=Path, metavar="DIR", help="a folder with tasks as YAML files")
    add_format_arguments(parser)
    add_compression_arguments(parser)
    add("--batch", type=int, default=8, metavar="B", help="sequences per step (default: 8)")
    add(
        "--max-length",
        type=int,
        metavar="N",
        help="most tokens of a prompt with its answer (default: the model's limit)",
    )
    add(
        "--num-fewshot",
        type=int,
        metavar="N",
        help="examples before each question (default: the task's)",
    )
    add("--limit", type=int, metavar="N", help="documents per task (default: all)")
    add("--out", type=Path, metavar="FILE", help="write all results as JSON")
    return parser.read(HarnessOptions, argv)


def check(options: HarnessOptions) -> None:
    """Raises UsageError for what cannot work, before anything is loaded."""
    options.dropping.compression()
    if options.include_path is not None and not options.include_path.is_dir():
        raise UsageError(f"{options.include_path}: is no directory")
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError("lm-evaluation-harness is not installed: pip install 'jaxkv[eval]'")


def evaluate(options: HarnessOptions) -> tuple[str, Any]:
    """Runs the tasks; returns the harness's table, and all results.

    Raises:
      UsageError: the harness does not know a task, or an option does not suit the model.
    """
    # Imported late: they take seconds to load, and come with the extra `eval` only.
    lm_eval, its_tasks, utils = map(
        importlib.import_module, ("lm_eval", "lm_eval.tasks", "lm_eval.utils")
    )
    from jaxkv.models.lm_eval_model import JaxkvLM

    path = None if options.include_path is None else str(options.include_path)
    tasks = its_tasks.TaskManager(include_path=path)
    unknown = [name for name in options.tasks if name not in tasks.all_tasks]
    if unknown:
        raise UsageError(f"--tasks: the harness does not know {', '.join(unknown)}")
    try:
        lm = JaxkvLM(
            model=options.model,
            kv_format=options.formats.kv_format,
            method=options.dropping.method,
            budget=options.dropping.budget,
            interval=options.dropping.interval,
            max_length=options.max_length,
            batch_size=options.batch,
            page_size=options.formats.tokens_per_page(),
            kv_ranges=options.formats.ranges(),
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    results = lm_eval.simple_evaluate(
        lm,
        tasks=options.tasks,
        task_manager=tasks,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        bootstrap_iters=1000,
    )
    return utils.make_table(results), results


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    options = parse(argv)
    check(options)
    console.enable_compilation_cache()
    table, results = evaluate(options)
    print(table)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1, default=str) + "\n", "utf-8")
    return 0
