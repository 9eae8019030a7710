"""The orthonormal basis in which some formats store K and V: outliers of single channels are spread
over all, so that one scale a token fits them (QuaRot, arXiv 2404.00456).

    H D x D, symmetric, H H = I:    (q H) . (k H) = q . k        (sum_j p_j v_j H) H = sum_j p_j v_j

Its place is behind RoPE and QK-norm, on K, on V and on q when they are written and read, and on
the output.
"""

import jax
import jax.numpy as jnp
import numpy as np


def hadamard(head_dim: int) -> np.ndarray:
    """Sylvester's matrix over sqrt(n), `[D, D]` float32, in blocks of the largest power of two that
    divides D."""
    size = head_dim & -head_dim
    block = np.ones((1, 1))
    while len(block) < size:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(head_dim // size), block / np.sqrt(size)).astype(np.float32)


def rotate(x: jax.Array) -> jax.Array:
    """Takes vectors `[..., D]` into that basis, or back; the dtype stays."""
    wide = x.astype(jnp.float32)
    turned = jnp.einsum("...d,de->...e", wide, hadamard(x.shape[-1]), precision="highest")
    return turned.astype(x.dtype)
