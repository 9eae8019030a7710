"""What the mains that serve a model share: options of sampling, prompts of a file, the engine.

Not a command. Apart from `console`, which every main has, because this imports jax.
"""

import argparse
from pathlib import Path

import jax

from jaxkv.attention import BACKEND_NAMES
from jaxkv.cache import FORMATS, STATIC, KVRanges, preferred_page_size
from jaxkv.compress import METHODS, Budget, Compression
from jaxkv.engine import Engine, EngineConfig, RequestError, SamplingParams
from jaxkv.engine.request import DetokenizerFactory
from jaxkv.engine.step import StepFunctions
from jaxkv.models.errors import ModelError
from jaxkv.models.loading import LoadedModel
from pallas_kernels.attention.api import BACKENDS


def add_sampling_arguments(parser: argparse.ArgumentParser, drawn: str) -> None:
    """Adds the options that `sampling_params` reads; `drawn` is what is drawn with seed + i."""
    group = parser.add_argument_group("sampling (greedy unless --temperature is above 0)")
    add = group.add_argument
    add("--temperature", type=float, default=0.0)
    add("--top-k", type=int, default=0, metavar="K", help="0 keeps all")
    add("--top-p", type=float, default=1.0, metavar="P")
    add("--min-p", type=float, default=0.0, metavar="P")
    add("--repetition-penalty", type=float, default=1.0, metavar="X")
    add("--seed", type=int, default=0, help=f"{drawn} i draws with seed + i")


def add_backend_argument(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds `--backend`, of those that run on this platform."""
    here = jax.default_backend()

    def backend(name: str) -> str:
        platforms = next((one.platforms for one in BACKENDS if one.name == name), None)
        if platforms is None:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(BACKEND_NAMES)}")
        if platforms and here not in platforms:
            raise argparse.ArgumentTypeError(f"{name} is for {' and '.join(platforms)}, not {here}")
        return name

    parser.add_argument(
        "--backend",
        type=backend,
        metavar="NAME",
        help=f"of attention: {', '.join(BACKEND_NAMES)} (default: the platform's best)",
    )


def add_format_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds the options that say how K and V are stored."""
    parser.add_argument(
        "--kv-format",
        default="f32",
        metavar="F",
        help=f"how K and V are stored: {', '.join((*FORMATS, *STATIC))}; for some layers otherwise "
        "by kivi4,window=bf16,0=int8 (default: %(default)s)",
    )
    parser.add_argument(
        "--page-size",
        type=int,
        metavar="P",
        help="tokens a page (default: 16, with kivi formats 32)",
    )
    parser.add_argument(
        "--kv-ranges",
        type=Path,
        metavar="PATH",
        help="what `calibrate` measured, for the formats with static scales",
    )


def add_compression_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds the options that `compression` reads."""
    parser.add_argument(
        "--method",
        metavar="NAME",
        help=f"drop tokens: {', '.join(METHODS)} (default: none are)",
    )
    parser.add_argument(
        "--budget",
        metavar="N",
        help="tokens that --method keeps: a number, or a part of the prompt as 0.5 or 50%% "
        "(1 is one token, 1.0 all)",
    )
    parser.add_argument(
        "--interval",
        type=int,
        metavar="N",
        help="drop again after every N tokens of the answer (default: once, behind the prompt)",
    )


def compression(args: argparse.Namespace) -> Compression | None:
    """Which tokens are dropped, as asked for.

    Raises:
      RequestError: there is no such method, or it does not take what it was given.
    """
    if args.method is None:
        if args.budget is not None or args.interval is not None:
            raise RequestError("--budget and --interval say how --method drops tokens: name one")
        return None
    if args.budget is None:
        raise RequestError("--method needs a --budget: how many tokens it keeps")
    try:
        budget = Budget.parse(args.budget)
        return Compression(method=args.method, budget=budget, interval=args.interval)
    except ValueError as error:
        raise RequestError(str(error)) from None


def page_size(args: argparse.Namespace) -> int:
    """Tokens a page: as asked for, or what suits the formats.

    Raises:
      RequestError: there is no such format.
    """
    try:
        if args.page_size is None:
            return preferred_page_size(args.kv_format)
    except ValueError as error:
        raise RequestError(str(error)) from None
    return args.page_size


def kv_ranges(args: argparse.Namespace) -> KVRanges | None:
    """The measured ranges of the command line.

    Raises:
      ModelError: the file cannot be read, or is none of ranges.
    """
    if args.kv_ranges is None:
        return None
    try:
        return KVRanges.load(args.kv_ranges)
    except (OSError, ValueError) as error:
        raise ModelError(str(error)) from None


def sampling_params(args: argparse.Namespace, index: int) -> SamplingParams:
    """How the `index`-th of a command's prompts or turns draws its tokens."""
    return SamplingParams(
        repetition_penalty=args.repetition_penalty,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed + index,
    )


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
      ModelError: it is empty, or not UTF-8.
    """
    text = _decoded(path.read_bytes(), str(path))
    if not text:
        raise ModelError(f"{path}: is empty")
    return text


def prompt_lines(data: bytes, name: str) -> list[str]:
    """The prompts of a file or stream, a line each; blank lines are left out.

    Raises:
      ModelError: there is none, or the text is not UTF-8.
    """
    prompts = [line for line in _decoded(data, name).splitlines() if line.strip()]
    if not prompts:
        raise ModelError(f"{name}: has no prompt")
    return prompts


def check_config(config: EngineConfig) -> None:
    """Raises RequestError where a value cannot be used, before any model is loaded."""
    try:
        config.check()
    except ValueError as error:
        raise RequestError(str(error)) from None


def make_engine(
    loaded: LoadedModel,
    config: EngineConfig,
    detokenizer: DetokenizerFactory | None = None,
    steps: StepFunctions | None = None,
) -> Engine:
    """An engine for a model, with the compiled steps of another one where there is one.

    Raises:
      RequestError: its cache does not fit into memory, or its formats do not fit the model.
    """
    try:
        return Engine(loaded.model, config, detokenizer=detokenizer, steps=steps)
    except ValueError as error:
        raise RequestError(str(error)) from None
    except jax.errors.JaxRuntimeError as error:
        raise RequestError(f"a cache of {config.pool_tokens} tokens: {error}") from None


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{name}: not UTF-8 text, at byte {error.start}") from None
