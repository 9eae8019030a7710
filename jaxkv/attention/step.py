"""The inputs of one step, from which positions and slots follow on the device."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.attention.ragged import Ragged


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """One step over T query tokens of B sequences, concatenated; padding comes last.

    A layer group may have fewer tokens of a sequence than the sequence has, since a compression
    method dropped some. The remaining tokens fill the group's pages without gaps.

    Attributes:
      tokens: `[T]` int32 token ids; a padding row may hold anything.
      seq_lens: `[B]` int32, tokens of each sequence after this step, dropped ones included. They
        give the positions of the query tokens. 0 for an unused row.
      query_starts: `[B + 1]` int32, first row of each sequence; rows from `query_starts[B]` on are
        padding.
      page_tables: for each layer group `[B, M]` int32, logical page to physical page.
      kv_lens: `[groups, B]` int32, tokens in the pages of each layer group after this step.
    """

    tokens: jax.Array
    seq_lens: jax.Array
    query_starts: jax.Array
    page_tables: tuple[jax.Array, ...]
    kv_lens: jax.Array

    @classmethod
    def of(
        cls,
        tokens: jax.Array,
        seq_lens: jax.Array,
        query_starts: jax.Array,
        *page_tables: jax.Array,
    ) -> "StepInputs":
        """Makes the inputs of a step in which no layer group lacks a token.

        Example: two sequences; the first one decodes its token 17, the second one computes its
        first three tokens.

            tokens = jnp.array([11, 21, 22, 23], jnp.int32)
            seq_lens, query_starts = jnp.array([18, 3]), jnp.array([0, 1, 4])
            step = StepInputs.of(tokens, seq_lens, query_starts, jnp.array([[5, 2], [7, 0]]))

        Args:
          tokens: see `StepInputs`.
          seq_lens: see `StepInputs`.
          query_starts: see `StepInputs`.
          *page_tables: `[B, M]` int32 for each layer group.
        """
        kv_lens = jnp.broadcast_to(seq_lens, (len(page_tables), *seq_lens.shape))
        return cls(
            tokens=tokens,
            seq_lens=seq_lens,
            query_starts=query_starts,
            page_tables=page_tables,
            kv_lens=kv_lens,
        )

    def places(self) -> tuple[jax.Array, jax.Array]:
        """Sequence `[T]` and position `[T]` of each row, int32; position < 0 marks padding."""
        return self._rows(self.seq_lens)

    def _rows(self, lens: jax.Array) -> tuple[jax.Array, jax.Array]:
        ragged = Ragged(kv_lens=lens, query_starts=self.query_starts)
        return ragged.rows(self.tokens.shape[0])

    def slots(self, group: int, page_size: int) -> jax.Array:
        """`[T]` int32, the slot of each row in a group; 0, in the null page, for padding."""
        seq, place = self._rows(self.kv_lens[group])
        table = self.page_tables[group]
        page = table[seq, jnp.clip(place // page_size, 0, table.shape[1] - 1)]
        return jnp.where(place < 0, 0, page * page_size + place % page_size)
