"""Which tokens of one sequence are dropped, and when. `dropping` drops them."""

from dataclasses import dataclass, field

import numpy as np

from jaxkv.compress.kept import Kept
from jaxkv.engine.completion import Completion
from jaxkv.prefix import Snapshot, SnapshotKey, TokenDropper

NEVER = 1 << 60  # more tokens than a sequence has


@dataclass(slots=True, kw_only=True)
class DropState:
    """Which tokens of one sequence are dropped, and when.

    Attributes:
      dropper: has the snapshots.
      completion: the sequence's completion; it reports how many tokens were dropped.
      priority: priority of its request.
      context: how many of its first tokens lose some, once all of them are computed.
      interval: after how many further tokens more are dropped; NEVER to drop once.
      snapshot_key: names the snapshot with what is left of the context.
      next_at: number of computed tokens at which tokens are dropped next.
      last_at: the same for the last time; 0 before.
      kept: the tokens that were kept then; None while all are there.
    """

    dropper: TokenDropper
    completion: Completion
    priority: int
    context: int
    interval: int
    snapshot_key: SnapshotKey
    next_at: int = field(init=False)
    last_at: int = field(init=False)
    kept: Kept | None = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """The sequence has given up its row: it computes its tokens again, and drops them again."""
        self.next_at, self.last_at, self.kept = self.context, 0, None

    @property
    def has_dropped(self) -> bool:
        """The row holds only some of the computed tokens."""
        return self.kept is not None

    def limit(self, num_computed: int, num_tokens: int) -> int:
        """How many of the next tokens may be computed before some are dropped."""
        return min(num_tokens, self.next_at - num_computed)

    def cached_tokens(self, first_wanted: int) -> int:
        """The whole context if the sequence can start from a snapshot of it, else 0.

        Args:
          first_wanted: see `Sequence.first_wanted`.
        """
        return self.context if self._usable(first_wanted) is not None else 0

    def resume(self, row: int, first_wanted: int) -> tuple[int, tuple[int, ...]] | None:
        """Fills an empty row with what another sequence has left of the same context.

        Args:
          row: the row.
          first_wanted: see `Sequence.first_wanted`.

        Returns:
          How many tokens are computed then, and for each layer group the page to copy onto the
          row's next one, 0 for none. None if there is no such snapshot.
        """
        if self._usable(first_wanted) is None:
            return None
        found = self.dropper.match(row, self.snapshot_key, priority=self.priority)
        assert found is not None
        self.book(self.context, found[0].kept)
        return self.context, found[1]

    def book(self, num_tokens: int, kept: Kept | None) -> None:
        """Books that of `num_tokens` computed tokens only `kept` are left; None if all are."""
        if kept is not None:
            self.kept, self.last_at = kept, num_tokens
            self.completion.dropped_tokens = num_tokens - float(np.asarray(kept.counts).mean())
        self.next_at = num_tokens + self.interval

    def snapshot(self) -> Snapshot | None:
        """What is left of the context of another sequence with the same key."""
        return self.dropper.get(self.snapshot_key)

    def _usable(self, first_wanted: int) -> Snapshot | None:
        """The snapshot, if the sequence needs no logits at a token of the context."""
        return self.snapshot() if first_wanted > self.context else None
