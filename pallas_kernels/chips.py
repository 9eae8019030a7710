"""The chip that a program is traced for: what kernels choose their sizes and refuse calls by.

`targets.gpu` has the description of a GPU that its compiler needs.
"""

import jax
from jax.experimental.pallas import tpu as pltpu

SMEM_BYTES = 1 << 20  # scalar memory of a TPU core, the same for all generations
HOPPER = (9, 0)
# Compute capability by the first words of a GPU's kind. Programs can be compiled for these GPUs on
# a machine that has none.
CAPABILITIES = {
    "NVIDIA A100": (8, 0),
    "NVIDIA H100": (9, 0),
    "NVIDIA H200": (9, 0),
    "NVIDIA B200": (10, 0),
}


def vmem_bytes() -> int:
    """Returns the bytes of fast memory of the TPU; the smallest of all if there is no TPU."""
    return pltpu.get_tpu_info().vmem_capacity_bytes if pltpu.is_tpu_device() else 16 << 20


def vmem_limit() -> int:
    """Returns the bytes of fast memory that a kernel may use; the compiler needs the rest."""
    return vmem_bytes() * 7 // 8


def capability_of(kind: str) -> tuple[int, int] | None:
    """Returns the compute capability of a kind of GPU, or None if the table does not have it."""
    return next((cc for name, cc in CAPABILITIES.items() if kind.startswith(name)), None)


def capability() -> tuple[int, int] | None:
    """Returns the compute capability of the GPU; None if it is unknown or there is no GPU."""
    absent = jax.sharding.get_abstract_mesh().abstract_device
    if absent is not None:
        return capability_of(absent.device_kind)
    if jax.default_backend() != "gpu":
        return None
    major, _, minor = jax.devices()[0].compute_capability.partition(".")
    # AMD's GPUs have a name in place of numbers, and none of the instructions.
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def not_hopper() -> str | None:
    """Returns why a kernel with Hopper's instructions cannot run on the GPU; None if it can, or if
    the GPU is unknown."""
    here = capability()
    if here is None or here == HOPPER:
        return None
    has = ".".join(map(str, here))
    return f"its instructions are of compute capability 9.0 (H100, H200); this GPU has {has}"
