"""Writing new K and V into pages: the public calls, their checks, and the choice of a backend.

Pure functions; in a jitted step with the pages donated, both update the pool in place. Not here:
which slot a token gets (the host decides).
"""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.checks import FLOATS, check_pages, require
from pallas_kernels.page_write import reference, xla
from pallas_kernels.pages import Pages

WRITE_BACKENDS = {"reference": reference.write_pages, "xla": xla.write_pages}
COPY_BACKENDS = {"reference": reference.copy_pages, "xla": xla.copy_pages}
PREFERENCE = {platform: ("xla",) for platform in ("cpu", "gpu", "tpu")}


def write_pages(
    pages: Pages, k: jax.Array, v: jax.Array, slots: jax.Array, *, backend: str | None = None
) -> Pages:
    """Writes the K and V of T tokens into their slots.

    Args:
      pages: the pool of one layer.
      k: `[T, K, D]` float, rounded to the pages' dtype; past its range, to infinity.
      v: like `k`.
      slots: `[T]` int32, `page_id * P + offset`. No two tokens share a slot, but for padding:
        that is aimed at the null page (slot 0), where what remains is not defined. A slot outside
        the pool is an error of the caller that writes nothing.
      backend: `reference`, `xla`, or None for the best on this platform.

    Returns:
      The pages, other slots untouched.

    Raises:
      ValueError: a shape or dtype that does not fit, naming the dimension.
    """
    check_pages(pages)
    require(slots.ndim == 1, f"slots must be [T], got {slots.shape}")
    require(slots.dtype == jnp.int32, f"slots must be int32, got {slots.dtype}")
    shape = (slots.shape[0], pages.num_kv_heads, pages.head_dim)
    for name, array in (("k", k), ("v", v)):
        require(array.shape == shape, f"{name} must be [T, K, D] = {shape}, got {array.shape}")
        require(array.dtype in FLOATS, f"{name} must be a float, got {array.dtype}")
    return dispatch.choose("write_pages", WRITE_BACKENDS, PREFERENCE, backend)(pages, k, v, slots)


def copy_pages(
    pages: Pages, source: jax.Array, target: jax.Array, *, backend: str | None = None
) -> Pages:
    """Copies whole pages within a pool, all reads before all writes.

    Args:
      pages: the pool of one layer.
      source: `[n]` int32 page ids.
      target: `[n]` int32 page ids, distinct but for padding, which copies page 0 onto page 0. An id
        outside the pool is an error of the caller: as a target it writes nothing, as a source it
        stands for some page.
      backend: `reference`, `xla`, or None for the best on this platform.

    Raises:
      ValueError: a shape or dtype that does not fit.
    """
    check_pages(pages)
    for name, ids in (("source", source), ("target", target)):
        require(ids.ndim == 1, f"{name} must be [n], got {ids.shape}")
        require(ids.dtype == jnp.int32, f"{name} must be int32, got {ids.dtype}")
    require(source.shape == target.shape, f"source is {source.shape}, target {target.shape}")
    run = dispatch.choose("copy_pages", COPY_BACKENDS, PREFERENCE, backend)
    return run(pages, source, target)
