"""What the mains share: one line for a user's mistake, progress bars, sizes, the compilation cache.

Not here: anything a library user could want; the mains are thin, and so is this.
"""

import argparse
import errno
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from tqdm import tqdm

from jaxkv.printable import printable

if TYPE_CHECKING:
    from jaxkv.models.loading import LoadedModel

DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line.

    Args:
      program: what the user types, such as `jaxkv decode`.
      description: the main's docstring; the help shows it as it is written.
    """

    def __init__(self, program: str, description: str | None):
        super().__init__(
            prog=program,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        line = printable(f"{self.prog}: {message} (--help tells the arguments)")
        self.exit(EXIT_USER_ERROR, f"{line}\n")


def run(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """Returns the exit code of `main(argv)`; a user's mistake becomes one line on stderr and 2.

    Mistakes are ModelError, RequestError, LedgerError, ReplayError, and a file that cannot be
    opened. Any other exception is a fault of ours and passes, traceback and all. Ctrl-C returns
    130. An output that was closed at the start (`>&-`) is as if it went to the null device.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if any("\0" in argument for argument in argv):
        return _complain("an argument has a NUL character in it", EXIT_USER_ERROR)
    try:
        code = main(argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _complain("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # What is still buffered has no reader either: without this, Python complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _complain("stopped: nothing reads the output any more", EXIT_USER_ERROR)
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"{where}{error.strerror}", EXIT_USER_ERROR)
    except ValueError as error:
        if not _is_mistake(error):
            raise
        return _complain(str(error), EXIT_USER_ERROR)


def _is_mistake(error: ValueError) -> bool:
    """Whether it is one of ours that says what a user did wrong."""
    # Imported late: a run without a mistake need not load them, and the last two load jax.
    from jaxkv.ledger.errors import LedgerError
    from jaxkv.replay.errors import ReplayError

    if isinstance(error, LedgerError | ReplayError):
        return True
    from jaxkv.engine.request import RequestError
    from jaxkv.models.errors import ModelError

    return isinstance(error, ModelError | RequestError)


def _complain(line: str, code: int) -> int:
    print(printable(line), file=sys.stderr)
    return code


def progress(total: int, *, unit: str, description: str, hide: bool = False) -> tqdm:
    """Returns a progress bar on stderr: `update(n)` moves it, `with` closes it.

    With `hide`, or where stderr is not a terminal, it shows nothing.
    """
    return tqdm(total=total, unit=unit, desc=description, disable=True if hide else None)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--model` and `--dtype`, which `load_model` takes."""
    parser.add_argument(
        "--model",
        default="smollm2-135m",
        metavar="M",
        help="smollm2-135m (the default), gemma3-270m, a Hugging Face directory, a .gguf file, or "
        "a directory that `convert` wrote",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="f32", help="of the weights (default: %(default)s)"
    )


def load_model(arguments: argparse.Namespace) -> "LoadedModel":
    """Loads what `--model` names in the dtype of `--dtype`, under a progress bar.

    Raises:
      ModelError: there is no such model, or it cannot be used.
    """
    # Imported late, for the sake of the mains that load nothing.
    from jaxkv.models.loading import load_model

    bars: list[tqdm] = []

    def show(done: int, total: int) -> None:
        if not bars:  # not before the download, which has a bar of its own
            bars.append(tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=None))
        bars[0].update(done - bars[0].n)

    try:
        return load_model(arguments.model, DTYPES[arguments.dtype], progress=show)
    finally:
        for bar in bars:
            bar.close()


def format_bytes(num_bytes: float) -> str:
    """Returns a size as people read it, in powers of 1,024: `12.3 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def enable_compilation_cache() -> None:
    """Makes JAX keep what it compiles in the user's cache folder, for the next process.

    Changes JAX's configuration, so a main calls it before it compiles anything. Where the user has
    set $JAX_COMPILATION_CACHE_DIR, that folder is used.
    """
    import jax

    from jaxkv.models.pretrained import cache_dir

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "compiled"))
    # JAX leaves out what compiled in under a second; many small programs together do not.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
