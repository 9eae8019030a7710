"""The sequences that wait for a row, in the order in which they are to be tried.

    fcfs      first come, first served
    lpm       longest cached prefix first, so that what is cached is used before it is evicted; a
              sequence that was overtaken AGE_GUARD times goes before all that would overtake it
    priority  highest priority first, and of equals the first

Preempted sequences come first in every order: they keep their turn.
"""

from collections.abc import Callable, Iterator

from jaxkv.engine.sequence import Sequence

SCHEDULING = ("lpm", "fcfs", "priority")
AGE_GUARD = 16
LOOKAHEAD = 128  # sequences whose cached prefix is looked up; those behind wait their turn


class WaitingQueue:
    """Waiting sequences.

    A sequence's `arrival` is the admission before which it would have its turn if nobody overtook
    anybody.
    """

    def __init__(self, scheduling: str, cached_tokens: Callable[[Sequence], int]):
        """Makes an empty queue.

        Args:
          scheduling: of SCHEDULING.
          cached_tokens: how many of a sequence's tokens are cached.
        """
        self._scheduling = scheduling
        self._cached_tokens = cached_tokens
        self._sequences: dict[Sequence, None] = {}
        self._preempted: list[Sequence] = []
        self._num_admitted = 0

    def __len__(self) -> int:
        return len(self._sequences) + len(self._preempted)

    def __iter__(self) -> Iterator[Sequence]:
        yield from reversed(self._preempted)
        yield from self._sequences

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._sequences or sequence in self._preempted

    def add(self, sequence: Sequence) -> None:
        """A new sequence comes last."""
        sequence.arrival = self._num_admitted + len(self)
        self._sequences[sequence] = None

    def put_back(self, sequence: Sequence) -> None:
        """A sequence that was running comes first."""
        sequence.was_preempted = True
        self._preempted.append(sequence)

    def admit(self, sequence: Sequence) -> None:
        """Takes out a sequence that is running now."""
        self.remove(sequence)
        self._num_admitted += 1

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out."""
        if sequence in self._sequences:
            del self._sequences[sequence]
        elif sequence in self._preempted:
            self._preempted.remove(sequence)

    def in_order(self) -> list[Sequence]:
        """The sequences to try now, first to last."""
        waiting = list(self._sequences)
        if self._scheduling == "priority":
            waiting.sort(key=lambda sequence: -sequence.request.priority)
        elif self._scheduling == "lpm" and len(waiting) > 1:
            ahead = waiting[:LOOKAHEAD]
            ahead.sort(key=self._rank)
            waiting[:LOOKAHEAD] = ahead
        return [*reversed(self._preempted), *waiting]

    def _rank(self, sequence: Sequence) -> tuple[bool, int]:
        is_young = self._num_admitted - sequence.arrival < AGE_GUARD
        return is_young, -self._cached_tokens(sequence) if is_young else sequence.arrival
