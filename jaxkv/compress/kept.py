"""Where one sequence's tokens are, and which of them a method keeps."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxkv.arith import ceil_div

MIN_WIDTH = 8  # pages of the narrowest tables
MAX_SPANS = 16  # most spans of protected tokens

Spans = Sequence[tuple[int, int]]


def num_protected(spans: Spans) -> int:
    """Returns the number of tokens in the union of some spans `[start, end)`."""
    total = covered = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, covered))
        covered = max(covered, end)
    return total


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence's row of the page tables.

    Attributes:
      tables: `[groups, M]` int32, page ids.
      dropped: `[groups]` int32, number of tokens that each layer group has dropped.
      num_tokens: int32 scalar, length of the sequence, dropped tokens included.
    """

    tables: Any
    dropped: Any
    num_tokens: Any

    def narrow(self, page_size: int) -> "Row":
        """Returns the row without the columns that no token uses; for host arrays. Widths are
        powers of two, so that few are compiled."""
        M = self.tables.shape[1]
        used = ceil_div(int(self.num_tokens - self.dropped.min()), page_size)
        width = min(M, max(MIN_WIDTH, 1 << (used - 1).bit_length()))
        return dataclasses.replace(self, tables=self.tables[:, :width])


class Kept(NamedTuple):
    """Which tokens are kept, in the layers that drop tokens (the leading axis of each array).

    Attributes:
      slots: `[layers, K, S]` int32, for each KV head the slots of the kept tokens, ascending, then
        S as padding.
      positions: `[layers, K, S]` int32, their positions in the sequence.
      counts: `[layers, K]` int32, the number of kept tokens.
      statistics: for each layer the method's statistics, if the next choice goes on from them.
    """

    slots: jax.Array
    positions: jax.Array
    counts: jax.Array
    statistics: tuple[Any, ...]
