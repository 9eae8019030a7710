"""Integer arithmetic, a constant and names of types that several kernels share."""

import math
from typing import Any, overload

import jax

LOG2_E = math.log2(math.e)  # the softmax is computed with powers of two
Ref = Any  # a reference to memory, inside a kernel
Scalar = jax.Array | int  # int32, traced if it is an array


@overload
def ceil_div(n: int, by: int) -> int: ...
@overload
def ceil_div(n: jax.Array, by: int) -> jax.Array: ...
def ceil_div(n: Scalar, by: int) -> Scalar:
    """Returns `n / by`, rounded up, of integers; `by` is above 0."""
    return -(-n // by)


def round_up(n: int, step: int) -> int:
    """Returns n, or the next multiple of `step` above it."""
    return ceil_div(n, step) * step
