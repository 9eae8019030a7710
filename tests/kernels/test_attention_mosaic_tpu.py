"""The TPU kernel, its DMAs, semaphores and memories simulated: races, reads of memory that nothing
was written to (it holds NaN) and reads out of bounds are errors.

With blocks of 128 keys, so that contexts of a few hundred have whole ones. Not here: what its real
compilers say (`test_targets`).
"""

from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import Pages, ragged_paged_attention
from pallas_kernels.attention.mosaic_tpu import tuning
from pallas_kernels.attention.mosaic_tpu.parameters import from_float16
from pallas_kernels.attention.mosaic_tpu.tuning import BlockSizes
from tests.kernels.batches import Batch, place, random_batch
from tests.kernels.bits_suite import BitsSuite
from tests.kernels.test_quantised_pages import check_attention

SIMULATED = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)


class Simulated(BitsSuite):
    """The suites, on a simulated chip.

    Attributes:
      sizes: of blocks.
      factor_types: of codes that the chip multiplies as they are, the types in which it does.
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
        check_attention(kind, "paired", "mosaic_tpu", longest=300, window=window, **same)


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


def test_every_finite_float16_comes_out_of_its_bits():
    bits = np.arange(1 << 16, dtype=np.uint16)
    want = bits.view(np.float16).astype(np.float32)
    finite = np.isfinite(want)
    got = np.asarray(from_float16(jnp.asarray(bits[finite], jnp.uint32)))
    np.testing.assert_array_equal(got, want[finite])


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
