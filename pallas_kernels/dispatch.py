"""Which backend runs an operation: a named one or an error, and for None the best that is here.

Not here: the backends themselves, nor any fallback behind a caller's back: where None passes over
the platform's best, the log says so.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

logger = logging.getLogger(__name__)


def choose(
    operation: str,
    backends: Mapping[str, Callable[..., Any]],
    preference: Mapping[str, Sequence[str]],
    backend: str | None,
    refusals: Mapping[str, str | None] | None = None,
) -> Callable[..., Any]:
    """Picks the implementation of `operation`.

    Args:
      operation: its name, for messages.
      backends: implementations by name.
      preference: for each JAX platform (`cpu`, `gpu`, `tpu`), backend names, best first; the
        first that is in `backends` and takes the arguments wins.
      backend: a name, or None for the platform's best.
      refusals: by backend, why it does not take the arguments; None where it does.

    Raises:
      ValueError: `backend` is not one of `backends`, or does not take the arguments.
    """
    refusals = refusals or {}
    if backend is not None:
        if not isinstance(backend, str) or backend not in backends:
            raise ValueError(f"{operation}: no backend {backend!r}; there are {sorted(backends)}")
        if reason := refusals.get(backend):
            raise ValueError(f"{operation}: {backend} does not take this: {reason}")
        return backends[backend]
    present = [name for name in preference[jax.default_backend()] if name in backends]
    for name in present:
        if not (reason := refusals.get(name)):
            return backends[name]
        logger.warning("%s: not by %s: %s", operation, name, reason)
    raise ValueError(f"{operation}: none of {present} takes this")
