"""The sequences that wait for a row of the page tables, in order of arrival."""

from collections.abc import Iterator

from jaxkv.engine.sequence import Sequence


class WaitingQueue:
    """Preempted sequences, the one that was preempted last first, and then new ones by arrival.

    Attributes:
      num_admitted: sequences that left the queue to run.
    """

    def __init__(self) -> None:
        self.num_admitted = 0
        self._new: dict[Sequence, int] = {}  # with the admission that would be its own in order
        self._preempted: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._new) + len(self._preempted)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.preempted
        yield from self._new

    @property
    def preempted(self) -> list[Sequence]:
        """Sequences that ran before; they go first."""
        return self._preempted[::-1]

    @property
    def new(self) -> list[Sequence]:
        """Sequences that have not started yet, first come first."""
        return list(self._new)

    def add(self, sequence: Sequence) -> None:
        """Adds a new sequence."""
        self._new[sequence] = self.num_admitted + len(self)

    def put_back(self, sequence: Sequence) -> None:
        """Adds a sequence that was running."""
        sequence.was_preempted = True
        self._preempted.append(sequence)

    def admit(self, sequence: Sequence) -> None:
        """Takes out a sequence that runs now."""
        self.remove(sequence)
        self.num_admitted += 1

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence, if it is there."""
        if sequence in self._new:
            del self._new[sequence]
        elif sequence in self._preempted:
            self._preempted.remove(sequence)

    def arrival(self, sequence: Sequence) -> int:
        """The admission at which a new sequence would run if every sequence kept its turn."""
        return self._new[sequence]
