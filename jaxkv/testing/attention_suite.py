"""What ragged paged attention must compute, whatever the backend: a pytest class to derive from.

    from jaxkv.testing import AttentionSuite

    class TestMine(AttentionSuite):
        backend = "mine"
        layouts = ("head_major",)

Every placement is poisoned (`batches.place`), so that each test also shows that nothing but live
tokens is read.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.testing import attention
from jaxkv.testing.attention import (
    DECODE,
    EVERY_LENGTH,
    GROUP_SIZES,
    KEY_PARTS,
    LENGTHS,
    MIXED,
    ONE_SEQUENCE,
    OPTIONS,
    RANDOM,
    SINKS,
    SIZES,
    WINDOWS,
    AttentionCase,
    assert_attention,
)
from jaxkv.testing.batches import Batch, Placed, naive_attention, place, random_batch
from pallas_kernels import KeyPart, Pages, merge_partials, ragged_paged_attention
from pallas_kernels.pages import LAYOUTS, Layout


def each(cases: dict[str, AttentionCase], *more: Any) -> pytest.MarkDecorator:
    """Runs a test with each case, under its name."""
    return pytest.mark.parametrize(
        "case", [*(pytest.param(c, id=n) for n, c in cases.items()), *more]
    )


class AttentionSuite:
    """The properties of values.

    Attributes:
      backend: the backend, or its name.
      tolerance: largest relative and absolute error of `out` against float64, by the dtype of q.
      lse_tolerance: the same for `lse`.
      layouts: the layouts of pages that the backend takes.
      batch_options: arguments of `random_batch`, for tests that have none of their own.
    """

    backend: ClassVar[Any]
    tolerance: ClassVar[dict[str, float]] = attention.TOLERANCE
    lse_tolerance: ClassVar[float] = attention.LSE_TOLERANCE
    layouts: ClassVar[tuple[Layout, ...]] = LAYOUTS
    batch_options: ClassVar[dict[str, Any]] = {}

    def batch(self, *lengths: Sequence[int], **options: Any) -> Batch:
        """See `random_batch`."""
        return random_batch(*lengths, **self.batch_options | options)

    def place(self, batch: Batch, *, layout: Layout | None = None, **where: Any) -> Placed:
        """See `place`; in the backend's first layout unless a test names another."""
        if layout not in (None, *self.layouts):
            pytest.skip(f"the backend takes no {layout} pages")
        return place(batch, layout=layout or self.layouts[0], **where)

    def skip_reason(self, batch: Batch, pages: Pages) -> str | None:
        """Why the backend does not take sizes or dtypes: the test is then skipped."""
        return None

    def attend(self, batch: Batch, placed: Placed, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """Out and lse, as the backend computes them."""
        if reason := self.skip_reason(batch, placed.pages):
            pytest.skip(reason)
        return attention.attend(_with_backend(self.backend), batch, placed, **options)

    def check(self, batch: Batch, placed: Placed, **options: Any) -> None:
        """Compares the backend's answer with the naive one."""
        out, lse = self.attend(batch, placed, **options)
        options.pop("shared", None)  # a hint that changes nothing
        assert_attention(out, lse, batch, self.tolerance, self.lse_tolerance, **options)

    def assert_close(self, got: Sequence[Any], want: Sequence[Any]) -> None:
        """Compares out, float32, and lse with others."""
        for one, other, rtol in zip(
            got, want, (self.tolerance["float32"], self.lse_tolerance), strict=True
        ):
            chex.assert_trees_all_close(one, other, rtol=rtol, atol=rtol)

    def check_case(self, case: AttentionCase) -> None:
        """Compares the backend's answer in a case with the naive one."""
        batch = self.batch(case.kv_lens, case.q_lens, T=case.T, **case.sizes)
        layout = self.layouts[len(batch.q[0]) % len(self.layouts)]
        where = {"layout": layout, "window": case.options.get("window"), **case.where}
        self.check(batch, self.place(batch, **where), **case.options)

    # Lengths, layouts, sizes, dtypes.

    @each(EVERY_LENGTH)
    def test_every_length_of_cache_and_query_agrees_with_naive_attention(self, case):
        self.check_case(case)

    def test_a_decode_of_many_sequences_agrees_with_naive_attention(self):
        self.check_case(attention.MANY_SEQUENCES)

    @each(ONE_SEQUENCE)
    def test_a_decode_of_one_sequence_agrees_with_naive_attention(self, case):
        self.check_case(case)

    @each(SIZES, *(pytest.param(c, id=n, marks=pytest.mark.slow) for n, c in GROUP_SIZES.items()))
    def test_every_size_and_dtype_agrees_with_naive_attention(self, case):
        self.check_case(case)

    def test_a_program_that_turns_64_bit_types_on_gets_the_same_answer(self):
        batch = self.batch((40, 7), (20, 1), T=24)
        with jax.enable_x64(True):
            self.check(batch, self.place(batch, M=3), sinks=SINKS)

    # Options.

    @each(WINDOWS)
    def test_a_window_agrees_with_naive_attention_and_nothing_is_read_outside(self, case):
        self.check_case(case)

    @each(OPTIONS)
    def test_options_agree_with_naive_attention(self, case):
        self.check_case(case)

    def test_a_window_of_every_tile_of_a_long_prefill_agrees_with_naive_attention(self):
        self.check_case(attention.LONG_WINDOW)

    @each(KEY_PARTS)
    def test_a_part_of_the_keys_agrees_with_naive_attention(self, case):
        self.check_case(case)

    # With q = 0 every key that a query sees weighs the same: lse says how many they are, and the
    # mean of V, where V is the position, which ones.

    @pytest.mark.parametrize("window", [None, 1, 17])
    def test_a_query_sees_the_keys_up_to_its_own_and_a_window_counts_its_own(self, window):
        batch = self.batch(LENGTHS, MIXED, T=48)
        ramps = [np.zeros_like(v) + np.arange(len(v))[:, None, None] for v in batch.values]
        ramps = [ramp.astype(v.dtype) for ramp, v in zip(ramps, batch.values, strict=True)]
        batch = Batch(q=0 * batch.q, keys=batch.keys, values=ramps, q_lens=MIXED)
        out, lse = self.attend(batch, self.place(batch, window=window), window=window)
        for b in (3, 4, 5, 6):  # lengths 16, 17, 320 and 129; queries 16, 5, 1 and 9
            for row in range(batch.query_starts[b], batch.query_starts[b + 1]):
                position = LENGTHS[b] - (batch.query_starts[b + 1] - row)
                first = 0 if window is None else max(0, position - window + 1)
                chex.assert_trees_all_close(
                    lse[row], np.log(position - first + 1), rtol=1e-7, atol=1e-6
                )
                mean = ramps[b][first : position + 1, 0, 0].mean(dtype=np.float64)
                chex.assert_trees_all_close(out[row], mean, rtol=1e-5)

    def test_lse_is_the_natural_log_and_a_sink_is_one_more_term(self):
        batch = self.batch(LENGTHS, DECODE, T=8)
        batch = Batch(q=0 * batch.q, keys=batch.keys, values=batch.values, q_lens=DECODE)
        placed = self.place(batch)
        live = [length for length, n in zip(LENGTHS, DECODE, strict=True) if n]
        plain, lse = self.attend(batch, placed)
        with np.errstate(divide="ignore"):  # the row without a key
            chex.assert_trees_all_close(lse[:6, 0], np.log(live), rtol=1e-6)
        out, lse = self.attend(batch, placed, sinks=np.zeros(4, np.float32))
        chex.assert_trees_all_close(lse[:6, 0], np.log1p(live), rtol=1e-6, atol=1e-7)
        share = np.array([length / (length + 1) for length in live])[:, None, None]
        chex.assert_trees_all_close(out[:6], plain[:6] * share, rtol=1e-5, atol=1e-7)

    def test_a_row_without_a_key_is_zero_and_its_lse_is_the_sink(self):
        batch = self.batch((0, 2, *[0] * 6), (3, 5, *[0] * 6), T=48)
        placed = self.place(batch)
        for options, want in (({}, np.full(4, -np.inf)), (dict(sinks=SINKS), SINKS)):
            out, lse = self.attend(batch, placed, **options)
            assert not out[:6].any()  # three rows of an empty cache, three before the first key
            chex.assert_trees_all_equal(lse[:6], np.broadcast_to(want, (6, 4)))
            assert out[6:8].all()

    @pytest.mark.parametrize("magnitude", [1e5, -1e5, 1e30, -1e30, -1e38])
    def test_logits_of_any_size_are_kept_apart_from_masked_ones(self, magnitude):
        """No finite stand-in for minus infinity: equal logits give the mean of V."""
        batch = self.batch([200], [2], T=2)
        keys = np.zeros_like(batch.keys[0])
        keys[..., 0] = magnitude
        batch = Batch(q=np.ones_like(batch.q), keys=[keys], values=batch.values, q_lens=[2])
        out, lse = self.attend(batch, self.place(batch), scale=1.0)
        want = [batch.values[0][:n].mean(axis=0, dtype=np.float64) for n in (199, 200)]
        chex.assert_trees_all_close(out, np.repeat(want, 2, axis=1), rtol=1e-5, atol=1e-6)
        want_lse = float(keys[0, 0, 0]) + np.log([[199], [200]])
        chex.assert_trees_all_close(lse, np.broadcast_to(want_lse, lse.shape), rtol=1e-6)

    @pytest.mark.parametrize("winner", [0, 127, 128, 199])
    def test_one_key_far_above_the_others_takes_all_the_weight(self, winner):
        batch = self.batch([200], [2], T=2)
        keys = np.zeros_like(batch.keys[0])
        keys[..., 0] = -1e5
        keys[winner, :, 0] = 1e5
        batch = Batch(q=np.ones_like(batch.q), keys=[keys], values=batch.values, q_lens=[2])
        out, _ = self.attend(batch, self.place(batch), scale=1.0)
        chex.assert_trees_all_equal(out[1], np.repeat(batch.values[0][winner], 2, axis=0))

    # What must not be read.

    def test_what_is_not_live_may_hold_anything(self):
        """The same call over a clean pool and table gives the same bits."""
        batch = self.batch(LENGTHS, MIXED, T=48)
        placed = self.place(batch)
        clean = Placed(
            pages=Pages(kv=jnp.nan_to_num(placed.pages.kv), layout=placed.pages.layout),
            page_table=jnp.clip(placed.page_table, 0, placed.pages.num_pages - 1),
            kv_lens=placed.kv_lens,
            query_starts=placed.query_starts,
        )
        zero_padding = Batch(
            q=np.nan_to_num(batch.q), keys=batch.keys, values=batch.values, q_lens=MIXED
        )
        poisoned, clean = self.attend(batch, placed), self.attend(zero_padding, clean)
        assert np.isfinite(poisoned[0]).all()
        for got, want in zip(poisoned, clean, strict=True):
            chex.assert_trees_all_equal(got, want)

    # Merging.

    @pytest.mark.parametrize(("recent", "first"), [(1, 0), (1, 32), (40, 16), (400, 16)])
    @pytest.mark.parametrize("window", [None, 50])
    def test_the_parts_of_the_keys_merge_into_the_whole(self, recent, first, window):
        batch = self.batch(LENGTHS, MIXED, T=40)
        placed = self.place(batch, window=window)
        want_out, want_lse = self.attend(batch, placed, window=window)
        whole: Any = None
        for part in ("first", "middle", "recent"):
            keys = KeyPart(part=part, page_size=16, recent=recent, first=first)
            got = self.attend(batch, placed, window=window, keys=keys)
            got = tuple(map(jnp.asarray, got))
            whole = got if whole is None else merge_partials(*whole, *got)
        self.assert_close(whole, (want_out, want_lse))

    def test_parts_of_the_keys_are_cut_between_pages_by_the_querys_position(self):
        """Each part is compared with a sum over its own keys only."""
        batch = self.batch([75], [30], T=30)
        placed = self.place(batch)
        for part, low, high in [
            ("first", lambda p: 0, lambda p: 16),
            ("middle", lambda p: 16, lambda p: max(16, (p - 19) // 16 * 16)),
            ("recent", lambda p: max(16, (p - 19) // 16 * 16), lambda p: p + 1),
        ]:
            keys = KeyPart(part=part, page_size=16, recent=20, first=16)
            out, lse = self.attend(batch, placed, keys=keys)
            for i, p in enumerate(range(45, 75)):
                here = slice(low(p), high(p))
                alone = Batch(
                    q=batch.q[i : i + 1],
                    keys=[batch.keys[0][here]],
                    values=[batch.values[0][here]],
                    q_lens=[1],
                )
                want, want_lse = naive_attention(alone, scale=0.25)
                self.assert_close((out[i], lse[i]), (want[0], want_lse[0]))

    @pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sink", "sinks"])
    def test_two_disjoint_parts_merge_into_the_whole_at_any_cut(self, sinks):
        S, n = 200, 8
        whole = self.batch([S, *[0] * 7], [n, *[0] * 7], T=n)
        k, v = whole.keys[0], whole.values[0]
        with_sinks = {} if sinks is None else dict(sinks=sinks)
        want_out, want_lse = self.attend(whole, self.place(whole), **with_sinks)
        for cut in (0, 1, 15, 16, 17, 127, 128, 150, S - n, S - 3, S):
            # Before the cut each row sees all it may, so it is a sequence of its own; after it the
            # rows are the last of a shorter sequence, the first of them without a key perhaps.
            ends = [min(cut, S - n + i + 1) for i in range(n)]
            before = Batch(
                q=whole.q, keys=[k[:e] for e in ends], values=[v[:e] for e in ends], q_lens=[1] * n
            )
            after = Batch(
                q=whole.q,
                keys=[k[cut:], *[k[:0]] * 7],
                values=[v[cut:], *[v[:0]] * 7],
                q_lens=whole.q_lens,
            )
            part_a = self.attend(before, self.place(before), **with_sinks)
            part_b = self.attend(after, self.place(after))
            merged = merge_partials(*map(jnp.asarray, (*part_a, *part_b)))
            self.assert_close(merged, (want_out, want_lse))

    # Anything.

    @pytest.mark.parametrize("name", RANDOM)
    def test_any_ragged_batch_agrees_with_naive_attention(self, name):
        for case in RANDOM[name]:
            self.check_case(case)


@cache
def _with_backend(backend: Any) -> attention.Attention:
    return partial(ragged_paged_attention, backend=backend)
