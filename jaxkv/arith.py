"""Integer arithmetic of the host code. `pallas_kernels.arith` has the same for arrays."""


def ceil_div(n: int, by: int) -> int:
    """Returns `n / by`, rounded up; `by` is above 0."""
    return -(-n // by)


def round_up(n: int, step: int) -> int:
    """Returns n, or the next multiple of `step` above it."""
    return ceil_div(n, step) * step
