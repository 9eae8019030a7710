"""The arrays of a step, in one int32 buffer: they go to the device in one transfer."""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import jax
import numpy as np

from jaxkv.engine.sampling import NUM_CONTROLS, POSITION
from jaxkv.engine.shapes import StepShape
from jaxkv.engine.step_plan import StepPlan, int32
from jaxkv.prefix import PageTables


class StepArrays[A](NamedTuple):
    """The arrays of a step of T tokens, B sequences and G layer groups, all int32.

    Attributes:
      tokens: `[T]`, see `jaxkv.attention.StepInputs`, as for the next three and `page_tables`.
      seq_lens: `[B]`.
      kv_lens: `[G, B]`.
      query_starts: `[B + 1]`.
      controls: `[B, NUM_CONTROLS]`, sampling parameters as `pack_controls` makes them.
      want_top: `[1]`, 1 if some sequence reports its most likely tokens.
      page_tables: `[G, B, M]`.
    """

    tokens: A
    seq_lens: A
    kv_lens: A
    query_starts: A
    controls: A
    want_top: A
    page_tables: A


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """Where each array of a step is in the buffer.

    Attributes:
      shape: shape of the step.
      num_groups: G, layer groups.
      max_pages: M, pages per table row.
    """

    shape: StepShape
    num_groups: int
    max_pages: int

    @property
    def size(self) -> int:
        """Entries of the buffer."""
        return self._spans[-1][0].stop

    def split[A: (np.ndarray, jax.Array)](self, buffer: A) -> StepArrays[A]:
        """The arrays of a buffer `[size]`: views of a host buffer, slices of a traced one."""
        return StepArrays(*[buffer[span].reshape(shape) for span, shape in self._spans])

    @cached_property
    def _spans(self) -> list[tuple[slice, tuple[int, ...]]]:
        T, B = self.shape.num_tokens, self.shape.num_sequences
        shapes = StepArrays(
            tokens=(T,),
            seq_lens=(B,),
            kv_lens=(self.num_groups, B),
            query_starts=(B + 1,),
            controls=(B, NUM_CONTROLS),
            want_top=(1,),
            page_tables=(self.num_groups, B, self.max_pages),
        )
        ends = list(accumulate(map(math.prod, shapes)))
        return [
            (slice(end - math.prod(shape), end), shape)
            for end, shape in zip(ends, shapes, strict=True)
        ]


def plan_buffer(
    plan: StepPlan, layout: StepLayout, tables: PageTables, controls: np.ndarray
) -> np.ndarray:
    """Makes the buffer of a plan, padded to the shape of a layout.

    Args:
      plan: the plan.
      layout: layout of the buffer.
      tables: with the rows of the plan's sequences.
      controls: `[R + 1, NUM_CONTROLS]` int32, sampling parameters of each row; the last row is for
        padding.

    Returns:
      `[layout.size]` int32.
    """
    buffer = np.zeros(layout.size, np.int32)
    arrays = layout.split(buffer)
    n = len(plan.sequences)
    rows, lengths = plan.rows, plan.lengths
    arrays.tokens[: plan.total_tokens] = plan.tokens()
    arrays.seq_lens[:n] = lengths
    dropped = tables.dropped.take(rows, axis=1, mode="clip")
    np.subtract(lengths, dropped, out=arrays.kv_lens[:, :n])
    arrays.query_starts[1 : n + 1] = int32(accumulate(plan.num_tokens))
    arrays.query_starts[n + 1 :] = plan.total_tokens
    arrays.controls[:n] = controls[rows]
    arrays.controls[:n, POSITION] = lengths  # right for complete prompts; others draw nothing
    arrays.controls[n:] = controls[-1]
    arrays.want_top[0] = plan.wants_logprobs
    for part, table in zip(arrays.page_tables, tables.pages, strict=True):
        np.take(table, rows, axis=0, out=part[:n], mode="clip")
    return buffer


def idle_buffer(layout: StepLayout, controls: np.ndarray) -> np.ndarray:
    """Makes the buffer of a step without consequences: as many sequences as the shape holds compute
    one token each, and all of them write to the null page.

    Args:
      layout: layout of the buffer.
      controls: `[NUM_CONTROLS]` int32, sampling parameters for padding.
    """
    buffer = np.zeros(layout.size, np.int32)
    arrays = layout.split(buffer)
    T, B = layout.shape.num_tokens, layout.shape.num_sequences
    n = min(T, B)
    arrays.seq_lens[:n] = 1
    arrays.kv_lens[:, :n] = 1
    arrays.query_starts[:] = np.minimum(np.arange(B + 1), n)
    arrays.controls[:] = controls
    return buffer
