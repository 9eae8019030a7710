"""Measures the ranges of a model's K and V on text, for KV formats with static scales.

    jaxkv calibrate --text novel.txt --out ranges.json
    jaxkv decode --kv-format fp8_e4m3_static --kv-ranges ranges.json "Once upon a time"

The first --tokens tokens of the text are computed once, in float32. What is written is the largest
magnitude of K and of V for each layer and KV head (JSON), which becomes the largest code of a
static format; what is larger later is clipped. Use text like that which is to be served.
"""

from pathlib import Path

from jaxkv.cli import console
from jaxkv.cli.arguments.serving import read_text
from jaxkv.eval import kv_ranges
from jaxkv.models.errors import ModelError


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = console.Parser("jaxkv calibrate", __doc__)
    console.add_model_arguments(parser)
    add = parser.add_argument
    add("--text", type=Path, required=True, metavar="PATH", help="UTF-8 text")
    add("--tokens", type=int, default=2048, metavar="N", help="(default: %(default)s)")
    add("--out", type=Path, required=True, metavar="PATH", help="the file to write")
    args = parser.parse_args(argv)
    if args.tokens < 1:
        parser.error("--tokens must be at least 1")
    if not args.out.parent.is_dir():
        raise ModelError(f"{args.out.parent}: no such folder")
    if args.out.is_dir():
        raise ModelError(f"{args.out}: is a folder; name the file to write")
    text = read_text(args.text)
    console.enable_compilation_cache()
    loaded = console.load_model(args)
    tokens = loaded.require_tokenizer().encode(text)[: args.tokens]
    with console.progress(len(tokens), unit="token", description="calibrating") as bar:
        try:
            ranges = kv_ranges(loaded.model, tokens, on_chunk=bar.update)
        except ValueError as error:
            raise ModelError(f"{args.text}: {error}") from None
    ranges.save(args.out)
    print(f"{args.out}: ranges {ranges.id} of {len(ranges.largest)} layers, {len(tokens)} tokens")
    return 0
