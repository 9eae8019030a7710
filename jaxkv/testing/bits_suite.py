"""What may change around a row of attention without changing one bit of it: a pytest class.

The bits of a row depend only on its query and its keys. They do not depend on the batch around it,
on padding, on where its pages lie, on their size, on the width of the table, or on whether the row
is a decoded token or in the middle of a prefill. The class is for backends that keep this rule when
they are given `row_options`.
"""

from collections.abc import Sequence
from typing import ClassVar

import chex
import numpy as np
import pytest

from jaxkv.testing.attention import LENGTHS, MIXED, SINKS
from jaxkv.testing.attention_suite import AttentionSuite
from jaxkv.testing.batches import Batch

PLAIN = {}
RICH = dict(window=37, sinks=SINKS, soft_cap=1.5)
EVERY_OPTION = pytest.mark.parametrize(
    "options", [PLAIN, RICH], ids=["plain", "window, sinks and cap"]
)


def assert_same_bits(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> None:
    views = [[array.view(np.uint32) for array in pair] for pair in (got, want)]
    chex.assert_trees_all_equal(*views)


class BitsSuite(AttentionSuite):
    """The properties of bits.

    Attributes:
      row_options: options of the call under which a row's bits are its own.
    """

    row_options: ClassVar[dict[str, int]] = {}

    def bits(self, batch: Batch, **options) -> tuple[np.ndarray, np.ndarray]:
        """Out and lse; `P`, `M`, `seed` and `layout` say how the batch is placed."""
        where = {key: options.pop(key) for key in ("P", "M", "seed", "layout") if key in options}
        placed = self.place(batch, window=options.get("window"), **where)
        return self.attend(batch, placed, **self.row_options, **options)

    @EVERY_OPTION
    def test_the_same_call_gives_the_same_bits_wherever_the_pages_lie(self, options):
        batch = self.batch(LENGTHS, MIXED, T=48)
        want = self.bits(batch, seed=0, **options)
        assert_same_bits(self.bits(batch, seed=0, **options), want)
        for seed in (1, 2):
            assert_same_bits(self.bits(batch, seed=seed, **options), want)

    @pytest.mark.parametrize(
        "P, M, options",
        [(8, 64, PLAIN), (64, 8, RICH), (128, 3, RICH)],
        ids=["P 8", "P 64", "P 128"],
    )
    def test_another_page_size_and_table_width_give_the_same_bits(self, P, M, options):
        batch = self.batch(LENGTHS, MIXED, T=48)
        assert_same_bits(self.bits(batch, P=P, M=M, **options), self.bits(batch, **options))

    @EVERY_OPTION
    def test_permuting_the_batch_permutes_the_rows_and_no_bit(self, options):
        batch = self.batch(LENGTHS, MIXED, T=48)
        out, lse = self.bits(batch, **options)
        for order in ([7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 6, 1, 7, 5, 2, 4]):
            permuted = batch.select(order)
            rows = np.concatenate([np.arange(48)[batch.rows(b)] for b in order])
            got = self.bits(permuted, **options)
            assert_same_bits([x[: len(rows)] for x in got], (out[rows], lse[rows]))

    @pytest.mark.parametrize("b", [3, 5], ids=["16 queries", "1 query"])
    def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch(self, b):
        batch = self.batch(LENGTHS, MIXED, T=48)
        out, lse = self.bits(batch, **RICH)
        rows = batch.rows(b)
        alone = self.bits(batch.select([b], T=MIXED[b]), **RICH)
        assert_same_bits(alone, (out[rows], lse[rows]))

    def test_a_token_decoded_alone_has_the_bits_of_prefill_whatever_the_sizes(self):
        """Sizes at which XLA's CPU backend fuses a group of one tile and of two differently."""
        whole = self.batch([300], [300], T=300, heads=(32, 8), D=128)
        out, lse = self.bits(whole)
        last = Batch(q=whole.q[-1:], keys=whole.keys, values=whole.values, q_lens=[1])
        assert_same_bits(self.bits(last), (out[-1:], lse[-1:]))

    def test_prefill_in_chunks_or_token_by_token_gives_the_bits_of_one_prefill(self):
        S = 200
        whole = self.batch([S], [S], T=S)
        want_out, want_lse = self.bits(whole, **RICH)
        keys, values = whole.keys[0], whole.values[0]

        def step(spans: list[tuple[int, int]], T: int) -> None:
            """Runs positions [start, end) of the sequence, each span a sequence of the batch."""
            rows = np.concatenate([np.arange(*span) for span in spans])
            q = np.full_like(whole.q, np.nan, shape=(T, *whole.q.shape[1:]))
            q[: len(rows)] = whole.q[rows]
            batch = Batch(
                q=q,
                keys=[keys[:end] for _, end in spans],
                values=[values[:end] for _, end in spans],
                q_lens=[end - start for start, end in spans],
            )
            got = self.bits(batch, **RICH)
            assert_same_bits([x[: len(rows)] for x in got], (want_out[rows], want_lse[rows]))

        step([(p, p + 1) for p in (0, 1, 63, 64, 127, 128, 150, 199)], T=8)
        step([(0, 50), (50, 113), (113, 114), (114, 200)], T=S)
        step([(113, 200), (0, 64), (64, 66), (70, 71)], T=S)
