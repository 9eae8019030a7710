"""Page writes for TPUs, which update the pool in place.

A DMA moves whole tiles of some rows, so the kernel writes *pieces* of pages: it fetches a piece,
replaces the new rows in it, and stores it. The tokens of a step are sorted by slot before, so no
piece is written twice, and several can be in flight:

    slots     17 | 64 65 66 67 | 131        rows, sorted
    pieces    [1]  [    4      ]  [8]       each with its rows; fetched `NUM_BUFFERS - 1` ahead

Whole pages are copied through a buffer; all are read before any is written. XLA's scatter would
convert pools of 8-bit codes to another layout and back at each step. `Pages.encode` makes the
values that are stored.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import chips
from pallas_kernels.arith import Ref
from pallas_kernels.pages import LANES, token_shape
from pallas_kernels.quantised_pages import AnyPages, TokenPages

NUM_BUFFERS = 4  # pieces in flight, at most
MOST_TOKENS = 1 << 15  # tokens of a call, at most: its scalars have to fit into scalar memory
PIECE = 32  # rows of the largest tile, that of 8-bit codes


def refusal(pages: AnyPages, *_: object) -> str | None:
    """Returns why the kernels do not take these pages, or None if they do."""
    if pages.layout != "paired":
        return "pages must be paired"
    if jnp.float16 in [array.dtype for array in pages.paged.values()]:
        return "float16 is no type of a TPU's vector unit"
    return None


@jax.jit
def write_pages(pages: TokenPages, k: jax.Array, v: jax.Array, slots: jax.Array) -> TokenPages:
    """Does what `pallas_kernels.write_pages` says."""
    if not slots.size:
        return pages
    N, P = pages.num_pages, pages.page_size
    # Nothing reads the null page. Its slots, and those outside the pool, come last.
    outside = (slots < P) | (slots >= N * P)
    slots = jnp.where(outside, N * P, slots)
    order = jnp.argsort(slots)
    arrays = pages.paged
    for name, rows in pages.encode(k, v).items():
        rows = rows.reshape(slots.size, *token_shape(pages.by_token(arrays[name])))
        for start in range(0, slots.size, MOST_TOKENS):
            some = order[start : start + MOST_TOKENS]
            arrays[name] = _put(arrays[name], P, rows[some], slots[some])
    return dataclasses.replace(pages, **arrays)


@jax.jit
def copy_pages[P: AnyPages](pages: P, source: jax.Array, target: jax.Array) -> P:
    """Does what `pallas_kernels.copy_pages` says."""
    if not source.size:
        return pages
    source = jnp.clip(source, 0, pages.num_pages - 1)
    # Padding would copy the null page, which nothing reads, onto itself.
    writes = (target > 0) & (target < pages.num_pages)
    arrays = {
        name: _copy(array, source, jnp.where(writes, target, -1))
        for name, array in pages.paged.items()
    }
    return dataclasses.replace(pages, **arrays)


def _copy(array: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Copies pages; nothing is copied to a target below 0."""
    array = pltpu.with_memory_space_constraint(array, pltpu.HBM)
    held = jax.ShapeDtypeStruct((source.size, *array.shape[1:]), array.dtype)
    copied, _ = pl.pallas_call(
        _copy_kernel,
        out_shape=(jax.ShapeDtypeStruct(array.shape, array.dtype), held),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * 2,
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        name="copy_pages",
    )(source, target, array)
    return copied


def _copy_kernel(source: Ref, target: Ref, _: Ref, pool: Ref, held: Ref, arrived: Ref) -> None:
    """Copies pages of `pool` through `held`, a buffer in HBM."""

    def read(i: jax.Array) -> Any:
        return pltpu.make_async_copy(pool.at[source[i]], held.at[i], arrived)

    def write(i: jax.Array) -> Any:
        return pltpu.make_async_copy(held.at[i], pool.at[target[i]], arrived)

    def each(act: Callable[[jax.Array], None]) -> None:
        def one(i: jax.Array, _: None) -> None:
            pl.when(target[i] >= 0)(lambda: act(i))

        lax.fori_loop(0, source.shape[0], one, None)

    each(lambda i: read(i).start())
    each(lambda i: read(i).wait())
    each(lambda i: write(i).start())
    each(lambda i: write(i).wait())


class _Pieces(NamedTuple):
    """The pieces of pages that a step writes.

    Attributes:
      live: `[1]` int32, number of pieces.
      number: `[T]` int32, index of each piece, counted over the pool.
      first, end: `[T]` int32, the rows [first, end) of each piece.
      offset: `[T]` int32, offset of each row in its piece.
    """

    live: jax.Array
    number: jax.Array
    first: jax.Array
    end: jax.Array
    offset: jax.Array

    @classmethod
    def of(cls, slots: jax.Array, size: int, num_slots: int) -> "_Pieces":
        """Returns the pieces of ascending slots; slots from `num_slots` on are ignored."""
        (T,), none = slots.shape, jnp.full(1, -1, jnp.int32)
        number = jnp.where(slots < num_slots, slots // size, -1)
        begins = (number != jnp.concatenate([none, number[:-1]])) & (number >= 0)
        first = jnp.nonzero(begins, size=T, fill_value=T)[0].astype(jnp.int32)
        num_rows = jnp.sum(number >= 0, dtype=jnp.int32)
        end = jnp.minimum(jnp.append(first[1:], T), num_rows)
        pieces = begins.sum(dtype=jnp.int32)[None]
        return cls(pieces, number.at[first].get(mode="clip"), first, end, slots % size)


def _put(array: jax.Array, P: int, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """Writes `rows [T, ...]`, which are sorted by slot, into an array of pages of P tokens."""
    shape = array.shape
    if array.ndim == 5:  # the X pieces of a row are written like heads
        array = array.reshape(shape[0], -1, *shape[3:])
        rows = rows.reshape(rows.shape[0], -1, shape[4])
    array = pltpu.with_memory_space_constraint(array, pltpu.HBM)
    N, C, width, *rest = array.shape
    size = PIECE if rest and P % PIECE == 0 else P
    pieces = _Pieces.of(slots, size, N * P)
    most = min(size, rows.shape[0])
    if not rest:  # numbers, repeated so that each lane has its token's; one register if P is wide
        places = LANES if P % LANES == 0 else P
        rows = jnp.repeat(rows.reshape(rows.shape[0], C, -1), places, axis=2)
    new = most, *rows.shape[1:]
    buffers = chips.vmem_bytes() // 2 // (math.prod(new[:-1]) * max(LANES, new[-1]) * 4)
    buffers = max(1, min(buffers, NUM_BUFFERS))
    return pl.pallas_call(
        functools.partial(_kernel, size, P // size),
        out_shape=jax.ShapeDtypeStruct(array.shape, array.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(pieces),
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * 2,
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.VMEM((buffers, *new), rows.dtype),
                pltpu.VMEM((buffers, C, *((size, *rest) if rest else (width,))), array.dtype),
                pltpu.SemaphoreType.DMA((buffers,)),
                pltpu.SemaphoreType.DMA((buffers,)),
            ],
        ),
        input_output_aliases={len(pieces) + 1: 0},
        compiler_params=pltpu.CompilerParams(
            disable_bounds_checks=True, vmem_limit_bytes=chips.vmem_limit()
        ),
        name="write_pages",
    )(*pieces, rows, array).reshape(shape)


def _kernel(size: int, pieces_per_page: int, *refs: Ref) -> None:
    """Writes all pieces; `size` rows are a piece."""
    *scalars, rows, _, pool, new, pages, arrived, left = refs
    pieces, buffers = _Pieces(*scalars), new.shape[0]
    count = pieces.live[0]

    def place(s: jax.Array) -> Ref:
        number = pieces.number[s]
        page = pool.at[lax.div(number, pieces_per_page)]
        if pieces_per_page == 1:
            return page
        start = lax.rem(number, pieces_per_page) * size
        return page.at[:, pl.ds(pl.multiple_of(start, size), size)]

    def fetches(s: jax.Array) -> list[Any]:
        b, n = lax.rem(s, buffers), pieces.end[s] - pieces.first[s]
        pairs = (
            (place(s), pages.at[b]),
            (rows.at[pl.ds(pieces.first[s], n)], new.at[b, pl.ds(0, n)]),
        )
        return [pltpu.make_async_copy(*pair, arrived.at[b]) for pair in pairs]

    def store(s: jax.Array) -> Any:
        b = lax.rem(s, buffers)
        return pltpu.make_async_copy(pages.at[b], place(s), left.at[b])

    def start(s: jax.Array) -> None:
        pl.when(s >= buffers)(lambda: store(s - buffers).wait())
        for copy in fetches(s):
            copy.start()

    def piece(s: jax.Array, _: None) -> None:
        ahead = s + buffers - 1
        pl.when(ahead < count)(lambda: start(ahead))
        for copy in fetches(s):
            copy.wait()
        b, first = lax.rem(s, buffers), pieces.first[s]

        def row(r: jax.Array, _: None) -> None:
            _put_row(pages.at[b], size, new[b, r - first], pieces.offset[r])

        lax.fori_loop(first, pieces.end[s], row, None)
        store(s).start()

    for s in range(buffers - 1):
        pl.when(s < count)(functools.partial(start, jnp.int32(s)))
    lax.fori_loop(0, count, piece, None)
    lax.fori_loop(jnp.maximum(count - buffers, 0), count, lambda s, _: store(s).wait(), None)


def _put_row(page: Ref, size: int, row: jax.Array, offset: jax.Array) -> None:
    """Writes a token's row at an offset into a piece.

    Args:
      page: `[C, size, width]` of rows; or `[C, width]` of numbers, in which a head has `size`
        lanes, one per token.
      size: tokens of the piece.
      row: `[C, width]`; numbers are repeated along lanes.
      offset: offset of the token.
    """
    place = lax.broadcasted_iota(jnp.int32, page.shape, 1)
    if len(page.shape) == 3:
        row = row[:, None, :]
    else:
        row = jnp.concatenate([row] * (page.shape[1] // row.shape[1]), axis=1)
        if page.shape[1] > size:
            place = place & (size - 1)
    page[...] = jnp.where(place == offset, row, page[...])
