"""Page writes by copies, simulated with races detected; that the pool is written in place is shown
by the compiler (`test_targets_gpu`)."""

from collections.abc import Iterator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import Pages, SymmetricPages, write_pages
from tests.kernels.test_page_write import (
    INT32_MAX,
    INT32_MIN,
    K,
    N,
    P,
    T,
    int32,
    random_pool,
    row_bytes,
    slots_of,
    tokens,
)


@pytest.fixture(autouse=True, scope="module")
def simulated() -> Iterator[None]:
    chip = plgpu.InterpretGPUParams(detect_races=True, out_of_bounds_reads="raise")
    with plgpu.force_gpu_interpret_mode(chip):
        jax.clear_caches()
        yield
    jax.clear_caches()


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_a_written_slot_holds_its_token_and_every_other_its_old_bits(dtype):
    """The slots include neighbours in one page, and slots of the pool's last page."""
    pages, (k, v) = random_pool("head_major", dtype), tokens(dtype)
    slots = (N * P - 1, P, P + 1, 3 * P - 1, 33, 32)
    want = slots_of(pages) | {slot: row_bytes(k[t], v[t]) for t, slot in enumerate(slots)}
    got = write_pages(pages, jnp.asarray(k), jnp.asarray(v), int32(*slots), backend="mosaic_gpu")
    assert slots_of(got) == want


def test_a_slot_outside_the_pool_or_of_the_null_page_writes_nothing():
    pages, (k, v) = random_pool("head_major"), tokens()
    arrays = jnp.asarray(k), jnp.asarray(v)
    for outside in ((-1, -P, N * P, INT32_MIN, INT32_MAX, -N * P), (0,) * T):
        got = write_pages(pages, *arrays, int32(*outside), backend="mosaic_gpu")
        assert slots_of(got) == slots_of(pages)


def test_no_tokens_change_nothing():
    pages, (k, v) = random_pool("head_major"), tokens(count=0)
    arrays = jnp.asarray(k), jnp.asarray(v)
    assert slots_of(write_pages(pages, *arrays, int32(), backend="mosaic_gpu")) == slots_of(pages)


@pytest.mark.parametrize(("heads", "D"), [(3, 80), (1, 8), (5, 24)])
def test_rows_of_any_size_are_written(heads, D):
    """In some cases V's rows do not begin at a multiple of 128 bytes after K's."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 4, heads, D)).astype(np.float32)
    pages = Pages(kv=jnp.zeros((3, 2 * heads, 16, D), jnp.bfloat16), layout="head_major")
    arrays = jnp.asarray(k), jnp.asarray(v), int32(16, 47, 33, 31)
    got, want = (write_pages(pages, *arrays, backend=name).kv for name in ("mosaic_gpu", "xla"))
    chex.assert_trees_all_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize(
    ("heads", "D", "reason"),
    [
        (2, 320, "D = 320 is above the 256 that a copy takes"),
        (257, 8, "K = 257 is above the 256 that a copy takes"),
        (232, 256, r"K \* D = 232 \* 256, has 118784 bytes; 114688 fit shared memory"),
        (2, 12, "D = 12: a row of 24 bytes is not a multiple of 16"),
    ],
)
def test_rows_that_no_copy_takes_are_refused(heads, D, reason):
    pages = Pages(kv=jnp.zeros((2, 2 * heads, 8, D), jnp.float16), layout="head_major")
    row = jnp.zeros((1, heads, D), jnp.float16)
    with pytest.raises(ValueError, match=f"mosaic_gpu does not take this: .*{reason}"):
        write_pages(pages, row, row, int32(8), backend="mosaic_gpu")


def test_what_it_does_not_take_is_refused():
    k, v = map(jnp.asarray, tokens())
    with pytest.raises(ValueError, match="pages must be head-major"):
        write_pages(random_pool("paired"), k, v, int32(*range(T)), backend="mosaic_gpu")
    codes = SymmetricPages(
        kv=jnp.zeros((N, 2 * K, P, 16), jnp.int8),
        scales=jnp.zeros((N, 2 * K, P), jnp.float32),
        layout="head_major",
    )
    with pytest.raises(ValueError, match="SymmetricPages are not written yet"):
        write_pages(codes, k, v, int32(*range(T)), backend="mosaic_gpu")
