"""The kernel that joins the partial results of each tile's items.

The items of a tile are stored in the order of their keys and are added in that order. An item of
which a row sees no key adds zeros, so the sum of a row does not depend on the number of items.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.arith import LOG2_E, Ref
from pallas_kernels.attention.mosaic_gpu.plan import BY_COLUMN, MATRIX, div, store

STATS = 64  # items whose maxima are read at once
AHEAD = 8  # items that are read ahead
SLICE = 64  # channels of a program


def merge(
    weighted: jax.Array,
    stats: jax.Array,
    starts: jax.Array,
    sink: jax.Array,
    out_dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """Joins the items of each tile.

    Args:
      weighted, stats: the results of `walk.walk`, of at least STATS items.
      starts: `[tiles + 1]` int32, first item of each tile.
      sink: `[heads, rows]` float32, one more logit per row, in units of log 2; -inf for none.
      out_dtype: type of out.

    Returns:
      `out [tiles, heads, D, rows]` and `lse [tiles, heads, rows]` float32, natural log.
    """
    tiles, (_, heads, D, rows) = starts.shape[0] - 1, weighted.shape
    call = plgpu.kernel(
        _kernel,
        out_type=(
            jax.ShapeDtypeStruct((tiles, heads, D, rows), out_dtype),
            jax.ShapeDtypeStruct((tiles, heads, rows), jnp.float32),
        ),
        # Only the last axis of a grid may be very long.
        grid=(D // SLICE, heads, tiles),
        grid_names=("slice", "head", "tile"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="merge_partials",
    )
    return call(weighted, stats, starts, sink)


def _kernel(weighted: Ref, stats: Ref, starts: Ref, sink: Ref, out: Ref, lse: Ref) -> None:
    """Joins the items of one tile and head, for one slice of channels."""
    tile, head, part = (lax.axis_index(name) for name in ("tile", "head", "slice"))
    rows = weighted.shape[3]
    first, end = starts[tile], starts[tile + 1]
    channels = pl.ds(part * SLICE, SLICE)
    own = plgpu.load(sink.at[head], layout=BY_COLUMN, optimized=False)

    def higher(i: jax.Array, maximum: jax.Array) -> jax.Array:
        # All STATS numbers of the load exist: near the end it begins earlier.
        start = jnp.minimum(first + i * STATS, stats.shape[2] - STATS)
        values = plgpu.load(stats.at[0, head, pl.ds(start, STATS)], layout=MATRIX, optimized=False)
        item = start + plgpu.broadcasted_iota(jnp.int32, (STATS, rows), 0, layout=MATRIX)
        values = jnp.where((item >= first) & (item < end), values, -jnp.inf)
        return jnp.maximum(maximum, values.max(axis=0))

    maximum = lax.fori_loop(jnp.int32(0), div(end - first + STATS - 1, STATS), higher, own)
    finite = jnp.where(maximum == -jnp.inf, 0.0, maximum)

    def add(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        loaded = []
        for n in range(AHEAD):
            item = first + i * AHEAD + n
            here = jnp.minimum(item, end - 1)
            m, total = (
                plgpu.load(stats.at[which, head, here], layout=BY_COLUMN, optimized=False)
                for which in (0, 1)
            )
            values = plgpu.load(weighted.at[here, head, channels], layout=MATRIX, optimized=False)
            counts = jnp.where(item < end, 1.0, 0.0)
            loaded.append((jnp.exp2(m - finite) * counts, total, values))
        denominator, summed = carry
        for weight, total, values in loaded:
            denominator += weight * total
            summed += lax.broadcast_in_dim(weight, values.shape, [1]) * values
        return denominator, summed

    begin = (
        jnp.exp2(own - finite),
        plgpu.layout_cast(jnp.zeros((SLICE, rows), jnp.float32), MATRIX),
    )
    steps = div(end - first + AHEAD - 1, AHEAD)
    denominator, summed = lax.fori_loop(jnp.int32(0), steps, add, begin)
    safe = jnp.where(denominator == 0.0, 1.0, denominator)
    normalised = summed * lax.broadcast_in_dim(1.0 / safe, summed.shape, [1])
    store(out.at[tile, head, channels], normalised.astype(out.dtype))

    @pl.when(part == 0)
    def _() -> None:
        store(lse.at[tile, head], finite / LOG2_E + jnp.log(denominator))
