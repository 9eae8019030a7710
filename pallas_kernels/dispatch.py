"""Which backend runs an operation: a named one or an error, and for None the best that is here.

Not here: the backends themselves, nor any fallback behind a caller's back.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def choose(
    operation: str,
    backends: Mapping[str, Callable[..., Any]],
    preference: Mapping[str, Sequence[str]],
    backend: str | None,
) -> Callable[..., Any]:
    """Picks the implementation of `operation`.

    Args:
      operation: its name, for messages.
      backends: implementations by name.
      preference: for each JAX platform (`cpu`, `gpu`, `tpu`), backend names, best first; the
        first that is in `backends` wins.
      backend: a name, or None for the platform's best.

    Raises:
      ValueError: `backend` is not one of `backends`.
    """
    if backend is not None:
        if not isinstance(backend, str) or backend not in backends:
            raise ValueError(f"{operation}: no backend {backend!r}; there are {sorted(backends)}")
        return backends[backend]
    platform = jax.default_backend()
    return next(backends[name] for name in preference[platform] if name in backends)
