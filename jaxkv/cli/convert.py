"""Writes a model as an Orbax checkpoint, which every --model takes in its turn.

    jaxkv convert --model smollm2-135m --out smollm2
    jaxkv convert --model smollm2-135m --out smollm2-bf16 --dtype bf16
    jaxkv decode --model smollm2-bf16 --dtype bf16 "Once upon a time"

The directory holds the parameters (`params/`, one Orbax entry each), the config (`jaxkv.json`)
and the tokenizer. Values are written in --dtype, so that reading them back in it returns every
bit. It must be new or empty, and appears whole or not at all.
"""

from pathlib import Path

from jaxkv.cli import console


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = console.Parser("jaxkv convert", __doc__)
    console.add_model_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new directory")
    arguments = parser.parse_args(argv)

    from jaxkv.models.orbax_checkpoint import check_target, save_checkpoint

    check_target(arguments.out)  # before minutes of loading
    loaded = console.load_model(arguments)
    save_checkpoint(arguments.out, loaded)
    size = sum(file.stat().st_size for file in arguments.out.rglob("*") if file.is_file())
    print(f"{arguments.out}: {arguments.model} in {arguments.dtype}, {console.format_bytes(size)}")
    return 0
