"""What ragged paged attention must compute, whatever the backend.

A backend's test module subclasses `AttentionSuite`, names the backend, and says how exact it is and
what it does not take. Every placement is poisoned (`batches.place`), so that each test here also
shows that nothing but live tokens is read. Not here: equality of bits (`bits_suite`), checks of
arguments and the amount of work (their own modules).
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels import KeyPart, Pages, merge_partials, ragged_paged_attention
from pallas_kernels.pages import LAYOUTS, Layout
from tests.kernels.batches import Batch, Placed, lengths, naive_attention, place, random_batch

# Pages hold 16 tokens and a row of the table 20 pages, unless a test says otherwise.
LENGTHS = (0, 1, 15, 16, 17, 320, 129, 128)
DECODE = (1, 1, 1, 0, 1, 1, 1, 0)
MIXED = (2, 1, 3, 16, 5, 1, 9, 0)  # sequence 0 has queries without a key
PREFILL = (0, *LENGTHS[1:])
SIZES = [
    # H, K, D, P, M, dtype of q, dtype of K and V
    (3, 3, 64, 8, 3, "float32", "float32"),
    (6, 2, 80, 16, 3, "bfloat16", "bfloat16"),
    (5, 1, 96, 24, 3, "float16", "float16"),
    (12, 2, 128, 64, 3, "float32", "bfloat16"),
    (12, 4, 64, 16, 3, "bfloat16", "bfloat16"),
    (14, 2, 256, 256, 3, "bfloat16", "float32"),
    (16, 1, 64, 128, 1, "float32", "float32"),
    (8, 1, 8, 9, 3, "float32", "float16"),
    *(
        pytest.param(G, 1, D, P, 3, "float32", "float32", marks=pytest.mark.slow)
        for G in (1, 2, 4, 9, 10, 11, 12, 13, 14, 15)
        for D, P in [((64, 80, 96, 128, 256, 512)[G % 6], (8, 16, 24, 100, 255, 256)[G // 3])]
    ),
]
SINKS = np.array([0.5, -1.0, 3.0, -np.inf], np.float32)

attend = jax.jit(
    ragged_paged_attention,
    static_argnames=("scale", "window", "soft_cap", "query_tile", "keys", "return_lse", "backend"),
)


def assert_close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


class AttentionSuite:
    """The properties of values.

    Attributes:
      backend: its name.
      tolerance: by q's dtype, relative and absolute error of `out` against float64.
      lse_tolerance: the same of `lse`.
      layouts: of the pages that it takes.
      batch_options: of `batches.random_batch`, where a test has none of its own.
    """

    backend: ClassVar[str]
    tolerance: ClassVar[dict[str, float]] = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 1e-3}
    lse_tolerance: ClassVar[float] = 1e-5
    layouts: ClassVar[tuple[Layout, ...]] = LAYOUTS
    batch_options: ClassVar[dict[str, Any]] = {}

    def batch(self, *lengths: Sequence[int], **options) -> Batch:
        """See `batches.random_batch`."""
        return random_batch(*lengths, **self.batch_options | options)

    def place(self, batch: Batch, *, layout: Layout | None = None, **where) -> Placed:
        """See `batches.place`; in the backend's first layout unless a test names another."""
        if layout not in (None, *self.layouts):
            pytest.skip(f"{self.backend} takes no {layout} pages")
        return place(batch, layout=layout or self.layouts[0], **where)

    def skip_reason(self, batch: Batch, pages: Pages) -> str | None:
        """Why the backend does not take sizes or dtypes, for a test to be skipped."""
        return None

    def attend(
        self, batch: Batch, placed: Placed, *, scale: float = 0.25, **options
    ) -> tuple[np.ndarray, np.ndarray]:
        if reason := self.skip_reason(batch, placed.pages):
            pytest.skip(reason)
        out, lse = attend(
            jnp.asarray(batch.q),
            placed.pages,
            placed.page_table,
            placed.kv_lens,
            placed.query_starts,
            scale=scale,
            return_lse=True,
            backend=self.backend,
            **options,
        )
        assert out.dtype == batch.q.dtype
        assert lse.dtype == jnp.float32
        return np.asarray(out), np.asarray(lse)

    def check(self, batch: Batch, placed: Placed, **options) -> None:
        """Holds the backend's answer against the naive one."""
        out, lse = self.attend(batch, placed, **options)
        options.pop("shared", None)  # a hint that changes nothing
        want_out, want_lse = naive_attention(batch, **{"scale": 0.25, **options})
        assert_close(out.astype(np.float64), want_out, self.tolerance[str(out.dtype)])
        assert_close(lse, want_lse, self.lse_tolerance)
        padding = slice(sum(batch.q_lens), None)
        assert not out[padding].any()
        assert (lse[padding] == -np.inf).all()

    # Lengths, layouts, sizes, dtypes.

    @pytest.mark.parametrize(
        "q_lens, T, layout",
        [
            *(pytest.param(DECODE, 8, layout, id=f"decode-{layout}") for layout in LAYOUTS),
            pytest.param(MIXED, 48, "head_major", id="mixed-head_major"),
            pytest.param(MIXED, 48, "paired", id="mixed-paired"),
            pytest.param(PREFILL, 640, "head_major", id="prefill-head_major"),
            pytest.param(PREFILL, 640, "paired", id="prefill-paired"),
        ],
    )
    def test_every_length_of_cache_and_query_agrees_with_naive_attention(self, q_lens, T, layout):
        batch = self.batch(LENGTHS, q_lens, T=T)
        self.check(batch, self.place(batch, layout=layout))

    def test_a_decode_of_many_sequences_agrees_with_naive_attention(self):
        kv_lens = np.random.default_rng(0).integers(0, 320, 70)
        batch = self.batch(kv_lens, [1] * 67 + [0] * 3, T=70)
        self.check(batch, self.place(batch))

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("heads", [(9, 3), (4, 4), (18, 2)], ids=["GQA", "MHA", "wide GQA"])
    def test_a_decode_of_one_sequence_agrees_with_naive_attention(self, heads, layout):
        for length, P in ((1, 16), (128, 24), (300, 16)):
            batch = self.batch([length], [1], T=1, heads=heads)
            placed = self.place(batch, P=P, layout=layout, window=200)
            self.check(batch, placed, window=200, soft_cap=5.0)

    @pytest.mark.parametrize("H, K, D, P, M, q_dtype, kv_dtype", SIZES)
    def test_every_size_and_dtype_agrees_with_naive_attention(
        self, H, K, D, P, M, q_dtype, kv_dtype
    ):
        kv_lens = [min(length, M * P) for length in (P, 0, P + 1, 3 * P, P - 1)]
        dtypes = jnp.dtype(q_dtype), jnp.dtype(kv_dtype)
        batch = self.batch(kv_lens, (2, 0, 1, 7, 1), T=12, heads=(H, K), D=D, dtypes=dtypes)
        self.check(
            batch,
            self.place(batch, P=P, M=M, layout=self.layouts[H % len(self.layouts)]),
            scale=D**-0.5,
        )

    def test_a_program_that_turns_64_bit_types_on_gets_the_same_answer(self):
        batch = self.batch((40, 7), (20, 1), T=24)
        with jax.enable_x64(True):
            self.check(batch, self.place(batch, M=3), sinks=SINKS)

    # Options.

    @pytest.mark.parametrize("window", [1, 17])  # some of the contexts are shorter than 17
    def test_a_window_agrees_with_naive_attention_and_nothing_is_read_outside(self, window):
        batch = self.batch(LENGTHS, MIXED, T=48)
        self.check(batch, self.place(batch, window=window), window=window)

    @pytest.mark.parametrize(
        "q_lens, T, options",
        [
            (DECODE, 8, dict(sinks=SINKS)),
            (MIXED, 48, dict(sinks=SINKS)),
            (DECODE, 8, dict(window=17, sinks=SINKS, soft_cap=1.5)),
        ],
        ids=["sinks of decode", "sinks of a mixed batch", "window, sinks and cap"],
    )
    def test_options_agree_with_naive_attention(self, q_lens, T, options):
        batch = self.batch(LENGTHS, q_lens, T=T)
        self.check(batch, self.place(batch, window=options.get("window")), **options)

    def test_a_window_of_every_tile_of_a_long_prefill_agrees_with_naive_attention(self):
        batch = self.batch((300, 190), (300, 150), T=450)
        self.check(batch, self.place(batch, window=40, layout=self.layouts[-1]), window=40)

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
                np.testing.assert_allclose(lse[row], np.log(position - first + 1), atol=1e-6)
                mean = ramps[b][first : position + 1, 0, 0].mean(dtype=np.float64)
                np.testing.assert_allclose(out[row], mean, rtol=1e-5)

    def test_lse_is_the_natural_log_and_a_sink_is_one_more_term(self):
        batch = self.batch(LENGTHS, DECODE, T=8)
        batch = Batch(q=0 * batch.q, keys=batch.keys, values=batch.values, q_lens=DECODE)
        placed = self.place(batch)
        live = [length for length, n in zip(LENGTHS, DECODE, strict=True) if n]
        plain, lse = self.attend(batch, placed)
        with np.errstate(divide="ignore"):  # the row without a key
            np.testing.assert_allclose(lse[:6, 0], np.log(live), rtol=1e-6)
        out, lse = self.attend(batch, placed, sinks=np.zeros(4, np.float32))
        np.testing.assert_allclose(lse[:6, 0], np.log1p(live), rtol=1e-6, atol=1e-7)
        share = np.array([length / (length + 1) for length in live])[:, None, None]
        np.testing.assert_allclose(out[:6], plain[:6] * share, rtol=1e-5, atol=1e-7)

    def test_a_row_without_a_key_is_zero_and_its_lse_is_the_sink(self):
        batch = self.batch((0, 2, *[0] * 6), (3, 5, *[0] * 6), T=48)
        placed = self.place(batch)
        for options, want in (({}, np.full(4, -np.inf)), (dict(sinks=SINKS), SINKS)):
            out, lse = self.attend(batch, placed, **options)
            assert not out[:6].any()  # three rows of an empty cache, three before the first key
            np.testing.assert_array_equal(lse[:6], np.broadcast_to(want, (6, 4)))
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
        np.testing.assert_allclose(out, np.repeat(want, 2, axis=1), rtol=1e-5, atol=1e-6)
        want_lse = float(keys[0, 0, 0]) + np.log([[199], [200]])
        np.testing.assert_allclose(lse, np.broadcast_to(want_lse, lse.shape), rtol=1e-6)

    @pytest.mark.parametrize("winner", [0, 127, 128, 199])
    def test_one_key_far_above_the_others_takes_all_the_weight(self, winner):
        batch = self.batch([200], [2], T=2)
        keys = np.zeros_like(batch.keys[0])
        keys[..., 0] = -1e5
        keys[winner, :, 0] = 1e5
        batch = Batch(q=np.ones_like(batch.q), keys=[keys], values=batch.values, q_lens=[2])
        out, _ = self.attend(batch, self.place(batch), scale=1.0)
        np.testing.assert_array_equal(out[1], np.repeat(batch.values[0][winner], 2, axis=0))

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
            np.testing.assert_array_equal(got, want)

    # Merging.

    @pytest.mark.parametrize(("recent", "first"), [(1, 0), (1, 32), (40, 16), (400, 16)])
    @pytest.mark.parametrize("window", [None, 50])
    def test_the_parts_of_the_keys_merge_into_the_whole(self, recent, first, window):
        batch = self.batch(LENGTHS, MIXED, T=40)
        placed = self.place(batch, window=window)
        want_out, want_lse = self.attend(batch, placed, window=window)
        whole = None
        for part in ("first", "middle", "recent"):
            keys = KeyPart(part=part, page_size=16, recent=recent, first=first)
            got = self.attend(batch, placed, window=window, keys=keys)
            got = tuple(map(jnp.asarray, got))
            whole = got if whole is None else merge_partials(*whole, *got)
        assert_close(np.asarray(whole[0]), want_out, self.tolerance["float32"])
        assert_close(np.asarray(whole[1]), want_lse, self.lse_tolerance)

    def test_parts_of_the_keys_are_cut_between_pages_by_the_querys_position(self):
        """Each part against a sum over its own keys alone."""
        batch = self.batch([75], [30], T=30)
        placed = self.place(batch)
        for part, low, high in [
            ("first", lambda p: 0, lambda p: 16),
            ("middle", lambda p: 16, lambda p: max(16, (p - 19) // 16 * 16)),
            ("recent", lambda p: max(16, (p - 19) // 16 * 16), lambda p: p + 1),
        ]:
            keys = KeyPart(part=part, page_size=16, recent=20, first=16)
            out, _ = self.attend(batch, placed, keys=keys)
            for i, p in enumerate(range(45, 75)):
                here = slice(low(p), high(p))
                alone = Batch(
                    q=batch.q[i : i + 1],
                    keys=[batch.keys[0][here]],
                    values=[batch.values[0][here]],
                    q_lens=[1],
                )
                want, _ = naive_attention(alone, scale=0.25)
                assert_close(out[i], want[0], self.tolerance["float32"])

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
            out, lse = merge_partials(*map(jnp.asarray, (*part_a, *part_b)))
            assert_close(np.asarray(out), want_out, self.tolerance["float32"])
            assert_close(np.asarray(lse), want_lse, self.lse_tolerance)

    # Anything.

    @pytest.mark.parametrize(
        "T, longest_query, options",
        [
            (5, 1, dict(window=130)),
            (40, 40, {}),
            (40, 40, dict(window=30, soft_cap=2.0, sinks=np.linspace(-2, 2, 6, dtype=np.float32))),
        ],
        ids=["decode", "plain", "options"],
    )
    @settings(
        derandomize=True,
        deadline=None,
        max_examples=20,
        suppress_health_check=[HealthCheck.differing_executors],
    )
    @given(data=st.data(), seed=st.integers(0, 2**32 - 1))
    def test_any_ragged_batch_agrees_with_naive_attention(
        self, data, seed, T, longest_query, options
    ):
        edges = (0, 1, 23, 24, 25, 127, 128, 129, 256, 311, 312)
        kv_lens, q_lens = data.draw(lengths(5, T, edges, longest_query))
        batch = self.batch(kv_lens, q_lens, T=T, heads=(6, 2), seed=seed)
        placed = self.place(batch, P=24, M=13, seed=seed, window=options.get("window"))
        self.check(batch, placed, **options)
