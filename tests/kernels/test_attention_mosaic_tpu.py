"""The TPU kernel, its DMAs, semaphores and memories simulated: races, reads of memory that nothing
was written to (it holds NaN) and reads out of bounds are errors.

Blocks have 128 keys, so that contexts of a few hundred tokens have whole blocks. `test_targets`
tests what the real compilers say.
"""

import functools
from collections.abc import Iterator
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxkv.testing.batches import Batch, naive_attention, place, random_batch
from jaxkv.testing.bits_suite import BitsSuite
from pallas_kernels import (
    KeyPart,
    Pages,
    SymmetricPages,
    ragged_paged_attention,
    write_pages,
)
from pallas_kernels.attention.mosaic_tpu import tuning
from pallas_kernels.attention.mosaic_tpu.parameters import from_float16
from pallas_kernels.attention.mosaic_tpu.tuning import BlockSizes
from pallas_kernels.pages import pool_shape
from tests.kernels.test_quantised_pages import check_codes, empty

SIMULATED = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)


class Simulated(BitsSuite):
    """The suites, on a simulated chip.

    Attributes:
      sizes: sizes of blocks.
      factor_types: types in which the chip multiplies codes without a conversion.
    """

    backend = "mosaic_tpu"
    tolerance: ClassVar = {"float32": 1e-5, "bfloat16": 2e-2}
    layouts = ("paired",)
    row_options: ClassVar = {"query_tile": 64}
    sizes: ClassVar[BlockSizes]
    factor_types: ClassVar = {
        jnp.int8: jnp.int8,
        jnp.float8_e4m3fn: jnp.float8_e4m3b11fnuz,
        jnp.float8_e5m2: jnp.float8_e5m2,
    }

    def skip_reason(self, batch: Batch, pages: Pages) -> str | None:
        if jnp.float16 in (batch.q.dtype, pages.kv.dtype):
            return "a TPU takes no float16"
        return "P is no multiple of 8" if pages.page_size % 8 else None

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def simulated(cls) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch, pltpu.force_tpu_interpret_mode(SIMULATED):
            patch.setattr(tuning, "block_sizes", lambda *_: cls.sizes)
            types = {jnp.dtype(codes): dtype for codes, dtype in cls.factor_types.items()}
            patch.setattr(tuning, "factor_type", lambda codes: types.get(jnp.dtype(codes)))
            jax.clear_caches()  # of programs of other sizes
            yield
        pltpu.reset_tpu_interpret_mode_state()
        jax.clear_caches()


class TestSmallBlocks(Simulated):
    sizes = BlockSizes(block_tokens=128, groups_ahead=1, tile_rows=64)
    brief = (
        "test_every_length_of_cache_and_query_agrees_with_naive_attention",
        "test_options_agree_with_naive_attention",
        "test_what_is_not_live_may_hold_anything",
        "test_a_row_without_a_key_is_zero_and_its_lse_is_the_sink",
        "test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch",
        "test_attention_over_codes_is_attention_over_what_they_decode_to",
        "test_large_channels_that_cancel_leave_logits_over_fixed_scales_exact",
        "test_a_tile_of_many_queries_may_have_room_for_one",
        "test_no_page_is_read_for_a_part_of_the_keys_that_a_window_leaves_empty",
    )

    @pytest.mark.parametrize(
        ("kind", "window", "P"),  # scales of P = 32, 64 and 128 are in rows of registers
        [
            ("int8", None, 8),
            ("int8", 13, 32),
            ("static", 13, 8),
            ("int4", 13, 64),
            pytest.param("int4", None, 24, marks=pytest.mark.slow),
            pytest.param("int8", 13, 256, marks=pytest.mark.slow),
            pytest.param("fp8_e4m3", 13, 32, marks=pytest.mark.slow),
            pytest.param("fp8_e5m2", 13, 128, marks=pytest.mark.slow),
        ],
    )
    @pytest.mark.parametrize(
        ("q_dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 1e-2)], ids=["f32", "bf16"]
    )
    def test_attention_over_codes_is_attention_over_what_they_decode_to(
        self, kind, window, P, q_dtype, tolerance
    ):
        same = dict(q_dtype=q_dtype, tolerance=tolerance, sizes=(P, 32))
        check_codes(kind, "paired", "mosaic_tpu", longest=300, window=window, **same)

    @pytest.mark.parametrize("factor_type", ["int8", None])
    def test_large_channels_that_cancel_leave_logits_over_fixed_scales_exact(
        self, factor_type, monkeypatch
    ):
        monkeypatch.setattr(tuning, "factor_type", lambda _: factor_type)
        jax.clear_caches()
        rng, n, D = np.random.default_rng(0), 200, 64
        sizes = rng.choice([1.0, 1.75], (n, 1))
        k, v = rng.uniform(-1, 1, (n, 1, D)) / 8, np.sign(sizes - 1.5)[..., None] * np.ones(D)
        k[..., 3], k[..., 4] = 1.25 * sizes, -sizes
        q = rng.uniform(-1, 1, (1, 1, D))
        q[..., 3], q[..., 4] = 808, 1008  # their parts of a logit are 400 at most, what is left 2
        q = jnp.asarray(q, jnp.bfloat16)
        scales = jnp.array([2.2 / 127, 1.1 / 127], jnp.float32)
        codes = np.rint(np.stack([k, v]) / np.asarray(scales)[:, None, None, None])
        pages = SymmetricPages(
            kv=jnp.zeros(pool_shape("paired", 26, 8, 1, D), jnp.int8),
            scales=scales,
            layout="paired",
        )
        exact = (codes * np.asarray(scales)[:, None, None, None]).astype(np.float32)
        slots = 8 + jnp.arange(n, dtype=jnp.int32)
        pages = write_pages(pages, *map(jnp.asarray, exact), slots, backend="xla")
        table = 1 + jnp.arange(25, dtype=jnp.int32)[None]
        lens, starts = jnp.array([n], jnp.int32), jnp.array([0, 1], jnp.int32)
        got = ragged_paged_attention(
            q, pages, table, lens, starts, scale=D**-0.5, query_tile=1, backend="mosaic_tpu"
        )
        batch = Batch(
            q=np.asarray(q.astype(jnp.float32)), keys=[exact[0]], values=[exact[1]], q_lens=[1]
        )
        want, _ = naive_attention(batch, scale=D**-0.5)
        chex.assert_trees_all_close(got.astype(jnp.float32), want, rtol=1e-7, atol=1e-2)

    def test_a_tile_of_many_queries_may_have_room_for_one(self, monkeypatch):
        monkeypatch.setattr(
            tuning, "block_sizes", lambda *_: BlockSizes(block_tokens=128, tile_rows=8)
        )
        jax.clear_caches()
        batch = random_batch([40, 9], [5, 1], T=8, heads=(16, 1))
        self.check(batch, self.place(batch))

    def test_no_page_is_read_for_a_part_of_the_keys_that_a_window_leaves_empty(self):
        batch = random_batch([100], [1], T=1)
        placed = place(batch, P=16, M=7, layout="paired")
        table = jnp.full_like(placed.page_table, 10**6)  # to read one of these is an error
        keys = KeyPart(part="first", page_size=8, first=8)
        out = ragged_paged_attention(
            jnp.asarray(batch.q),
            placed.pages,
            table,
            placed.kv_lens,
            placed.query_starts,
            scale=1.0,
            window=4,
            keys=keys,
            backend="mosaic_tpu",
        )
        chex.assert_trees_all_equal(out, 0.0)


@pytest.mark.slow
class TestFourBuffers(Simulated):
    sizes = BlockSizes(block_tokens=128, num_buffers=4, groups_ahead=3, tile_rows=32)
    factor_types: ClassVar = {}


@pytest.mark.slow
class TestLongBlocks(Simulated):
    sizes = BlockSizes()
    factor_types: ClassVar = {
        jnp.float8_e4m3fn: jnp.float8_e4m3fn,
        jnp.float8_e5m2: jnp.float8_e5m2,
    }


def test_pages_of_codes_that_cannot_be_cut_into_registers_are_refused():
    q = jnp.zeros((1, 4, 80), jnp.bfloat16)
    integers = jnp.zeros((1, 4), jnp.int32), jnp.ones(1, jnp.int32), jnp.arange(2, dtype=jnp.int32)
    with pytest.raises(ValueError, match="P = 24 of rows of 160 bytes, no multiple of 128"):
        ragged_paged_attention(
            q, empty("int8", "paired", sizes=(24, 80)), *integers, scale=1.0, backend="mosaic_tpu"
        )


@pytest.mark.parametrize(
    ("T", "B", "query_tile", "tiles"), [(28_000, 1, 1, 28_000), (40_000, 40_000, None, 40_000)]
)
def test_more_tiles_than_scalar_memory_holds_are_refused(T, B, query_tile, tiles):
    pages = place(random_batch([5], [1], T=1), layout="paired").pages
    q, table, lens, starts = (
        jax.ShapeDtypeStruct((T, 4, 16), jnp.float32),
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((B, 2), (B,), (B + 1,))),
    )
    call = functools.partial(
        ragged_paged_attention, scale=1.0, query_tile=query_tile, backend="mosaic_tpu"
    )
    with pytest.raises(ValueError, match=f"{tiles} tiles of 1 queries.* scalar memory"):
        jax.eval_shape(call, q, pages, table, lens, starts)
    if query_tile:  # of each sequence one query at most is a tile of one
        jax.eval_shape(functools.partial(call, query_tile=None), q, pages, table, lens, starts)


def test_every_finite_float16_comes_out_of_its_bits():
    bits = np.arange(1 << 16, dtype=np.uint16)
    want = bits.view(np.float16).astype(np.float32)
    finite = np.isfinite(want)
    got = np.asarray(from_float16(jnp.asarray(bits[finite], jnp.uint32)))
    chex.assert_trees_all_equal(got, want[finite])


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(layout="head_major"), "pages must be paired"),
        (dict(P=12), "P = 12 is not a multiple of 8"),
        (dict(M=70_000), "M = 70000 page ids a sequence; at most 65536"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_before_it_is_compiled(change, reason):
    batch = random_batch([5], [1], T=1)
    placed = place(batch, **{"layout": "paired", "M": 2} | change)
    arrays = placed.page_table, placed.kv_lens, placed.query_starts
    with pytest.raises(ValueError, match=f"mosaic_tpu does not take this: {reason}"):
        ragged_paged_attention(
            jnp.asarray(batch.q), placed.pages, *arrays, scale=1.0, backend="mosaic_tpu"
        )
