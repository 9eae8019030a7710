"""What a step computes, as the scheduler hands it to the engine."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from jaxkv.engine.sequence import Sequence


def int32(values: Iterable[int]) -> NDArray[np.int32]:
    """An int32 array of Python integers; four times as fast as `np.array`."""
    return np.frombuffer(array("i", values), np.int32)


@dataclass(frozen=True)
class PageCopy:
    """A page to copy before a step writes any page: page ids of one layer group."""

    group: int
    source: int
    target: int


@dataclass(frozen=True)
class StepPlan:
    """The tokens that one step computes. Every sequence has pages for its tokens.

    Attributes:
      sequences: the B sequences of the step.
      num_tokens: how many of its uncomputed tokens each sequence computes.
      rows: `[B]`, the row of each sequence in the page tables.
      lengths: `[B]`, the computed tokens of each sequence after the step.
      started: the sequences that got their row in this plan.
      copies: pages to copy first. All sources are read before any target is written.
    """

    sequences: tuple[Sequence, ...]
    num_tokens: tuple[int, ...]
    rows: NDArray[np.int32]
    lengths: NDArray[np.int32]
    started: tuple[Sequence, ...] = ()
    copies: tuple[PageCopy, ...] = ()

    @cached_property
    def total_tokens(self) -> int:
        """Query tokens of the step."""
        return sum(self.num_tokens)

    @property
    def is_decode(self) -> bool:
        """Each sequence has one token."""
        return self.total_tokens == len(self.sequences)

    def tokens(self) -> NDArray[np.int32]:
        """`[total_tokens]`, the step's query tokens, sequence by sequence."""
        ends = zip(self.sequences, self.lengths.tolist(), strict=True)
        if self.is_decode:
            return int32([sequence.tokens[end - 1] for sequence, end in ends])
        shares = zip(ends, self.num_tokens, strict=True)
        chunks = [sequence.tokens[end - n : end] for (sequence, end), n in shares]
        return np.frombuffer(b"".join(chunks), np.int32)

    @cached_property
    def wants_logprobs(self) -> bool:
        """Some sequence reports its most likely tokens."""
        reported = [sequence for sequence in self.sequences if sequence.is_reported]
        return any(sequence.request.logprobs is not None for sequence in reported)

    @property
    def seen(self) -> dict[int, NDArray[np.uint8]]:
        """The bit sets of `Sequence.seen`, by the sequence's place in the step."""
        return {i: s.seen.bits for i, s in enumerate(self.sequences) if s.seen is not None}


@dataclass
class Draft:
    """A plan in the making.

    Attributes:
      budget: tokens that are left.
      shares: tokens of each sequence, in batch order.
      sources: the sequences that start, and for each layer group the page to copy onto the next
        page of their row; 0 for none.
    """

    budget: int
    shares: dict[Sequence, int] = field(default_factory=dict)
    sources: dict[Sequence, tuple[int, ...]] = field(default_factory=dict)

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Gives a sequence a share of the budget."""
        self.shares[sequence] = num_tokens
        self.budget -= num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence's share back, if it has one."""
        self.budget += self.shares.pop(sequence, 0)
        self.sources.pop(sequence, None)
