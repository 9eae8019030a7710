"""Which GPU a program is traced for: kernels are written for a compute capability.

Not here: the description of a GPU that the compiler wants (`targets.gpu`).
"""

import jax

HOPPER = (9, 0)
# Of GPUs that a program can be compiled for in their absence, by the beginning of their kind.
CAPABILITIES = {
    "NVIDIA A100": (8, 0),
    "NVIDIA H100": (9, 0),
    "NVIDIA H200": (9, 0),
    "NVIDIA B200": (10, 0),
}


def capability_of(kind: str) -> tuple[int, int] | None:
    """Compute capability of a kind of GPU; None where it is not in the table."""
    return next((cc for name, cc in CAPABILITIES.items() if kind.startswith(name)), None)


def capability() -> tuple[int, int] | None:
    """Compute capability of the GPU that is traced for; None where that is none, or unknown."""
    absent = jax.sharding.get_abstract_mesh().abstract_device
    if absent is not None:
        return capability_of(absent.device_kind)
    if jax.default_backend() != "gpu":
        return None
    major, _, minor = jax.devices()[0].compute_capability.partition(".")
    # Those of AMD have a name instead, and none of the instructions.
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def not_hopper() -> str | None:
    """Why a kernel with Hopper's instructions cannot run on what is traced for; None where it can,
    or where that is unknown."""
    here = capability()
    if here is None or here == HOPPER:
        return None
    has = ".".join(map(str, here))
    return f"its instructions are of compute capability 9.0 (H100, H200); this GPU has {has}"
