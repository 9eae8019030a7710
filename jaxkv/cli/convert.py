"""Write a model as an Orbax checkpoint, which every --model accepts.

    jaxkv convert --model smollm2-135m --out smollm2
    jaxkv convert --model smollm2-135m --out smollm2-bf16 --dtype bf16
    jaxkv decode --model smollm2-bf16 --dtype bf16 "Once upon a time"

The directory holds the parameters (`params/`, one Orbax entry each), the config (`jaxkv.json`)
and the tokenizer. Values are stored in --dtype; reading them back in the same type returns every
bit. The directory must be new or empty, and appears whole or not at all.
"""

from dataclasses import dataclass
from pathlib import Path

from jaxkv.cli import console


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """The command line."""

    model: console.ModelOptions
    out: Path


def parse(argv: list[str]) -> ConvertOptions:
    """Reads the command line."""
    parser = console.Parser("jaxkv convert", __doc__)
    console.add_model_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new directory")
    return parser.read(ConvertOptions, argv)


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    options = parse(argv)

    from jaxkv.models.orbax_checkpoint import check_target, save_checkpoint

    check_target(options.out)  # before minutes of loading
    save_checkpoint(options.out, console.load_model(options.model))
    size = sum(file.stat().st_size for file in options.out.rglob("*") if file.is_file())
    chosen = options.model
    print(f"{options.out}: {chosen.model} in {chosen.dtype}, {console.format_bytes(size)}")
    return 0
