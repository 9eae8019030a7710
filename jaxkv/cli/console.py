"""What all commands share: typed options, one line per user error, progress bars, the model.

Nothing here imports jax before it is needed, so that `--help` and the ledger's commands start fast.
"""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

from tqdm import tqdm

from jaxkv.errors import JaxkvError
from jaxkv.printable import printable

if TYPE_CHECKING:
    from jaxkv.models.loading import LoadedModel

DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class Parser(argparse.ArgumentParser):
    """An argument parser that prints an error as one line and reads options into a dataclass.

    Args:
      program: what the user types, such as `jaxkv decode`.
      description: the docstring of the command; the help shows it as it is written.
    """

    def __init__(self, program: str, description: str | None):
        super().__init__(
            prog=program,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        line = printable(f"{self.prog}: {message} (--help lists the arguments)")
        self.exit(EXIT_USER_ERROR, f"{line}\n")

    def read[T](self, options: type[T], argv: Sequence[str]) -> T:
        """Parses the command line into a dataclass.

        Args:
          options: a dataclass whose fields are named like the arguments. A field whose type is a
            dataclass is a group of arguments.
          argv: the command line after the command's name.
        """
        return filled(options, vars(self.parse_args(argv)))

    def require_at_least(self, options: object, **least: float) -> None:
        """Ends the run if an option, given by the name of its field, is below its least value."""
        for name, value in least.items():
            if getattr(options, name) < value:
                self.error(f"--{name.replace('_', '-')} must be at least {value}")


def filled(options: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass whose fields are taken from `values`; see `Parser.read`."""
    types = get_type_hints(options)
    return options(
        **{
            field.name: filled(kind, values) if is_dataclass(kind) else values[field.name]
            for field in fields(options)
            for kind in (types[field.name],)
        }
    )


def run(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """Returns the exit code of `main(argv)`. An error of the user is one line on stderr and code 2.

    Such errors are JaxkvError and files that cannot be opened. Any other exception is a bug and
    passes with its traceback. Ctrl-C returns 130. An output that was closed at the start (`>&-`) is
    treated as the null device.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if any("\0" in argument for argument in argv):
        return _complain("an argument contains a NUL character", EXIT_USER_ERROR)
    try:
        code = main(argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _complain("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The buffered rest has no reader either; without this, Python complains when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _complain("stopped: the reader of the output has gone", EXIT_USER_ERROR)
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"{where}{error.strerror}", EXIT_USER_ERROR)
    except JaxkvError as error:
        return _complain(str(error), EXIT_USER_ERROR)


def _complain(line: str, code: int) -> int:
    print(printable(line), file=sys.stderr)
    return code


def progress(total: int, *, unit: str, description: str) -> tqdm:
    """Returns a progress bar: `update(n)` moves it, `with` closes it.

    It is on stderr, and shows nothing if that is not a terminal.
    """
    return tqdm(total=total, unit=unit, desc=description, disable=None)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model a command loads.

    Attributes:
      model: a name or a path, as `jaxkv.models.loading.load_model` takes it.
      dtype: type of the weight matrices, a key of DTYPES.
    """

    model: str
    dtype: str


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `ModelOptions`."""
    parser.add_argument(
        "--model",
        default="smollm2-135m",
        metavar="M",
        help="smollm2-135m (the default) or gemma3-270m, which are downloaded once; a Hugging Face "
        "directory; a .gguf file; or a directory that `jaxkv convert` wrote",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="f32", help="type of the weights (default: %(default)s)"
    )


def load_model(options: ModelOptions) -> "LoadedModel":
    """Loads the model under a progress bar.

    Raises:
      ModelError: there is no such model, or it cannot be used.
    """
    # Imported late, for the commands that load no model.
    from jaxkv.models.loading import load_model, loading_bar

    with loading_bar() as show:
        return load_model(options.model, DTYPES[options.dtype], progress=show)


def format_bytes(num_bytes: float) -> str:
    """Returns a size in powers of 1,024, such as `12.3 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def enable_compilation_cache() -> None:
    """Makes JAX keep compiled programs in the user's cache folder, for the next process.

    It changes JAX's configuration, so a command calls it before anything is compiled. The folder is
    $JAX_COMPILATION_CACHE_DIR if the user has set it.
    """
    import jax

    from jaxkv.models.pretrained import cache_dir

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "compiled"))
    # By default JAX keeps only what took over a second; many small programs add up to more.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
