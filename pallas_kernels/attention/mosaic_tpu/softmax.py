"""The arithmetic of the TPU kernel: the online softmax of a tile over blocks of keys."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels.arith import LOG2_E, Ref, Scalar
from pallas_kernels.attention.mosaic_tpu import operands, parameters
from pallas_kernels.attention.mosaic_tpu.plan import Column, Plan, TileScalars
from pallas_kernels.attention.mosaic_tpu.rows import Rows
from pallas_kernels.attention.ragged import PADDING
from pallas_kernels.online_softmax import finite_or_zero
from pallas_kernels.pages import LANES


class SoftmaxScratch(NamedTuple):
    """Memory of `Softmax`: the state of each group, and what is prepared once per tile or block.

    Attributes:
      maximum: `[groups, rows, LANES]`, the maximum of a row's logits, the same in all lanes.
      total: like `maximum`, the sum of a row's exponentials, as a partial sum per lane.
      weighted: `[groups, rows, packed_heads * out_lanes]`, the weighted sum of V.
      q: `[groups, q_rows, packed_heads * lanes]`, the query rows laid out for a group, and in parts
        if products are computed in the type of codes; None if they are used as they come.
      factor: like `maximum`, the factor of a row's logits; None if q is.
      q_sum: like `maximum`, the sum of a row's q, by which minima of K are multiplied; None if
        codes have no minima.
      v_minima: like `total`, the sum of V's minima by weight; None if codes have no minima.
      scales: `[block_tokens / LANES, 2K, LANES]`, the scales of a block by head; None if pages have
        none.
      minima: like `scales`, the minima.
    """

    maximum: Ref
    total: Ref
    weighted: Ref
    q: Ref | None
    factor: Ref | None
    q_sum: Ref | None
    v_minima: Ref | None
    scales: Ref | None
    minima: Ref | None

    @classmethod
    def of(cls, plan: Plan, q_lanes: int, has_parameters: bool) -> "SoftmaxScratch":
        """Returns the types of the memory, for query rows of `q_lanes` elements."""

        def of_groups(rows: int, lanes: int, dtype: DTypeLike = jnp.float32) -> Any:
            return pltpu.VMEM((plan.num_groups, rows, lanes), dtype)

        of_rows = of_groups(plan.rows, LANES)
        keys = plan.block_tokens // LANES, 2 * plan.num_kv_heads, LANES
        of_keys = pltpu.VMEM(keys, jnp.float32)
        q = of_groups(plan.q_rows, plan.packed_heads * q_lanes, plan.dtype)
        return cls(
            maximum=of_rows,
            total=of_rows,
            weighted=of_groups(plan.rows, plan.packed_heads * plan.out_lanes),
            q=q if plan.prepares_q else None,
            factor=of_rows if plan.prepares_q else None,
            q_sum=of_rows if plan.affine else None,
            v_minima=of_rows if plan.affine else None,
            scales=of_keys if has_parameters else None,
            minima=of_keys if plan.affine else None,
        )


@dataclass(frozen=True)
class Softmax:
    """The online softmax of tile t, with logits in units of log 2.

    The KV heads of a group share one matrix product. Their keys are concatenated along lanes, and
    each query row is 0 in the lanes of other heads (`_spread`). The product with V gives each row
    the values of all heads of the group, of which only its own head's are used (`_own`).

    Attributes:
      plan: sizes.
      tiles: scalars of all tiles.
      t: the tile.
      rows: the tile's query rows and results.
      queries: `[rows, 1]` int32, index of each row's query within the tile.
      sink: `[groups, rows, 1]` float32, one more logit per row, in units of log 2.
      factors: `[2K]` float32 in scalar memory, the factors of logits and of outputs of each KV
        head, alternating.
      keys, stored: the buffers of keys and of stored parameters, see `FetchScratch`.
      scratch: the state.
    """

    plan: Plan
    tiles: TileScalars[Column]
    t: Scalar
    rows: Rows
    queries: Ref
    sink: Ref
    factors: Ref
    keys: Ref
    stored: Sequence[Ref]
    scratch: SoftmaxScratch

    def begin(self) -> None:
        """Prepares the tile's query rows, and sets the state to that of no keys."""
        state = self.scratch
        for g in range(self.plan.num_groups):
            q, factor = self._spread(self.rows.read(g)), self._factor(g, 0)
            if state.q_sum is not None:
                q_sum = q.astype(jnp.float32).sum(axis=1, keepdims=True)
                state.q_sum[g] = jnp.broadcast_to(q_sum * factor, state.maximum.shape[1:])
            if self.plan.splits:
                q, of_parts = operands.split(q.astype(jnp.float32), self.plan.dtype)
                factor = of_parts * factor * self.plan.unit
            if state.q is not None and state.factor is not None:
                state.q[g] = q
                state.factor[g] = jnp.broadcast_to(factor, state.maximum.shape[1:])
        if state.v_minima is not None:
            state.v_minima[...] = jnp.zeros(state.v_minima.shape, jnp.float32)
        state.maximum[...] = jnp.full(state.maximum.shape, -jnp.inf, jnp.float32)
        state.total[...] = jnp.zeros(state.total.shape, jnp.float32)
        state.weighted[...] = jnp.zeros(state.weighted.shape, jnp.float32)

    def add(
        self,
        slot: Scalar,
        j: Scalar,
        *,
        masked: bool = False,
        between: Callable[[int], None] = lambda group: None,
    ) -> None:
        """Adds block j of the keys.

        Args:
          slot: index of the buffer that holds the block.
          j: the block.
          masked: some row does not see all of its keys.
          between: is called before the second product of each group, with the group. It does scalar
            work, which the compiler schedules under the products.
        """
        # The first products of some groups go ahead: their softmax then runs under other products.
        state, groups, logits = self.scratch, self.plan.num_groups, {}
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
            if state.minima is not None:
                self._add_minima(g, weights * self._of_rows(state.minima, g, 1), decay)
            if state.scales is not None:
                weights = weights * self._of_rows(state.scales, g, 1)
            state.weighted[g] = state.weighted[g] * decay + self._weighted(slot, g, weights)

    def finish(self) -> None:
        """Normalises and writes the results; here the sink joins the denominator, once."""
        state = self.scratch
        for g in range(self.plan.num_groups):
            m, sink = state.maximum[g][:, :1], self.sink[g]
            m_new = finite_or_zero(jnp.maximum(m, sink))
            decay = jnp.exp2(m - m_new)
            total = state.total[g].sum(axis=1, keepdims=True) * decay + jnp.exp2(sink - m_new)
            safe = jnp.where(total == 0.0, 1.0, total)
            weighted = self._own(state.weighted[g])
            if state.v_minima is not None:
                weighted += state.v_minima[g].sum(axis=1, keepdims=True)
            out = weighted * (decay / safe * self._factor(g, 1))
            self.rows.write(g, out, m_new / LOG2_E + jnp.log(total))

    def _factor(self, g: int, which: int) -> jax.Array:
        """The factor of a group's logits (0) or outputs (1), a scalar or `[rows, 1]`."""
        return self._by_row([self.factors[2 * h + which] for h in self.plan.group_of(g)])

    def _spread(self, rows: jax.Array) -> jax.Array:
        """Places each row of a group in the lanes of its head's keys, with 0 in all others."""
        zeros = jnp.zeros_like(rows)
        heads = range(self.plan.packed_heads)
        own = [self._by_row([rows if h == n else zeros for h in heads]) for n in heads]
        return jnp.concatenate(own, axis=1)

    def _own(self, weighted: jax.Array) -> jax.Array:
        """Takes from each row of a group its own head's values, `[rows, out_lanes]`."""
        return self._by_row(jnp.split(weighted, self.plan.packed_heads, axis=1))

    def _by_row(self, heads: Sequence[jax.Array]) -> jax.Array:
        """Takes each row of a group from the array of its head; arrays have all rows or one."""
        taken = heads[0]
        row = lax.broadcasted_iota(jnp.int32, (self.plan.rows, 1), 0)
        for n, array in enumerate(heads[1:], start=1):
            taken = jnp.where(row >= n * self.plan.head_rows, array, taken)
        return taken

    def _of_rows(self, numbers: Ref, g: int, kv_index: int) -> jax.Array:
        """The parameters of the keys (0) or values (1) of a group's heads, `[rows or 1,
        block_tokens]`."""
        rows = [2 * h + kv_index for h in self.plan.group_of(g)]
        return self._by_row([parameters.of_head(numbers, row) for row in rows])

    def _operand(self, slot: Scalar, g: int, kv_index: int) -> jax.Array:
        """The pieces with K (0) or V (1) of a group's heads, concatenated, `[block_tokens, ..]`."""
        plan = self.plan

        def read(h: int, x: int) -> jax.Array:
            rows = self.keys[slot, h, x, : plan.block_tokens]
            if plan.affine:
                rows = operands.halve(rows, kv_index)
            return operands.read_as(rows, plan.dtype)

        pieces = plan.v_pieces if kv_index else plan.k_pieces
        return jnp.concatenate([read(h, x) for h in plan.group_of(g) for x in pieces], axis=1)

    def _lay_out_parameters(self, slot: Scalar) -> None:
        """Brings the parameters of a block's codes into the order of heads, if pages have some."""
        scales, minima = self.scratch.scales, self.scratch.minima
        if scales is None:
            return
        stored = parameters.by_head(self.stored[0].at[slot], self.plan.page_size)
        if minima is None:
            parameters.store(stored, scales)
            return
        for shift, numbers in ((0, scales), (16, minima)):
            halves = [parameters.from_float16(bits >> shift & 0xFFFF) for bits in stored]
            parameters.store(halves, numbers)

    def _logits(self, slot: Scalar, g: int) -> jax.Array:
        """The logits of a block's keys, `[rows, block_tokens]`."""
        state, cap = self.scratch, self.plan.options.soft_cap
        if state.q is not None and state.factor is not None:
            q, factor = state.q[g], state.factor[g][:, :1]
        else:
            q, factor = self.rows.read(g), self._factor(g, 0)
        x = self._dot(q, self._operand(slot, g, 0), 1, 1)
        if self.plan.splits:
            x = operands.join(x, self.plan.dtype)
        x = x * factor
        if state.scales is not None:
            x = x * self._of_rows(state.scales, g, 0)
        if state.minima is not None and state.q_sum is not None:
            x += state.q_sum[g][:, :1] * self._of_rows(state.minima, g, 0)
        return x if cap is None else jnp.tanh(x) * (cap * LOG2_E)

    def _weigh(self, g: int, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the weights of a block's keys, and the factor on all sums so far."""
        m = self.scratch.maximum[g]
        m_new = jnp.maximum(m, logits.max(axis=1, keepdims=True))
        finite = finite_or_zero(m_new)
        decay = jnp.exp2(m - finite)
        weights, total = [], self.scratch.total[g] * decay
        for start in range(0, self.plan.block_tokens, LANES):
            weights.append(jnp.exp2(logits[:, start : start + LANES] - finite))
            total += weights[-1]
        self.scratch.maximum[g], self.scratch.total[g] = m_new, total
        return jnp.concatenate(weights, axis=1), decay[:, :1]

    def _weighted(self, slot: Scalar, g: int, weights: jax.Array) -> jax.Array:
        """The weighted sum of a block's values, `[rows, packed_heads * out_lanes]`."""
        v = self._operand(slot, g, 1)
        if self.plan.splits:
            weights, factor = operands.split_positive(weights, self.plan.dtype)
            weighted = operands.join(self._dot(weights, v, 1, 0), self.plan.dtype)
            return weighted * (factor * self.plan.unit)
        return self._dot(weights.astype(self.plan.dtype), v, 1, 0)

    def _add_minima(self, g: int, weighted: jax.Array, decay: jax.Array) -> None:
        """Adds the weighted minima of a block's values, `[rows, block_tokens]`."""
        minima = self.scratch.v_minima
        assert minima is not None
        parts = range(0, self.plan.block_tokens, LANES)
        added = sum(weighted[:, start : start + LANES] for start in parts)
        minima[g] = minima[g] * decay + added

    def _visible(self, j: Scalar) -> jax.Array:
        """Which keys of block j each row sees, `[rows, block_tokens]`."""
        query = self.queries[...]
        position = self.tiles.position[self.t] + query
        position = jnp.where(query < self.tiles.queries[self.t], position, PADDING)
        low, high = self.plan.options.bounds(position)
        shape = self.plan.rows, self.plan.block_tokens
        key = j * self.plan.block_tokens + lax.broadcasted_iota(jnp.int32, shape, 1)
        return (key >= low) & (key < high)

    def _dot(self, a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
        """The product of two matrices over an axis of each, summed in float32 or int32."""
        highest = lax.Precision.HIGHEST if self.plan.dtype == jnp.float32 else None
        sums = jnp.int32 if self.plan.dtype == jnp.int8 else jnp.float32
        return lax.dot_general(
            a,
            b,
            (((axis_a,), (axis_b,)), ((), ())),
            precision=highest,
            preferred_element_type=sums,
        )
