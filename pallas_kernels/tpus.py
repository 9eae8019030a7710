"""Memories of the TPU that a program is compiled for, as far as kernels size themselves by them."""

from jax.experimental.pallas import tpu as pltpu

SMEM_BYTES = 1 << 20  # of a core, on all of them


def vmem_bytes() -> int:
    """Fast memory of the chip that is compiled for; the smallest of all where it is unknown."""
    return pltpu.get_tpu_info().vmem_capacity_bytes if pltpu.is_tpu_device() else 16 << 20


def vmem_limit() -> int:
    """What a kernel may take of it; the rest is the compiler's."""
    return vmem_bytes() * 7 // 8
