"""Page writes for NVIDIA Hopper GPUs: for each token one copy of all heads of K, and one of V.

    K, V of a token [K, D] -> shared memory -> page [K, P, D] at the token's offset

Both are bulk copies, which do not pass through registers; rows of D numbers lie P rows apart in a
head-major page. The pool is updated in place: if the caller donates it, no other array of its size
is made. Tokens in the null page are not written at all. `xla` encodes and writes pages of codes in
one fused scatter.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import chips
from pallas_kernels.arith import Ref
from pallas_kernels.pages import Pages
from pallas_kernels.quantised_pages import TokenPages

COPY = 16  # a copy has a multiple of so many bytes
LONGEST = 256  # elements of a copy along an axis, at most
ROOM = 112 << 10  # bytes of shared memory for K of a token, and for V


def refusal(pages: TokenPages, *_: object) -> str | None:
    """Returns why the kernel does not take these pages on this device, or None if it does."""
    if reason := chips.not_hopper():
        return reason
    if not isinstance(pages, Pages):
        return f"{type(pages).__name__} are not written yet"
    if pages.layout != "head_major":
        return "pages must be head-major"
    K, D = pages.num_kv_heads, pages.head_dim
    row = D * pages.kv.dtype.itemsize
    if row % COPY:
        return f"D = {D}: a row of {row} bytes is not a multiple of {COPY}"
    for name, size in (("D", D), ("K", K)):
        if size > LONGEST:
            return f"{name} = {size} is above the {LONGEST} that a copy takes"
    if K * row > ROOM:
        return f"K of a token, K * D = {K} * {D}, has {K * row} bytes; {ROOM} fit shared memory"
    return None


@jax.jit
def write_pages(pages: Pages, k: jax.Array, v: jax.Array, slots: jax.Array) -> Pages:
    """Does what `pallas_kernels.write_pages` says."""
    N, heads, P, D = pages.kv.shape
    if not slots.shape[0]:
        return pages
    by_turns = (N, heads // 2, 2, P, D)
    pool = jax.new_ref(pages.kv.reshape(by_turns))
    row, dtype = (heads // 2, D), pages.kv.dtype
    call = plgpu.kernel(
        _kernel,
        grid=slots.shape,
        grid_names=("token",),
        # Two buffers: a copy has to begin at a multiple of 128 bytes, and each buffer does.
        scratch_types=[
            *(plgpu.SMEM(row, dtype) for _ in ("k", "v")),
            plgpu.Barrier(num_arrivals=2),
        ],
        kernel_name="write_pages",
    )
    call(k.astype(dtype), v.astype(dtype), slots, pool)
    return dataclasses.replace(pages, kv=jax.freeze(pool).reshape(pages.kv.shape))


def _kernel(
    k: Ref, v: Ref, slots: Ref, pool: Ref, row_of_k: Ref, row_of_v: Ref, arrived: Ref
) -> None:
    """Writes one token."""
    token = lax.axis_index("token")
    slot, (N, _, _, P, _) = slots[token], pool.shape
    # Pages are compared, since the number of slots may exceed an int32.
    page, offset = lax.div(slot, jnp.int32(P)), lax.rem(slot, jnp.int32(P))

    @pl.when((page > 0) & (page < N))
    def _() -> None:
        rows = row_of_k, row_of_v
        for new, row in zip((k, v), rows, strict=True):
            plgpu.copy_gmem_to_smem(new.at[token], row, arrived)
        plgpu.barrier_wait(arrived)
        for which, row in enumerate(rows):
            plgpu.copy_smem_to_gmem(row, pool.at[page, :, which, offset])
        plgpu.wait_smem_to_gmem(0)
