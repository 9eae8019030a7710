"""The arithmetic of the TPU kernel: blocks of keys into the online softmax of a tile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels.attention.mosaic_tpu import operands, parameters
from pallas_kernels.attention.mosaic_tpu.fetch import TileScalars
from pallas_kernels.attention.mosaic_tpu.plan import LOG2_E, Plan, Ref, Scalar
from pallas_kernels.attention.mosaic_tpu.rows import Rows
from pallas_kernels.attention.ragged import PADDING
from pallas_kernels.online_softmax import finite_or_zero
from pallas_kernels.pages import LANES


@dataclass(frozen=True)
class Softmax:
    """The online softmax of one tile, logits in units of log 2.

    The KV heads of a group are worked on at once: their keys lie side by side in one operand, in
    which q is 0 where another head's keys are, and of what a row takes of all their V its own
    head's part counts in the end.

    `factors` are those of logits and outputs of each KV head, by turns. `prepared` is q laid out
    for a group, where that is needed, and in parts where products are taken in the type of codes
    (`operands.split`); `factor` is then that of a row's logits. `total` keeps a partial sum a lane,
    `maximum` and `factor` the same value in all lanes. Where codes have a minimum, `affine` holds
    the sum of a row's q, by which K's minima multiply, in all lanes, and the sum of V's minima by
    weight, in parts a lane. `parameters` are a block's scales, and minima, by head.
    """

    plan: Plan
    tile: TileScalars
    t: Scalar
    rows: Rows
    queries: Ref
    sink: Ref
    factors: Ref
    buffers: Sequence[Ref]
    maximum: Ref
    total: Ref
    weighted: Ref
    prepared: Sequence[Ref]
    factor: Sequence[Ref]
    affine: Sequence[Ref]
    parameters: Sequence[Ref]

    @staticmethod
    def scratch(plan: Plan, q_lanes: int, has_parameters: bool) -> list[Any]:
        """Of the last seven attributes, for q of so many lanes."""

        def of_groups(rows: int, lanes: int, dtype: DTypeLike = jnp.float32) -> Any:
            return pltpu.VMEM((plan.num_groups, rows, lanes), dtype)

        of_rows = of_groups(plan.rows, LANES)
        of_keys = plan.block_tokens // LANES, 2 * plan.num_kv_heads, LANES
        num_parameters = has_parameters * (2 if plan.affine else 1)
        return [
            of_rows,
            of_rows,
            of_groups(plan.rows, plan.group * plan.out_lanes),
            plan.prepares_q * [of_groups(plan.q_rows, plan.group * q_lanes, plan.dtype)],
            plan.prepares_q * [of_rows],
            2 * plan.affine * [of_rows],
            num_parameters * [pltpu.VMEM(of_keys, jnp.float32)],
        ]

    def begin(self) -> None:
        """Takes a tile's query rows; no key yet."""
        of_rows = self.maximum.shape[1:]
        for g in range(self.plan.num_groups):
            q, factor = self._spread(self.rows.read(g)), self._factor(g, 0)
            if self.plan.affine:
                q_sum = q.astype(jnp.float32).sum(axis=1, keepdims=True)
                self.affine[0][g] = jnp.broadcast_to(q_sum * factor, of_rows)
            if self.plan.splits:
                q, of_parts = operands.split(q.astype(jnp.float32), self.plan.dtype)
                factor = of_parts * factor * self.plan.unit
            if self.plan.prepares_q:
                self.prepared[0][g] = q
                self.factor[0][g] = jnp.broadcast_to(factor, of_rows)
        for minima in self.affine[1:]:
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
        groups, logits = self.plan.num_groups, {}
        visible = self._visible(j) if masked else None
        self._lay_out_parameters(slot)
        lead = min(self.plan.groups_ahead, groups)
        for i in range(groups + lead):
            if i < groups:
                logits[i] = self._logits(slot, i)
                if visible is not None:
                    logits[i] = jnp.where(visible, logits[i], -jnp.inf)
            g = i - lead
            if g < 0:
                continue
            weights, decay = self._weigh(g, logits.pop(g))
            between(g)
            for minima in self.parameters[1:]:
                self._add_minima(g, weights * self._of_rows(minima, g, 1), decay)
            for scales in self.parameters[:1]:
                weights = weights * self._of_rows(scales, g, 1)
            self.weighted[g] = self.weighted[g] * decay + self._weighted(slot, g, weights)

    def finish(self) -> None:
        """Normalises; the sink joins the denominator here, once."""
        for g in range(self.plan.num_groups):
            m, sink = self.maximum[g][:, :1], self.sink[g]
            m_new = finite_or_zero(jnp.maximum(m, sink))
            decay = jnp.exp2(m - m_new)
            total = self.total[g].sum(axis=1, keepdims=True) * decay + jnp.exp2(sink - m_new)
            safe = jnp.where(total == 0.0, 1.0, total)
            weighted = self._own(self.weighted[g])
            if self.plan.affine:
                weighted += self.affine[1][g].sum(axis=1, keepdims=True)
            out = weighted * (decay / safe * self._factor(g, 1))
            self.rows.write(g, out, m_new / LOG2_E + jnp.log(total))

    def _factor(self, g: int, which: int) -> jax.Array:
        """The factor of a group's logits (0) or outputs (1): of all rows, or `[R, 1]`."""
        heads = range(g * self.plan.group, (g + 1) * self.plan.group)
        return self._by_row([self.factors[2 * h + which] for h in heads])

    def _spread(self, rows: jax.Array) -> jax.Array:
        """Puts each row of a group where its head's keys are, and 0 elsewhere."""
        zeros = jnp.zeros_like(rows)
        heads = range(self.plan.group)
        own = [self._by_row([rows if h == n else zeros for h in heads]) for n in heads]
        return jnp.concatenate(own, axis=1)

    def _own(self, weighted: jax.Array) -> jax.Array:
        """Of what each row of a group took of every head's V, its own head's: `[R, out_lanes]`."""
        return self._by_row(jnp.split(weighted, self.plan.group, axis=1))

    def _by_row(self, heads: Sequence[jax.Array]) -> jax.Array:
        """Takes each row of a group from the array of its head; arrays are of R rows or one."""
        taken = heads[0]
        row = lax.broadcasted_iota(jnp.int32, (self.plan.rows, 1), 0)
        for n, array in enumerate(heads[1:], start=1):
            taken = jnp.where(row >= n * self.plan.head_rows, array, taken)
        return taken

    def _of_rows(self, numbers: Ref, g: int, kv_index: int) -> jax.Array:
        """What multiplies the keys of a group's heads, `[R or 1, block_tokens]`."""
        rows = [2 * h + kv_index for h in range(g * self.plan.group, (g + 1) * self.plan.group)]
        return self._by_row([parameters.of_head(numbers, row) for row in rows])

    def _operand(self, slot: Scalar, g: int, kv_index: int) -> jax.Array:
        """The pieces with K, or V, of a group's heads, side by side: `[block_tokens, ...]`."""
        plan, buffer = self.plan, self.buffers[0]

        def read(h: int, x: int) -> jax.Array:
            rows = buffer[slot, h, x, : plan.block_tokens]
            if plan.affine:
                rows = operands.halve(rows, kv_index)
            return operands.read_as(rows, plan.dtype)

        pieces = [
            read(h, x)
            for h in range(g * plan.group, (g + 1) * plan.group)
            for x in (plan.v_pieces if kv_index else plan.k_pieces)
        ]
        return jnp.concatenate(pieces, axis=1)

    def _lay_out_parameters(self, slot: Scalar) -> None:
        """Of a block's codes, where pages have them."""
        if not self.parameters:
            return
        stored = parameters.by_head(self.buffers[1].at[slot], self.plan.page_size)
        if not self.plan.affine:
            return parameters.store(stored, self.parameters[0])
        for shift, numbers in zip((0, 16), self.parameters, strict=True):
            halves = [parameters.from_float16(bits >> shift & 0xFFFF) for bits in stored]
            parameters.store(halves, numbers)

    def _logits(self, slot: Scalar, g: int) -> jax.Array:
        cap = self.plan.options.soft_cap
        if self.plan.prepares_q:
            q, factor = self.prepared[0][g], self.factor[0][g][:, :1]
        else:
            q, factor = self.rows.read(g), self._factor(g, 0)
        x = self._dot(q, self._operand(slot, g, 0), 1, 1)
        if self.plan.splits:
            x = operands.join(x, self.plan.dtype)
        x = x * factor
        for scales in self.parameters[:1]:
            x = x * self._of_rows(scales, g, 0)
        for minima in self.parameters[1:]:
            x += self.affine[0][g][:, :1] * self._of_rows(minima, g, 0)
        return x if cap is None else jnp.tanh(x) * (cap * LOG2_E)

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

    def _weighted(self, slot: Scalar, g: int, weights: jax.Array) -> jax.Array:
        """What a block's keys add of V, by weight: `[R, group * out_lanes]`."""
        v = self._operand(slot, g, 1)
        if self.plan.splits:
            weights, factor = operands.split_positive(weights, self.plan.dtype)
            weighted = operands.join(self._dot(weights, v, 1, 0), self.plan.dtype)
            return weighted * (factor * self.plan.unit)
        return self._dot(weights.astype(self.plan.dtype), v, 1, 0)

    def _add_minima(self, g: int, weighted: jax.Array, decay: jax.Array) -> None:
        """Adds what a block's keys add to all channels, `[R, block_tokens]`."""
        minima = self.affine[1]
        parts = range(0, self.plan.block_tokens, LANES)
        added = sum(weighted[:, start : start + LANES] for start in parts)
        minima[g] = minima[g] * decay + added

    def _visible(self, j: Scalar) -> jax.Array:
        """Which keys of block j each row sees, `[R, block_tokens]`."""
        query = self.queries[...]
        position = self.tile.position(self.t) + query
        position = jnp.where(query < self.tile.queries(self.t), position, PADDING)
        low, high = self.plan.options.bounds(position)
        R, S = self.plan.rows, self.plan.block_tokens
        key = j * S + lax.broadcasted_iota(jnp.int32, (R, S), 1)
        return (key >= low) & (key < high)

    def _dot(self, a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
        highest = lax.Precision.HIGHEST if self.plan.dtype == jnp.float32 else None
        sums = jnp.int32 if self.plan.dtype == jnp.int8 else jnp.float32
        return lax.dot_general(
            a,
            b,
            (((axis_a,), (axis_b,)), ((), ())),
            precision=highest,
            preferred_element_type=sums,
        )
