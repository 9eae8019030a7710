"""Options that the commands of the ledger and the simulators share: models, sizes and lists.

Unlike `serving`, this module does not import jax.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxkv.errors import JaxkvError, UsageError
from jaxkv.ledger import LedgerError, Model, load_config, preset

UNITS = ("GiB", "GB", "MiB", "MB", "TiB", "TB")


def argument[T](read: Callable[[str], T]) -> Callable[[str], T]:
    """A type for argparse from a function that raises JaxkvError."""

    def parse(text: str) -> T:
        try:
            return read(text)
        except JaxkvError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def listed[T](read: Callable[[str], T]) -> Callable[[str], list[T]]:
    """A type for argparse: values with commas between them."""

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


@dataclass(frozen=True, kw_only=True)
class LedgerModelOptions:
    """Which models are counted.

    Attributes:
      model: names of presets with commas between them; None takes the command's default.
      config: a config.json or its folder; None without one.
    """

    model: str | None
    config: Path | None

    def models(self, default: str) -> list[Model]:
        """The models that are asked for.

        Raises:
          LedgerError: there is no such preset, or the config cannot be read.
        """
        found = [load_config(self.config)] if self.config is not None else []
        names = ("" if found else default) if self.model is None else self.model
        found += [preset(name.strip()) for name in names.split(",") if name.strip()]
        if not found:
            raise LedgerError(f"--model {names!r} names no model")
        return found

    def one(self, default: str) -> Model:
        """The one model that is asked for.

        Raises:
          UsageError: there are several.
          LedgerError: as `models` raises it.
        """
        found = self.models(default)
        if len(found) != 1:
            raise UsageError("give one model, with --model or with --config")
        return found[0]


def add_model_arguments(parser: argparse.ArgumentParser, default: str, *, several: bool) -> None:
    """Adds the arguments of `LedgerModelOptions`."""
    many = ", or several with commas between them" if several else ""
    parser.add_argument(
        "--model",
        metavar="M",
        help=f"a preset{many} (default: {default}); `jaxkv ledger --models` lists them",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="PATH",
        help="a Hugging Face config.json or its folder, instead of a preset",
    )


def notes(models: Sequence[Model], longest: int) -> Iterator[str]:
    """What was assumed about the models, and which are used at a length they were not made for."""
    for model in models:
        yield from (f"{model.name}: {note}" for note in model.notes)
        if model.max_context is not None and longest > model.max_context:
            yield f"{model.name}: was made for at most {model.max_context:,} tokens"
