"""The warpgroup that computes: the online softmax of an item, with keys as rows of the products.

    S^T = K q^T               [keys, rows]   a product has 64 rows: keys fill them, where a tile of
    P^T = exp2(S^T - max)                    8 query rows would waste most of them
    O^T = O^T decay + V^T P^T [D, rows]

The maximum over keys goes through shuffles and a little shared memory. P^T goes through shared
memory to become an operand. Values that no row sees are zeroed there first, since 0 * NaN is NaN.
"""

import itertools
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arith import LOG2_E, Ref, Scalar
from pallas_kernels.attention.mosaic_gpu.fetch import OperandsScratch
from pallas_kernels.attention.mosaic_gpu.plan import (
    BY_COLUMN,
    BY_ROW,
    MATRIX,
    PRODUCT,
    ItemFields,
    Plan,
    rem,
)

State = tuple[jax.Array, jax.Array, list[jax.Array]]


class Blocks(Protocol):
    """Where the computing warpgroup finds a block of keys, by its number over all items."""

    def k(self, number: Scalar) -> Ref:
        """Waits for the block's K, and returns it: `[block_tokens, D]`."""
        ...

    def scales(self) -> tuple[jax.Array, jax.Array] | None:
        """Returns the scales of K and of V, `[block_tokens]` float32, or None if there are none.

        It is called between `k` and `k_used`.
        """
        ...

    def k_used(self) -> None:
        """Says that K and the scales are not needed any more."""
        ...

    def v(self, number: Scalar) -> Ref:
        """Waits for the block's V, and returns it: `[block_tokens, D]`."""
        ...

    def v_used(self, number: Scalar) -> None:
        """Says that V is not needed any more."""
        ...


@dataclass(frozen=True, kw_only=True)
class FloatBlocks:
    """Blocks of floats, in the ring `[2, stages, block_tokens, D]` that they were copied to."""

    ring: Ref
    filled: Ref
    emptied: Ref

    def k(self, number: Scalar) -> Ref:
        stage = rem(number, self.ring.shape[1])
        plgpu.barrier_wait(self.filled.at[stage])
        return self.ring.at[0, stage]

    def scales(self) -> None:
        return None

    def k_used(self) -> None:
        pass

    def v(self, number: Scalar) -> Ref:
        return self.ring.at[1, rem(number, self.ring.shape[1])]

    def v_used(self, number: Scalar) -> None:
        plgpu.barrier_arrive(self.emptied.at[rem(number, self.ring.shape[1])])


@dataclass(frozen=True)
class CodeBlocks:
    """Blocks that are converted from codes, one at a time."""

    made: OperandsScratch

    def k(self, number: Scalar) -> Ref:
        plgpu.barrier_wait(self.made.k_made.at[0])
        return self.made.k

    def scales(self) -> tuple[jax.Array, jax.Array] | None:
        if (scales := self.made.scales) is None:
            return None
        of_k, of_v = (plgpu.load(scales.at[which], layout=BY_ROW) for which in (0, 1))
        return of_k, of_v

    def k_used(self) -> None:
        plgpu.barrier_arrive(self.made.k_used.at[0])

    def v(self, number: Scalar) -> Ref:
        plgpu.barrier_wait(self.made.v_made.at[0])
        return self.made.v

    def v_used(self, number: Scalar) -> None:
        plgpu.barrier_arrive(self.made.v_used.at[0])


@dataclass(frozen=True, kw_only=True)
class Softmax:
    """The online softmax of an item, logits in units of log 2.

    The state is the maximum `[rows]`, the sums of exponentials `[block_tokens, rows]`, by index of
    a key within its block, and the weighted sums of V, `[channels, rows]` for each slice of D.

    Attributes:
      plan: sizes.
      fields: the item.
      blocks: where its keys are.
      q: `[rows, D]`.
      bounds: `[tiles, 2, rows]` int32, keys [low, high) that each row sees.
      weights: `[rows, block_tokens]`, room for the weights.
    """

    plan: Plan
    fields: ItemFields[Scalar]
    blocks: Blocks
    q: Ref
    bounds: Ref
    weights: Ref

    def empty(self) -> State:
        """Returns the state of no keys."""
        rows = self.plan.rows
        return (
            plgpu.layout_cast(jnp.full((rows,), -jnp.inf, jnp.float32), BY_COLUMN),
            plgpu.layout_cast(jnp.zeros((self.plan.block_tokens, rows), jnp.float32), MATRIX),
            [
                plgpu.layout_cast(jnp.zeros((part.stop - part.start, rows), jnp.float32), MATRIX)
                for part in self.plan.slices
            ],
        )

    def add(self, j: Scalar, number: Scalar, state: State) -> State:
        """Adds block j of the keys, which is block `number` over all items."""
        maximum, total, weighted = state
        product = _product(self.blocks.k(number), self.q.transpose((1, 0)))
        scales = self.blocks.scales()
        self.blocks.k_used()
        if scales is not None:
            product *= lax.broadcast_in_dim(scales[0], product.shape, [0])
        logits = self._masked(j, self._logits(product))
        m_new = jnp.maximum(maximum, logits.max(axis=0))
        finite = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        decay = jnp.exp2(maximum - finite)
        weights = jnp.exp2(logits - lax.broadcast_in_dim(finite, logits.shape, [1]))
        total = total * lax.broadcast_in_dim(decay, total.shape, [1]) + weights
        if scales is not None:  # scales of keys that are not seen may be NaN
            scaled = weights * lax.broadcast_in_dim(scales[1], weights.shape, [0])
            weights = jnp.where(weights > 0.0, scaled, 0.0)
        self.weights.transpose((1, 0))[...] = plgpu.layout_cast(
            weights.astype(self.plan.dtype), plgpu.Layout.WGMMA_TRANSPOSED
        )
        v = self.blocks.v(number)
        self._blank(j, v)
        plgpu.commit_smem()
        summed = []
        for part, before in zip(self.plan.slices, weighted, strict=True):
            channels = v.at[:, pl.ds(part.start, part.stop - part.start)]
            partial = _product(channels.transpose((1, 0)), self.weights.transpose((1, 0)))
            summed.append(before * lax.broadcast_in_dim(decay, before.shape, [1]) + partial)
        self.blocks.v_used(number)
        return m_new, total, summed

    def _logits(self, product: jax.Array) -> jax.Array:
        options = self.plan.options
        if options.soft_cap is None:
            return product * (options.scale * LOG2_E)
        return _tanh(product * (options.scale / options.soft_cap)) * (options.soft_cap * LOG2_E)

    def _masked(self, j: Scalar, logits: jax.Array) -> jax.Array:
        """Replaces logits of block j by -inf where a row does not see the key."""
        item, block = self.fields, self.plan.block_tokens
        low, high = (
            jnp.maximum(item.start, item.inner_start),
            jnp.minimum(item.end, item.inner_end),
        )

        def mask(logits: jax.Array) -> jax.Array:
            shape = logits.shape
            key = j * block + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX)
            visible = (key >= item.start) & (key < item.end)
            if not self.plan.one_bound:
                low, high = (
                    plgpu.load(self.bounds.at[item.tile, i], layout=BY_COLUMN, optimized=False)
                    for i in (0, 1)
                )
                visible &= key >= lax.broadcast_in_dim(low, shape, [1])
                visible &= key < lax.broadcast_in_dim(high, shape, [1])
            return jnp.where(visible, logits, -jnp.inf)

        whole = (j * block >= low) & ((j + 1) * block <= high)
        return lax.cond(whole, lambda logits: logits, mask, logits)

    def _blank(self, j: Scalar, v: Ref) -> None:
        """Zeros the values of block j that are not in the item."""
        block = self.plan.block_tokens
        start, end = (x - j * block for x in (self.fields.start, self.fields.end))

        @pl.when((start > 0) | (end < block))
        def _() -> None:
            for first, channel in itertools.product(
                range(0, block, PRODUCT), range(0, self.plan.head_dim, PRODUCT)
            ):
                part = v.at[pl.ds(first, PRODUCT), pl.ds(channel, PRODUCT)]
                values = plgpu.load(part, layout=MATRIX)
                token = first + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=MATRIX)
                seen = (token >= start) & (token < end)
                part[...] = jnp.where(seen, values, jnp.zeros_like(values))


def _tanh(x: jax.Array) -> jax.Array:
    """Computes tanh in float32; the GPU's instruction has 11 bits only.

    `1 - 2 / (exp(2 x) + 1)` would lose most bits of a small x, for which a series is used.
    """
    square = x * x
    series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    return jnp.where(square < 0.04, series, 1.0 - 2.0 / (jnp.exp2(x * (2 * LOG2_E)) + 1.0))


def _product(a: Ref, b: Ref) -> jax.Array:
    """Returns `a @ b` of two matrices in shared memory, in float32."""

    def multiply(out: Ref) -> jax.Array:
        plgpu.wgmma(out, a, b)
        return out[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))
