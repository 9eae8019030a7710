"""The orthonormal basis in which some formats store K and V. It spreads outliers of single channels
over all channels, so that one scale per token fits them (QuaRot, arXiv 2404.00456).

    H D x D, symmetric, H H = I:    (q H) . (k H) = q . k        (sum_j p_j v_j H) H = sum_j p_j v_j

After RoPE and QK-norm, q, K and V are rotated; the output of attention is rotated back.
"""

import jax
import jax.numpy as jnp
import numpy as np


def hadamard(head_dim: int) -> np.ndarray:
    """Returns the matrix `[D, D]` float32. It is block-diagonal; each block is Sylvester's matrix
    divided by sqrt(n), where n is the largest power of two that divides D."""
    size = head_dim & -head_dim
    block = np.ones((1, 1))
    while len(block) < size:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(head_dim // size), block / np.sqrt(size)).astype(np.float32)


def rotate(x: jax.Array) -> jax.Array:
    """Takes vectors `[..., D]` into this basis, or back; the dtype stays the same."""
    wide = x.astype(jnp.float32)
    turned = jnp.einsum("...d,de->...e", wide, hadamard(x.shape[-1]), precision="highest")
    return turned.astype(x.dtype)
