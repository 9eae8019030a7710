"""The GPU kernels, their copies, barriers and memories simulated: races, reads of memory that
nothing was written to (it holds NaN) and reads out of bounds are errors.

Items have 128 keys and the grid has three blocks, so that a context of a few hundred tokens has
several items and a block has several of them. `test_targets_gpu` tests what the real compiler says.
"""

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv.testing.attention import LENGTHS, MIXED
from jaxkv.testing.batches import Batch, place, random_batch
from jaxkv.testing.bits_suite import BitsSuite, assert_same_bits
from pallas_kernels import Pages, SharedPrefixes, chips, ragged_paged_attention
from pallas_kernels.attention.mosaic_gpu import call
from tests.kernels.test_quantised_pages import check_codes

SIMULATED = plgpu.InterpretGPUParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)
FLOAT32, BFLOAT16, FLOAT16 = map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16))


class Simulated(BitsSuite):
    """The suites, on a simulated chip.

    Queries and outputs are float32 where a test has no other wish: outputs show bits, and queries
    hold nothing that the pages' type cannot, to which the kernel rounds them.

    Attributes:
      sizes: constants of the backend.
    """

    backend = "mosaic_gpu"
    tolerance: ClassVar = {"float32": 4e-3, "bfloat16": 2e-2, "float16": 4e-3}
    layouts = ("head_major",)
    row_options: ClassVar = {"query_tile": 64}
    batch_options: ClassVar = dict(D=64, dtypes=(FLOAT32, BFLOAT16))
    sizes: ClassVar[dict[str, Any]]

    def batch(self, *lengths, **options) -> Batch:
        batch = super().batch(*lengths, **options)
        q = batch.q.astype(batch.keys[0].dtype).astype(batch.q.dtype)
        return Batch(q=q, keys=batch.keys, values=batch.values, q_lens=batch.q_lens)

    def skip_reason(self, batch: Batch, pages: Pages) -> str | None:
        q, M = jnp.asarray(batch.q), 1
        return call.refusal(q, pages, jnp.zeros((1, M), jnp.int32))

    def test_a_program_that_turns_64_bit_types_on_gets_the_same_answer(self):
        pytest.skip("the simulator runs its threads without the switch; `test_targets_gpu` has it")

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def simulated(cls) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch, plgpu.force_gpu_interpret_mode(SIMULATED):
            for name, value in cls.sizes.items():
                patch.setattr(call, name, value)
            jax.clear_caches()  # of programs of other sizes
            yield
        jax.clear_caches()


class TestShortItems(Simulated):
    sizes: ClassVar = dict(SPLIT_ONE=128, SPLIT_MANY=128, CTAS=3)
    brief = (
        "test_every_length_of_cache_and_query_agrees_with_naive_attention",
        "test_options_agree_with_naive_attention",
        "test_what_is_not_live_may_hold_anything",
        "test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch",
        "test_attention_over_codes_is_attention_over_what_they_decode_to",
        "test_keys_that_sequences_share_are_read_from_the_first_one",
    )

    @pytest.mark.parametrize(
        ("kind", "window", "P", "D"),
        [
            ("int8", None, 32, 64),
            *(
                pytest.param(kind, window, P, D, marks=pytest.mark.slow)
                for kind in ("int8", "static", "fp8_e4m3", "fp8_e5m2")
                for window, P, D in ((None, 64, 64), (13, 8, 192), (70, 24, 128), (90, 16, 256))
            ),
        ],
    )
    def test_attention_over_codes_is_attention_over_what_they_decode_to(self, kind, window, P, D):
        check_codes(
            kind,
            "head_major",
            "mosaic_gpu",
            longest=150,
            window=window,
            sizes=(P, D),
            tolerance=1e-2,  # weights times scales are rounded to bfloat16
        )

    @pytest.mark.parametrize("magnitude", [1e-2, pytest.param(1e2, marks=pytest.mark.slow)])
    def test_float16_queries_over_codes_have_the_range_of_the_scales(self, magnitude):
        check_codes(
            "fp8_e5m2",
            "head_major",
            "mosaic_gpu",
            longest=150,
            window=None,
            sizes=(32, 64),
            q_dtype=jnp.float16,
            tolerance=1e-2,
            magnitude=magnitude,
        )

    @pytest.mark.parametrize("cap", [50.0, 1e5])
    def test_a_cap_of_any_size_keeps_the_bits_of_small_logits(self, cap):
        batch = self.batch((64, 130, 3), (1, 1, 2), T=4)
        self.check(batch, self.place(batch), soft_cap=cap)

    def test_what_a_group_shares_does_not_reach_the_rows_of_others(self):
        batch = self.batch((40, 50, 30), (1, 1, 1), T=3)
        placed = self.place(batch)
        shared = SharedPrefixes(
            starts=jnp.array([0, 2], jnp.int32), lengths=jnp.array([32], jnp.int32)
        )
        want = self.attend(batch, placed, shared=shared)
        kv = placed.pages.kv.at[placed.page_table[0, 0], 1::2].set(jnp.nan)  # V of live keys
        poisoned = dataclasses.replace(placed, pages=dataclasses.replace(placed.pages, kv=kv))
        got = self.attend(batch, poisoned, shared=shared)
        for x, y in zip(got, want, strict=True):
            chex.assert_trees_all_equal(x[2], y[2])

    @pytest.mark.parametrize(
        ("cuts", "options"),
        [
            ((37, 160), dict(window=70, sinks=np.linspace(-2, 2, 4, dtype=np.float32))),
            *(
                pytest.param(cuts, options, marks=pytest.mark.slow)
                for cuts in ((0, 0), (16, 128), (64, 129), (1, 185))
                for options in ({}, dict(window=30, soft_cap=2.0))
            ),
        ],
    )
    def test_keys_that_sequences_share_are_read_from_the_first_one(self, cuts, options):
        """Any place may end a group's shared keys; other tables have garbage for shared pages."""
        batch = self.batch((64, 90, 70, 185, 200, 15, 40), (1, 20, 1, 1, 3, 0, 2), T=30)
        starts = (0, 3, 5)  # two groups, and two sequences that share nothing
        for first, end, cut in zip(starts, starts[1:], cuts, strict=False):
            for b in range(first + 1, end):
                for kv in (batch.keys, batch.values):
                    kv[b][:cut] = kv[first][:cut]
        placed = self.place(batch, window=options.get("window"))
        table = np.array(placed.page_table)
        for first, end, cut in zip(starts, starts[1:], cuts, strict=False):
            table[first + 1 : end, : cut // 16] = -7
        shared = SharedPrefixes(
            starts=jnp.array(starts, jnp.int32), lengths=jnp.array(cuts, jnp.int32)
        )
        self.check(batch, dataclasses.replace(placed, page_table=table), shared=shared, **options)

    def test_the_blocks_of_threads_that_share_the_work_change_no_bit(self, monkeypatch):
        batch = self.batch(LENGTHS, MIXED, T=48)
        want = self.bits(batch)
        for ctas in (1, 4):
            monkeypatch.setattr(call, "CTAS", ctas)
            jax.clear_caches()
            assert_same_bits(self.bits(batch), want)

    @pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
    @pytest.mark.parametrize(
        "H, K, D, P",
        [
            *((G * K, K, 64, P) for G, K, P in [(1, 3, 8), (3, 2, 24), (5, 1, 40), (6, 1, 64)]),
            *((G, 1, 128, P) for G, P in [(7, 128), (9, 256), (16, 72), (11, 16)]),
            *((G, 1, 192, 32) for G in (2, 12)),
            *((G, 1, 256, P) for G, P in [(4, 16), (8, 256), (33, 64)]),
            *((G, 1, 64, 64) for G in (64, 65, 71, 128)),  # more heads than rows of a tile
            (130, 2, 64, 16),
        ],
    )
    def test_sizes_agree_with_naive_attention(self, H, K, D, P, dtype):
        lens, queries = (3 * P, 0, P + 1, P - 1, 2 * P + 7), (1, 0, 1, 1, 9)
        lens = tuple(min(n, 300) for n in lens)
        M = -(-max(lens) // P)
        for q_lens, T in ((queries, 13), ((1, 0, 1, 1, 1), 5)):
            batch = self.batch(lens, q_lens, T=T, heads=(H, K), D=D, dtypes=(FLOAT32, dtype))
            placed = self.place(batch, P=P, M=M, window=100)
            self.check(batch, placed, window=100, sinks=np.linspace(-2, 2, H, dtype=np.float32))


@pytest.mark.slow
class TestWholeItems(Simulated):
    sizes: ClassVar = dict(CTAS=7)


def arguments(layout="head_major", P=16, D=64, dtype=BFLOAT16) -> tuple:
    batch = random_batch([5], [1], T=1, D=D, dtypes=(FLOAT32, dtype))
    placed = place(batch, layout=layout, P=P, M=2)
    return (
        jnp.asarray(batch.q),
        placed.pages,
        placed.page_table,
        placed.kv_lens,
        placed.query_starts,
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(layout="paired"), "pages must be head-major"),
        (dict(P=12), "P = 12 is not a multiple of 8"),
        (dict(D=80), "D = 80 is none of 64, 128, 192, 256"),
        (dict(dtype=FLOAT32), "pages of float32 would be rounded by the tensor cores"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_before_it_is_compiled(change, reason):
    with pytest.raises(ValueError, match=f"mosaic_gpu does not take this: {reason}"):
        ragged_paged_attention(*arguments(**change), scale=1.0, backend="mosaic_gpu")


@pytest.mark.parametrize(("capability", "named"), [((8, 0), "8.0"), ((10, 0), "10.0")])
def test_on_another_gpu_none_takes_xla_with_one_line_in_the_log(
    monkeypatch, caplog, capability, named
):
    want = ragged_paged_attention(*arguments(), scale=1.0, backend="xla")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(chips, "capability", lambda: capability)
    with caplog.at_level(logging.INFO):
        got = ragged_paged_attention(*arguments(), scale=1.0)
    chex.assert_trees_all_equal(got, want)
    (record,) = (r for r in caplog.records if r.name.startswith("pallas_kernels"))
    assert record.getMessage().endswith(f"this GPU has {named}")
    with pytest.raises(ValueError, match=rf"\(H100, H200\); this GPU has {named}"):
        ragged_paged_attention(*arguments(), scale=1.0, backend="mosaic_gpu")
