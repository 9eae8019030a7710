"""What the mains of the ledger and the simulators share: models, sizes and lists as arguments.

Not a command. Unlike `serving` it imports no jax.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxkv.ledger import LedgerError, Model, load_config, preset

UNITS = ("GiB", "GB", "MiB", "MB", "TiB", "TB")


def argument[T](read: Callable[[str], T]) -> Callable[[str], T]:
    """A type of argparse from a function that raises a ValueError which says what is wrong."""

    def parse(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def listed[T](read: Callable[[str], T]) -> Callable[[str], list[T]]:
    """A type of argparse: values with commas between them."""

    def parse(text: str) -> list[T]:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts:
            raise LedgerError(f"{text!r} has no value")
        return [read(part) for part in parts]

    return argument(parse)


def count(text: str) -> int:
    """A whole number of at least 1, at most a billion.

    Raises:
      LedgerError: it is none.
    """
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:12]) <= 10**9):
        raise LedgerError(f"{text!r} must be a whole number of at least 1, at most 1000000000")
    return int(text)


def add_model_arguments(parser: argparse.ArgumentParser, default: str, *, several: bool) -> None:
    """Adds `--model` and `--config`, of which `models` makes models."""
    many = ", or several with commas between them" if several else ""
    parser.add_argument(
        "--model",
        metavar="M",
        help=f"a preset{many} (default: {default}); `ledger --models` lists them",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="PATH",
        help="a Hugging Face config.json, or its folder, in place of a preset",
    )


def models(args: argparse.Namespace, default: str) -> list[Model]:
    """The models that are asked for.

    Raises:
      LedgerError: there is no such preset, or the config cannot be read.
    """
    found = [load_config(args.config)] if args.config is not None else []
    names = ("" if found else default) if args.model is None else args.model
    found += [preset(name.strip()) for name in names.split(",") if name.strip()]
    if not found:
        raise LedgerError(f"--model {names!r} names no model")
    return found


def notes(models: Sequence[Model], longest: int) -> Iterator[str]:
    """What was assumed of the models, and which are longer here than they were made for."""
    for model in models:
        yield from (f"{model.name}: {note}" for note in model.notes)
        if model.max_context is not None and longest > model.max_context:
            yield f"{model.name}: was made for {model.max_context:,} tokens, and not for more"


def one_model(parser: argparse.ArgumentParser, args: argparse.Namespace, default: str) -> Model:
    """The one model that is asked for; several end the run."""
    found = models(args, default)
    if len(found) != 1:
        parser.error("give one model, with --model or with --config")
    return found[0]
