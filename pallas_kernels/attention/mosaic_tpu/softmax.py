"""The arithmetic of the TPU kernel: blocks of keys into the online softmax of a tile."""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.mosaic_tpu.plan import LOG2_E, Plan, Ref, Scalar
from pallas_kernels.online_softmax import finite_or_zero
from pallas_kernels.pages import LANES


@dataclass(frozen=True)
class Softmax:
    """The online softmax of one tile, logits in units of log 2.

    `total` keeps a partial sum a lane, `maximum` the same value in all lanes. Where codes have a
    minimum, `affine` holds the sum of a row's q, by which K's minima multiply, in all lanes, and
    the sum of V's minima by weight, in parts a lane.
    """

    plan: Plan
    q: Ref
    bounds: Ref
    buffers: Sequence[Ref]
    maximum: Ref
    total: Ref
    weighted: Ref
    affine: Sequence[Ref]

    def clear(self) -> None:
        """No key yet."""
        if self.plan.affine:
            q_sum, minima = self.affine
            for g in range(self.plan.num_groups):
                row = self.q[0, g].astype(jnp.float32).sum(axis=1, keepdims=True)
                q_sum[g] = jnp.broadcast_to(row, q_sum.shape[1:])
            minima[...] = jnp.zeros(minima.shape, jnp.float32)
        self.maximum[...] = jnp.full(self.maximum.shape, -jnp.inf, jnp.float32)
        self.total[...] = jnp.zeros(self.total.shape, jnp.float32)
        self.weighted[...] = jnp.zeros(self.weighted.shape, jnp.float32)

    def add(
        self,
        slot: Scalar,
        j: Scalar,
        *,
        masked: bool = False,
        between: Callable[[int], None] = lambda group: None,
    ) -> None:
        """Adds block j of the keys, which is in a buffer.

        Args:
          slot: of the buffer.
          j: of the block.
          masked: some row does not see all of it.
          between: called before each group's second product, with the group: scalar work, which the
            compiler then lays under the products.
        """
        # Some groups' first products go ahead: their softmax then runs under other products.
        groups, k_parts, logits = self.plan.num_groups, {}, {}
        visible = self._visible(j) if masked else None
        scales, minima = self._parameters(slot)
        lead = min(self.plan.groups_ahead, groups)
        for i in range(groups + lead):
            if i < groups:
                k_parts[i] = self._parts(slot, i, self.plan.k_pieces)
                logits[i] = self._logits(k_parts[i], i, scales, minima)
                if visible is not None:
                    logits[i] = jnp.where(visible, logits[i], -jnp.inf)
            g = i - lead
            if g < 0:
                continue
            weights, decay = self._weigh(g, logits.pop(g))
            between(g)
            if minima is not None:
                self._add_minima(g, weights * self._of_rows(minima, g, 1), decay)
            if scales is not None:
                weights = weights * self._of_rows(scales, g, 1)
            weights = weights.astype(self.plan.dtype)
            v_parts = k_parts.pop(g)
            if self.plan.parts == 1 or self.plan.k_pieces != self.plan.v_pieces:
                v_parts = self._parts(slot, g, self.plan.v_pieces)  # loads cost less than registers
            added = jnp.concatenate([self._dot(weights, v, 1, 0) for v in v_parts], axis=1)
            self.weighted[g] = self.weighted[g] * decay + added

    def finish(self, sink: Ref, out: Ref, lse: Ref) -> None:
        """Normalises; the sink joins the denominator here, once."""
        for g in range(self.plan.num_groups):
            m = self.maximum[g][:, :1]
            m_new = finite_or_zero(jnp.maximum(m, sink[g]))
            decay = jnp.exp2(m - m_new)
            total = self.total[g].sum(axis=1, keepdims=True) * decay + jnp.exp2(sink[g] - m_new)
            safe = jnp.where(total == 0.0, 1.0, total)
            weighted = self._own(self.weighted[g])
            if self.plan.affine:
                weighted += self.affine[1][g].sum(axis=1, keepdims=True)
            out[0, g] = (weighted * (decay / safe)).astype(out.dtype)
            lse[0, g] = m_new / LOG2_E + jnp.log(total)

    def _own(self, weighted: jax.Array) -> jax.Array:
        """Of what each row of a group took of every head's V, its own head's: `[R, out_lanes]`."""
        plan = self.plan
        width = len(plan.v_pieces) * plan.lanes

        def of_head(n: int) -> jax.Array:
            starts = [(part * plan.group + n) * width for part in range(plan.parts)]
            return jnp.concatenate([weighted[:, start : start + width] for start in starts], axis=1)

        return self._by_row([of_head(n) for n in range(plan.group)])

    def _by_row(self, heads: Sequence[jax.Array]) -> jax.Array:
        """Takes each row of a group from the array of its head; arrays are of R rows or one."""
        taken = heads[0]
        row = lax.broadcasted_iota(jnp.int32, (self.plan.rows, 1), 0)
        for n, array in enumerate(heads[1:], start=1):
            taken = jnp.where(row >= n * self.plan.head_rows, array, taken)
        return taken

    def _of_rows(self, parameters: jax.Array, g: int, kv_index: int) -> jax.Array:
        """What multiplies the keys of a group's heads, `[R or 1, block_tokens]`, of `[2K, ...]`."""
        heads = range(g * self.plan.group, (g + 1) * self.plan.group)
        return self._by_row([parameters[2 * h + kv_index :][:1] for h in heads])

    def _parts(self, slot: Scalar, g: int, pieces: range) -> list[jax.Array]:
        """Some pieces of the rows of a group's heads, side by side, for each code of a byte:
        `[block_tokens, group * lanes of them]`."""
        plan = self.plan
        heads = range(g * plan.group, (g + 1) * plan.group)

        def read(part: int) -> jax.Array:
            rows = [self._code(self.buffers[0][slot, :, h, x], part) for h in heads for x in pieces]
            shape = plan.block_tokens, plan.lanes
            return jnp.concatenate([r.astype(plan.dtype).reshape(shape) for r in rows], axis=1)

        return [read(part) for part in range(plan.parts)]

    def _code(self, rows: jax.Array, part: int) -> jax.Array:
        """Of bytes that hold several codes, one of each, as int8; other rows are what they are."""
        if self.plan.parts == 1:
            return rows
        bits = 8 // self.plan.parts
        mask = 0x01010101 * ((1 << bits) - 1)
        words = pltpu.bitcast(rows, jnp.int32)  # four bytes at once
        return pltpu.bitcast(words >> bits * part & mask, jnp.int8)

    def _parameters(self, slot: Scalar) -> tuple[jax.Array | None, jax.Array | None]:
        """Scales and minima of a block's codes, `[2K, block_tokens]`, where pages have them."""
        if len(self.buffers) == 1:
            return None, None
        pages = range(self.plan.pages_per_block)
        stored = jnp.concatenate([self.buffers[1][slot, i] for i in pages], axis=1)
        if not self.plan.affine:
            return stored, None
        return from_float16(stored & 0xFFFF), from_float16(stored >> 16)

    def _logits(
        self,
        k_parts: list[jax.Array],
        g: int,
        scales: jax.Array | None,
        minima: jax.Array | None,
    ) -> jax.Array:
        options, lanes = self.plan.options, k_parts[0].shape[1]
        products = [
            self._dot(self.q[0, g, :, i * lanes : (i + 1) * lanes], k, 1, 1)
            for i, k in enumerate(k_parts)
        ]
        x = functools.reduce(operator.add, products)
        if scales is not None:
            x = x * self._of_rows(scales, g, 0)
        if minima is not None:
            x += self.affine[0][g][:, :1] * self._of_rows(minima, g, 0)
        if options.soft_cap is None:
            return x * (options.scale * LOG2_E)
        x = jnp.tanh(x * (options.scale / options.soft_cap))
        return x * (options.soft_cap * LOG2_E)

    def _weigh(self, g: int, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The weights of a block's keys, and the factor on what came before."""
        m = self.maximum[g]
        m_new = jnp.maximum(m, logits.max(axis=1, keepdims=True))
        finite = finite_or_zero(m_new)
        decay = jnp.exp2(m - finite)
        weights, total = [], self.total[g] * decay
        for start in range(0, self.plan.block_tokens, LANES):
            weights.append(jnp.exp2(logits[:, start : start + LANES] - finite))
            total += weights[-1]
        self.maximum[g], self.total[g] = m_new, total
        return jnp.concatenate(weights, axis=1), decay[:, :1]

    def _add_minima(self, g: int, weighted: jax.Array, decay: jax.Array) -> None:
        """Adds what a block's keys add to all channels, `[R, block_tokens]`."""
        minima = self.affine[1]
        parts = range(0, self.plan.block_tokens, LANES)
        added = sum(weighted[:, start : start + LANES] for start in parts)
        minima[g] = minima[g] * decay + added

    def _visible(self, j: Scalar) -> jax.Array:
        """Which keys of block j each row sees, `[R, block_tokens]`."""
        bounds = self.bounds[0]
        R, S = self.plan.rows, self.plan.block_tokens
        key = j * S + lax.broadcasted_iota(jnp.int32, (R, S), 1)
        return (key >= bounds[:, :1]) & (key < bounds[:, 1:])

    def _dot(self, a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
        highest = lax.Precision.HIGHEST if self.plan.dtype == jnp.float32 else None
        return lax.dot_general(
            a,
            b,
            (((axis_a,), (axis_b,)), ((), ())),
            precision=highest,
            preferred_element_type=jnp.float32,
        )


def from_float16(bits: jax.Array) -> jax.Array:
    """The float32 of a finite float16's bits (uint32): a TPU has no such type."""
    size = bits & 0x7FFF
    normal = lax.bitcast_convert_type((size << 13) + (112 << 23), jnp.float32)
    small = size.astype(jnp.int32).astype(jnp.float32) * 2.0**-24  # no implicit leading 1
    value = jnp.where(size < 0x400, small, normal)
    return jnp.where(bits > 0x7FFF, -value, value)
