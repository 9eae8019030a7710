"""The warpgroup that computes: the online softmax of an item, keys as rows.

    S^T = K q^T               [block, N]   a tile of N = 8 query rows wastes none of the 64 rows
    P^T = exp2(S^T - max)                  that a product has: those are keys
    O^T = O^T decay + V^T P^T [D, N]

The maximum goes over rows, through shuffles and a little shared memory; P^T goes through shared
memory to become an operand. What no row sees of V is zeroed there first, since 0 * NaN is NaN.
"""

import itertools
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic_gpu.fetch import Operands
from pallas_kernels.attention.mosaic_gpu.plan import (
    BY_COLUMN,
    BY_ROW,
    LOG2_E,
    MATRIX,
    PRODUCT,
    Item,
    Plan,
    Ref,
    Scalar,
    rem,
)

State = tuple[jax.Array, jax.Array, list[jax.Array]]


class Blocks(Protocol):
    """Where a block of keys is found, by its number over all items."""

    def k(self, number: Scalar) -> Ref:
        """K `[block, D]`, once it is there."""
        ...

    def scales(self) -> tuple[jax.Array, jax.Array] | None:
        """Of K and of V, `[block]` float32, between `k` and `k_used`; None where there are none."""
        ...

    def k_used(self) -> None:
        """K is not needed any more, nor are the scales."""
        ...

    def v(self, number: Scalar) -> Ref:
        """V `[block, D]`, once it is there."""
        ...

    def v_used(self, number: Scalar) -> None:
        """V is not needed any more."""
        ...


@dataclass(frozen=True, kw_only=True)
class FloatBlocks:
    """In the ring that they were copied to, `[2, stages, block, D]`."""

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


@dataclass(frozen=True, kw_only=True)
class CodeBlocks:
    """Made of codes, one at a time."""

    operands: Operands

    def k(self, number: Scalar) -> Ref:
        plgpu.barrier_wait(self.operands.k_made.at[0])
        return self.operands.k

    def scales(self) -> tuple[jax.Array, jax.Array] | None:
        if (scales := self.operands.scales) is None:
            return None
        of_k, of_v = (plgpu.load(scales.at[which], layout=BY_ROW) for which in (0, 1))
        return of_k, of_v

    def k_used(self) -> None:
        plgpu.barrier_arrive(self.operands.k_used.at[0])

    def v(self, number: Scalar) -> Ref:
        plgpu.barrier_wait(self.operands.v_made.at[0])
        return self.operands.v

    def v_used(self, number: Scalar) -> None:
        plgpu.barrier_arrive(self.operands.v_used.at[0])


@dataclass(frozen=True, kw_only=True)
class Softmax:
    """The online softmax of an item, logits in units of log 2.

    The state is the maximum `[N]`, sums of exponentials by row of a block `[block, N]` and the
    weighted sum of V, `[channels, N]` of each slice of D.

    Attributes:
      q: `[N, D]`.
      bounds: `[tiles, 2, N]`, keys [low, high) that each row sees.
      weights: `[N, block]`, room for P.
    """

    plan: Plan
    item: Item
    blocks: Blocks
    q: Ref
    bounds: Ref
    weights: Ref

    def empty(self) -> State:
        """No key yet."""
        N = self.plan.rows
        return (
            plgpu.layout_cast(jnp.full((N,), -jnp.inf, jnp.float32), BY_COLUMN),
            plgpu.layout_cast(jnp.zeros((self.plan.block, N), jnp.float32), MATRIX),
            [
                plgpu.layout_cast(jnp.zeros((part.stop - part.start, N), jnp.float32), MATRIX)
                for part in self.plan.slices
            ],
        )

    def add(self, j: Scalar, number: Scalar, state: State) -> State:
        """Adds block j, of that number over all items."""
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
        if scales is not None:  # of what is not seen they may be NaN
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
        """Logits of block j, -inf where a row does not see the key."""
        item, block = self.item, self.plan.block
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
        """Zeroes what the item has not of V."""
        start, end = (x - j * self.plan.block for x in (self.item.start, self.item.end))

        @pl.when((start > 0) | (end < self.plan.block))
        def _() -> None:
            for first, channel in itertools.product(
                range(0, self.plan.block, PRODUCT), range(0, self.plan.head_dim, PRODUCT)
            ):
                part = v.at[pl.ds(first, PRODUCT), pl.ds(channel, PRODUCT)]
                values = plgpu.load(part, layout=MATRIX)
                token = first + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=MATRIX)
                seen = (token >= start) & (token < end)
                part[...] = jnp.where(seen, values, jnp.zeros_like(values))


def _tanh(x: jax.Array) -> jax.Array:
    """The instruction for it has 11 bits. Of 1 - 2 / (exp(2 x) + 1) a small x would keep few, for
    which the first terms of the series do."""
    square = x * x
    series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    return jnp.where(square < 0.04, series, 1.0 - 2.0 / (jnp.exp2(x * (2 * LOG2_E)) + 1.0))


def _product(a: Ref, b: Ref) -> jax.Array:
    """`a @ b` of two matrices in shared memory, in float32."""

    def multiply(out: Ref) -> jax.Array:
        plgpu.wgmma(out, a, b)
        return out[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))
