"""Writing K and V into pages: the public calls, their checks, and the lists of backends.

The functions are pure. In a jitted step whose pages are donated, they update the pool in place. The
host decides which slot a token gets.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.checks import FLOAT_NAMES, FLOATS, check_pages, require, require_array
from pallas_kernels.dispatch import Backend
from pallas_kernels.page_write import mosaic_gpu, mosaic_tpu, reference, xla
from pallas_kernels.pages import Pages
from pallas_kernels.quantised_pages import AnyPages, ChannelPages, TokenPages

ALL_PLATFORMS = ("cpu", "gpu", "tpu")
# Each list is in order of preference: the first one for the platform that takes the arguments runs.
WRITE_BACKENDS = (
    Backend(
        name="mosaic_tpu",
        run=mosaic_tpu.write_pages,
        refusal=mosaic_tpu.refusal,
        platforms=("tpu",),
    ),
    Backend(name="xla", run=xla.write_pages, platforms=ALL_PLATFORMS),
    # No GPU has shown yet that it is faster than XLA's scatter, so it runs only by name.
    Backend(name="mosaic_gpu", run=mosaic_gpu.write_pages, refusal=mosaic_gpu.refusal),
    Backend(name="reference", run=reference.write_pages),
)
COPY_BACKENDS = (
    Backend(
        name="mosaic_tpu",
        run=mosaic_tpu.copy_pages,
        refusal=mosaic_tpu.refusal,
        platforms=("tpu",),
    ),
    Backend(name="xla", run=xla.copy_pages, platforms=ALL_PLATFORMS),
    Backend(name="reference", run=reference.copy_pages),
)
SEAL_BACKENDS = (
    Backend(name="xla", run=xla.seal_pages, platforms=ALL_PLATFORMS),
    Backend(name="reference", run=reference.seal_pages),
)


def write_pages[P: TokenPages](
    pages: P, k: jax.Array, v: jax.Array, slots: jax.Array, *, backend: str | Backend | None = None
) -> P:
    """Writes the K and V of T tokens into their slots.

    Args:
      pages: the pool of one layer, of a type that is written token by token.
      k: `[T, K, D]` float. Pages of floats round it to their dtype; values beyond its range become
        infinity. Pages of codes clip values that their parameters do not reach, and store NaN as 0.
      v: like `k`.
      slots: `[T]` int32, `page_id * P + offset`. No two tokens may share a slot, except padding,
        which has slot 0, in the null page; what that page holds is not defined. A slot outside the
        pool is a mistake of the caller; nothing is written for it.
      backend: `reference`, `xla`, `mosaic_gpu` or `mosaic_tpu`; or a `Backend` of your own; or None
        for the best one on this platform that takes these pages.

    Returns:
      The pages, with other slots unchanged.

    Raises:
      ValueError: a shape or dtype is wrong, and the message names the dimension; or the named
        backend does not take the arguments.
    """
    check_pages(pages)
    require(not isinstance(pages, ChannelPages), "ChannelPages are written whole: seal_pages")
    for name, array in (("k", k), ("v", v), ("slots", slots)):
        require_array(name, array)
    require(slots.ndim == 1, f"slots must be [T], got {slots.shape}")
    require(slots.dtype == jnp.int32, f"slots must be int32, got {slots.dtype}")
    shape = (slots.shape[0], pages.num_kv_heads, pages.head_dim)
    for name, array in (("k", k), ("v", v)):
        require(array.shape == shape, f"{name} must be [T, K, D] = {shape}, got {array.shape}")
        require(array.dtype in FLOATS, f"{name} must be {FLOAT_NAMES}, got {array.dtype}")
    arguments = (pages, k, v, slots)
    return dispatch.choose("write_pages", WRITE_BACKENDS, backend, arguments).run(*arguments)


def copy_pages[P: AnyPages](
    pages: P, source: jax.Array, target: jax.Array, *, backend: str | Backend | None = None
) -> P:
    """Copies whole pages within a pool; all are read before any is written.

    Args:
      pages: the pool of one layer.
      source: `[n]` int32 page ids.
      target: `[n]` int32 page ids. They are distinct, except for padding, which copies page 0 onto
        page 0. An id outside the pool is a mistake of the caller: as a target it writes nothing, as
        a source it stands for some page.
      backend: see `write_pages`.

    Returns:
      The pages, with other pages unchanged.

    Raises:
      ValueError: a shape or dtype is wrong, or the named backend does not take the arguments.
    """
    check_pages(pages)
    _check_pairs(source, target)
    arguments = (pages, source, target)
    return dispatch.choose("copy_pages", COPY_BACKENDS, backend, arguments).run(*arguments)


def seal_pages(
    pages: ChannelPages,
    exact: Pages,
    source: jax.Array,
    target: jax.Array,
    count: jax.Array,
    *,
    backend: str | Backend | None = None,
) -> ChannelPages:
    """Encodes full pages of floats into pages of codes.

    Args:
      pages: the pool of codes of one layer.
      exact: the floats, with the same P, K and D.
      source: `[n]` int32 page ids of `exact`.
      target: `[n]` int32 page ids of `pages`, distinct; nothing is written outside the pool.
      count: int32 scalar; the first `count` of the n pairs are written.
      backend: `reference` or `xla`, a `Backend` of your own, or None for the best on this platform.

    Returns:
      The pages of codes, with other pages unchanged.

    Raises:
      ValueError: a shape or dtype is wrong, and the message names the dimension.
    """
    check_pages(pages)
    check_pages(exact)
    for name in ("page_size", "num_kv_heads", "head_dim"):
        got, want = getattr(exact, name), getattr(pages, name)
        require(got == want, f"{name} of exact is {got}, of the pages {want}")
    _check_pairs(source, target)
    require(count.shape == () and count.dtype == jnp.int32, "count must be an int32 scalar")
    arguments = (pages, exact, source, target, count)
    return dispatch.choose("seal_pages", SEAL_BACKENDS, backend, arguments).run(*arguments)


def _check_pairs(source: jax.Array, target: jax.Array) -> None:
    for name, ids in (("source", source), ("target", target)):
        require_array(name, ids)
        require(ids.ndim == 1, f"{name} must be [n], got {ids.shape}")
        require(ids.dtype == jnp.int32, f"{name} must be int32, got {ids.dtype}")
    require(source.shape == target.shape, f"source is {source.shape}, target {target.shape}")
