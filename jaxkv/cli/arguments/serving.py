"""Options of the commands that serve a model: sampling, KV format, compression, backend; prompts.

Apart from `console`, which every command imports, because this module imports jax.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxkv.attention import BACKEND_NAMES
from jaxkv.cache import KVRanges
from jaxkv.compress import METHODS, Compression
from jaxkv.engine import SamplingParams
from jaxkv.errors import UsageError
from jaxkv.kv_format import FORMATS
from jaxkv.llm import page_size_for
from pallas_kernels.attention.api import BACKENDS

Arguments = argparse.ArgumentParser | argparse._ArgumentGroup


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn; the fields are those of `SamplingParams`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int

    def params(self, index: int) -> SamplingParams:
        """The parameters of prompt or turn number `index`, which has a seed of its own."""
        return SamplingParams(
            repetition_penalty=self.repetition_penalty,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed + index,
        )


def add_sampling_arguments(parser: argparse.ArgumentParser, drawn: str) -> None:
    """Adds the arguments of `SamplingOptions`; `drawn` is "prompt" or "turn"."""
    group = parser.add_argument_group(
        "sampling (by default the most likely token is taken; --temperature above 0 draws)"
    )
    add = group.add_argument
    add("--temperature", type=float, default=0.0, help="divides the logits (default: 0)")
    add("--top-k", type=int, default=0, metavar="K", help="keep the K most likely tokens; 0: all")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="keep the most likely tokens that together have probability P; 1: all",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="keep tokens with at least P times the probability of the most likely one",
    )
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="above 1, tokens that have occurred become less likely",
    )
    add("--seed", type=int, default=0, help=f"{drawn} number i draws with seed + i")


def add_backend_argument(parser: Arguments) -> None:
    """Adds `--backend`, which accepts the backends of this platform."""
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
        help=f"of attention: {', '.join(BACKEND_NAMES)} (default: the fastest on this platform)",
    )


@dataclass(frozen=True, kw_only=True)
class FormatOptions:
    """How K and V are stored.

    Attributes:
      kv_format: a KV format, or one by layer.
      page_size: tokens per page; None takes what suits the format.
      kv_ranges: a file that `jaxkv calibrate` wrote; None without one.
    """

    kv_format: str
    page_size: int | None
    kv_ranges: Path | None

    def tokens_per_page(self) -> int:
        """The page size that was asked for, or that suits the format.

        Raises:
          UsageError: there is no such format.
        """
        return page_size_for(self.kv_format) if self.page_size is None else self.page_size

    def ranges(self) -> KVRanges | None:
        """The measured ranges.

        Raises:
          UsageError: the file cannot be read, or holds no ranges.
        """
        return read_ranges(self.kv_ranges)


def add_format_arguments(parser: Arguments) -> None:
    """Adds the arguments of `FormatOptions`."""
    parser.add_argument(
        "--kv-format",
        default="f32",
        metavar="F",
        help=f"how K and V are stored: {', '.join(FORMATS)}; kivi4,window=bf16,0=int8 "
        "means kivi4 but bf16 in layers with a window and int8 in layer 0 (default: %(default)s)",
    )
    parser.add_argument(
        "--page-size",
        type=int,
        metavar="P",
        help="tokens per page (default: 16; for kivi formats 32)",
    )
    parser.add_argument(
        "--kv-ranges",
        type=Path,
        metavar="PATH",
        help="a file that `jaxkv calibrate` wrote; formats with static scales need it",
    )


@dataclass(frozen=True, kw_only=True)
class CompressionOptions:
    """Which tokens are dropped from the cache.

    Attributes:
      method: a name of METHODS; None keeps all tokens.
      budget: tokens to keep, a number or a part, as text.
      interval: drop again after so many tokens of the answer; None drops once.
    """

    method: str | None
    budget: str | None
    interval: int | None

    def compression(self) -> Compression | None:
        """The compression that was asked for; None keeps all tokens.

        Raises:
          UsageError: there is no such method, or it does not take this budget or interval.
        """
        if self.method is None:
            if self.budget is not None or self.interval is not None:
                raise UsageError("--budget and --interval need a --method that drops tokens")
            return None
        if self.budget is None:
            raise UsageError("--method needs a --budget: how many tokens it keeps")
        try:
            return Compression(method=self.method, budget=self.budget, interval=self.interval)
        except ValueError as error:
            raise UsageError(str(error)) from None


def add_compression_arguments(parser: Arguments) -> None:
    """Adds the arguments of `CompressionOptions`."""
    parser.add_argument(
        "--method",
        metavar="NAME",
        help=f"drop tokens from the cache: {', '.join(METHODS)} (default: keep all)",
    )
    parser.add_argument(
        "--budget",
        metavar="N",
        help="tokens that --method keeps: a number, or a part of the prompt such as 0.5 or 50%% "
        "(1 is one token, 1.0 is all)",
    )
    parser.add_argument(
        "--interval",
        type=int,
        metavar="N",
        help="drop again after every N tokens of the answer (default: once, after the prompt)",
    )


def read_ranges(path: Path | None) -> KVRanges | None:
    """Ranges that `jaxkv calibrate` wrote; None without a path.

    Raises:
      UsageError: the file cannot be read, or holds no ranges.
    """
    if path is None:
        return None
    try:
        return KVRanges.load(path)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
      UsageError: it is empty, or not UTF-8.
    """
    text = _decoded(path.read_bytes(), str(path))
    if not text:
        raise UsageError(f"{path}: is empty")
    return text


def prompt_lines(data: bytes, name: str) -> list[str]:
    """The prompts of a file or stream, one per line; blank lines are left out.

    Raises:
      UsageError: there is none, or the text is not UTF-8.
    """
    prompts = [line for line in _decoded(data, name).splitlines() if line.strip()]
    if not prompts:
        raise UsageError(f"{name}: has no prompt")
    return prompts


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8 text, at byte {error.start}") from None
