"""The shapes that a step may have. There are few, which bounds how often a step is compiled.

    decode   every sequence has one token: T = B = a bucket of sequences
    mixed    some sequence has a chunk of its prompt: T = a bucket of tokens, B = the most sequences

A deterministic step is always mixed and always has DETERMINISTIC_ROWS tokens. Within one program a
row's bits depend only on that row if the matrix products have that many rows. Programs of different
T may differ, since XLA chooses for each in which order it sums the squares of a norm.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from jaxkv.engine.step_plan import StepPlan

DETERMINISTIC_ROWS = 64
MIN_MIXED_TOKENS = 64
MAX_BUCKETS = 6  # of each kind
MIXED_QUERY_TILE = 64


def buckets(smallest: int, largest: int) -> tuple[int, ...]:
    """At most MAX_BUCKETS sizes from `smallest` to `largest`, a fixed factor of 2^i apart."""
    for factor in (2**i for i in range(1, 64)):
        sizes = []
        size = smallest
        while size < largest:
            sizes.append(size)
            size *= factor
        if len(sizes) < MAX_BUCKETS:
            return (*sizes, largest)
    raise ValueError(f"no buckets from {smallest} to {largest}")


def halve_widest_gaps(sizes: tuple[int, ...], least: int) -> tuple[int, ...]:
    """Adds sizes until there are MAX_BUCKETS, each in the middle of the widest gap (the last one of
    equal gaps). Stops when a gap would become smaller than `least`."""
    sizes = tuple(sorted(sizes))
    while len(sizes) < MAX_BUCKETS:
        gaps = list(pairwise(sizes))
        low, high = max(gaps, key=lambda gap: (gap[1] - gap[0], gap[1]), default=(0, 0))
        if high - low < 2 * least:
            break
        sizes = tuple(sorted((*sizes, (low + high) // 2)))
    return sizes


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The static shape of a step.

    Attributes:
      num_tokens: T.
      num_sequences: B.
      query_tile: query rows per tile in attention.
    """

    num_tokens: int
    num_sequences: int
    query_tile: int


@dataclass(frozen=True)
class ShapeTable:
    """The shapes that an engine may compile.

    Attributes:
      decode: sizes of decode steps, ascending; empty if all steps are mixed.
      mixed: numbers of tokens of mixed steps, ascending.
      max_sequences: B of mixed steps.
    """

    decode: tuple[int, ...]
    mixed: tuple[int, ...]
    max_sequences: int

    @classmethod
    def plan(cls, max_sequences: int, token_budget: int, *, deterministic: bool) -> "ShapeTable":
        """The shapes for steps of up to `token_budget` tokens; deterministic steps have fewer."""
        if deterministic:
            return cls((), (DETERMINISTIC_ROWS,), max_sequences)
        mixed = buckets(MIN_MIXED_TOKENS, max(token_budget, MIN_MIXED_TOKENS))
        mixed = halve_widest_gaps(mixed, MIN_MIXED_TOKENS)
        return cls(buckets(1, max_sequences), mixed, max_sequences)

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens in a step."""
        return self.mixed[-1]

    def fit(self, plan: StepPlan) -> StepShape:
        """The smallest shape that holds a plan."""
        num_sequences, num_tokens = len(plan.sequences), plan.total_tokens
        if self.decode and plan.is_decode:
            return self._decode(next(size for size in self.decode if size >= num_sequences))
        return self._mixed(next(size for size in self.mixed if size >= num_tokens))

    def __iter__(self) -> Iterator[StepShape]:
        yield from map(self._decode, self.decode)
        yield from map(self._mixed, self.mixed)

    def __len__(self) -> int:
        return len(self.decode) + len(self.mixed)

    def _decode(self, size: int) -> StepShape:
        return StepShape(num_tokens=size, num_sequences=size, query_tile=1)

    def _mixed(self, size: int) -> StepShape:
        return StepShape(
            num_tokens=size, num_sequences=self.max_sequences, query_tile=MIXED_QUERY_TILE
        )
