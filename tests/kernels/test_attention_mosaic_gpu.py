"""The GPU kernels, their copies, barriers and memories simulated: races, reads of memory that
nothing was written to (it holds NaN) and reads out of bounds are errors.

With items of 128 keys and three blocks of the grid, so that contexts of a few hundred have several
items, and a block several of those. Not here: what the real compiler says (`test_targets_gpu`).
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import Pages
from pallas_kernels.attention import mosaic_gpu
from tests.kernels.batches import Batch
from tests.kernels.bits_suite import BitsSuite

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
        return mosaic_gpu.refusal(q, pages, jnp.zeros((1, M), jnp.int32))

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def simulated(cls) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch, plgpu.force_gpu_interpret_mode(SIMULATED):
            for name, value in cls.sizes.items():
                patch.setattr(mosaic_gpu, name, value)
            jax.clear_caches()  # of programs of other sizes
            yield
        jax.clear_caches()


class TestShortItems(Simulated):
    sizes: ClassVar = dict(SPLIT_ONE=128, SPLIT_MANY=128, CTAS=3)
    brief = (
        "test_every_length_of_cache_and_query_agrees_with_naive_attention",
        "test_options_agree_with_naive_attention",
        "test_what_is_not_live_may_hold_anything",
        "test_a_row_without_a_key_is_zero_and_its_lse_is_the_sink",
        "test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch",
    )


@pytest.mark.slow
class TestWholeItems(Simulated):
    sizes: ClassVar = {}


@pytest.mark.slow
class TestSizes(Simulated):
    """Sizes of pages, heads and groups of them."""

    sizes: ClassVar = dict(SPLIT_ONE=128, SPLIT_MANY=128, CTAS=5)
    brief = ()
