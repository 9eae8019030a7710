"""How pages are laid out on this platform, so that its attention kernel reads them fast."""

import jax

from jaxkv.arith import round_up
from pallas_kernels.chips import not_hopper
from pallas_kernels.pages import Layout

# Where a kernel reads K and V, D is stored as a multiple of this number: half the lanes of a TPU's
# register (V fills the other half), and the rows of a GPU's matrix product.
ROW = 64


def preferred_layout() -> Layout:
    """Returns the layout of a page that attention reads fastest on this platform."""
    return "paired" if jax.default_backend() == "tpu" else "head_major"


def stored_head_dim(head_dim: int) -> int:
    """Returns the D that pages should have on this platform for a model's `head_dim`.

    It is larger than the model's D in two cases. On a TPU, rows that do not fill a register would
    make XLA convert the whole pool at each step. On a GPU that has a kernel, the kernel's matrix
    products take no other rows.
    """
    platform = jax.default_backend()
    if platform == "cpu" or (platform == "gpu" and not_hopper()):
        return head_dim
    return round_up(head_dim, ROW)
