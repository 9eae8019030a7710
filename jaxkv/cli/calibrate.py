"""Measure the ranges of a model's K and V on a text, for KV formats with static scales.

    jaxkv calibrate --text novel.txt --out ranges.json
    jaxkv decode --kv-format fp8_e4m3_static --kv-ranges ranges.json "Once upon a time"

The first --tokens tokens of the text are computed once, in float32. The file that is written (JSON)
has the largest magnitude of K and of V for each layer and KV head. A static format represents this
magnitude by its largest code, and clips larger values. Use a text like those that you will serve.
"""

from dataclasses import dataclass
from pathlib import Path

from jaxkv.cli import console
from jaxkv.cli.arguments.serving import read_text
from jaxkv.errors import UsageError
from jaxkv.eval import kv_ranges


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """The command line."""

    model: console.ModelOptions
    text: Path
    tokens: int
    out: Path


def parse(argv: list[str]) -> CalibrateOptions:
    """Reads the command line."""
    parser = console.Parser("jaxkv calibrate", __doc__)
    console.add_model_arguments(parser)
    add = parser.add_argument
    add("--text", type=Path, required=True, metavar="PATH", help="UTF-8 text")
    add(
        "--tokens",
        type=int,
        default=2048,
        metavar="N",
        help="tokens of it to use (default: %(default)s)",
    )
    add("--out", type=Path, required=True, metavar="PATH", help="the file to write")
    options = parser.read(CalibrateOptions, argv)
    parser.require_at_least(options, tokens=1)
    if not options.out.parent.is_dir():
        raise UsageError(f"{options.out.parent}: no such folder")
    if options.out.is_dir():
        raise UsageError(f"{options.out}: is a folder; name the file to write")
    return options


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    options = parse(argv)
    text = read_text(options.text)
    console.enable_compilation_cache()
    loaded = console.load_model(options.model)
    tokens = loaded.require_tokenizer().encode(text)[: options.tokens]
    with console.progress(len(tokens), unit="token", description="calibrating") as bar:
        try:
            ranges = kv_ranges(loaded.model, tokens, on_chunk=bar.update)
        except ValueError as error:
            raise UsageError(f"{options.text}: {error}") from None
    ranges.save(options.out)
    layers = len(ranges.largest)
    print(f"{options.out}: ranges {ranges.id} of {layers} layers, {len(tokens)} tokens")
    return 0
