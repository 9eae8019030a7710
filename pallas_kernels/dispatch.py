"""Backends of an operation, and the choice of the one that runs a call.

Each operation has one tuple of backends, in order of preference. A named backend runs or raises an
error with the reason. Without a name, the first backend for the platform that takes the arguments
runs, and the log has a line for each better one that refused them.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

logger = logging.getLogger(__name__)


def _takes_everything(*_: Any) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One implementation of an operation.

    A backend is hashable, so it may be a static argument of a jitted function.

    Attributes:
      name: its name, which callers and messages use.
      run: the implementation. Its signature is that of the operation's other backends, for example
        `pallas_kernels.attention.reference.ragged_paged_attention`.
      refusal: is called with the arguments of `run` before anything is compiled. It returns the
        reason why the backend does not take them, or None if it does.
      platforms: the JAX platforms (`cpu`, `gpu`, `tpu`) on which the backend may run a call that
        names no backend. A call that names the backend runs it on any platform.

    Example:
      `Backend(name="mine", run=my_attention)`, which is then an argument of the operation:
      `ragged_paged_attention(..., backend=mine)`.
    """

    name: str
    run: Callable[..., Any]
    refusal: Callable[..., str | None] = _takes_everything
    platforms: tuple[str, ...] = ()


def choose(
    operation: str,
    backends: Sequence[Backend],
    backend: str | Backend | None,
    arguments: tuple[Any, ...],
) -> Backend:
    """Chooses the backend that runs a call.

    Args:
      operation: name of the operation, for messages.
      backends: the operation's backends, the preferred ones first.
      backend: a name, a backend that need not be in `backends`, or None for the platform's best.
      arguments: what `Backend.run` is going to be called with.

    Returns:
      The backend, which takes the arguments.

    Raises:
      ValueError: no backend has that name, or the backend does not take the arguments.
    """
    if backend is not None:
        named = _find(operation, backends, backend)
        if reason := named.refusal(*arguments):
            raise ValueError(f"{operation}: {named.name} does not take this: {reason}")
        return named
    platform = jax.default_backend()
    candidates = [candidate for candidate in backends if platform in candidate.platforms]
    for candidate in candidates:
        if not (reason := candidate.refusal(*arguments)):
            return candidate
        logger.warning("%s: not by %s: %s", operation, candidate.name, reason)
    names = [candidate.name for candidate in candidates]
    raise ValueError(f"{operation}: none of {names} takes this")


def _find(operation: str, backends: Sequence[Backend], backend: str | Backend) -> Backend:
    if isinstance(backend, Backend):
        return backend
    for candidate in backends:
        if candidate.name == backend:
            return candidate
    names = sorted(candidate.name for candidate in backends)
    raise ValueError(f"{operation}: no backend {backend!r}; there are {names}")
