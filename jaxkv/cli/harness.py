"""Runs tasks of lm-evaluation-harness over the engine, in any KV format and under any method.

    pip install 'jaxkv[eval]'
    jaxkv harness --tasks my_task --include-path tasks --kv-format int8
    jaxkv harness --tasks my_task --include-path tasks --method snapkv --budget 50%

A task is a name that the harness knows, or one of a YAML file in --include-path; with
`dataset_path: json` and `data_files` a task needs no network. The table that the harness makes of
its results goes to standard output, all of them to --out as JSON.
"""

import argparse
import importlib
import importlib.util
import json
from pathlib import Path

from jaxkv.cli import console
from jaxkv.cli.arguments.serving import (
    add_compression_arguments,
    add_format_arguments,
    compression,
    kv_ranges,
    page_size,
)
from jaxkv.engine import RequestError


def parse(argv: list[str]) -> argparse.Namespace:
    """Returns the arguments."""
    parser = console.Parser("jaxkv harness", __doc__)
    parser.add_argument("--model", default="smollm2-135m", metavar="M", help="as of `decode`")
    parser.add_argument("--tasks", nargs="+", required=True, metavar="NAME")
    parser.add_argument("--include-path", type=Path, metavar="DIR", help="with tasks as YAML")
    add_format_arguments(parser)
    add_compression_arguments(parser)
    add = parser.add_argument
    add("--batch", type=int, default=8, metavar="B", help="sequences in a step (default: 8)")
    add("--max-length", type=int, metavar="N", help="tokens, answer included (the model's)")
    add("--num-fewshot", type=int, metavar="N", help="examples before each question (the task's)")
    add("--limit", type=int, metavar="N", help="documents a task (default: all)")
    add("--out", type=Path, metavar="FILE", help="all results as JSON")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    args = parse(argv)
    compression(args)  # its mistakes, before anything is loaded
    if args.include_path is not None and not args.include_path.is_dir():
        raise RequestError(f"{args.include_path}: is no directory")
    if importlib.util.find_spec("lm_eval") is None:
        raise RequestError("lm-evaluation-harness is not installed: pip install 'jaxkv[eval]'")
    console.enable_compilation_cache()
    # Imported late: they take seconds, and are there with the extra alone.
    lm_eval, its_tasks, utils = map(
        importlib.import_module, ("lm_eval", "lm_eval.tasks", "lm_eval.utils")
    )
    from jaxkv.models.lm_eval_model import JaxkvLM

    path = None if args.include_path is None else str(args.include_path)
    tasks = its_tasks.TaskManager(include_path=path)
    unknown = [name for name in args.tasks if name not in tasks.all_tasks]
    if unknown:
        raise RequestError(f"--tasks: the harness knows no {', '.join(unknown)}")
    try:
        lm = JaxkvLM(
            model=args.model,
            kv_format=args.kv_format,
            method=args.method,
            budget=args.budget,
            interval=args.interval,
            max_length=args.max_length,
            batch_size=args.batch,
            page_size=page_size(args),
            kv_ranges=kv_ranges(args),
        )
    except ValueError as error:
        raise RequestError(str(error)) from None
    results = lm_eval.simple_evaluate(
        lm,
        tasks=args.tasks,
        task_manager=tasks,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        bootstrap_iters=1000,
    )
    print(utils.make_table(results))
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1, default=str) + "\n", "utf-8")
    return 0
