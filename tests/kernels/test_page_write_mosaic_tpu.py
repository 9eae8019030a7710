"""Page writes for TPUs on a simulated chip: races, and reads of memory that nothing was written to
(it holds NaN) or out of bounds, are errors."""

import dataclasses
from collections.abc import Iterator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import Pages, copy_pages, write_pages
from pallas_kernels.page_write import mosaic_tpu
from pallas_kernels.pages import numbers_shape, pool_shape
from pallas_kernels.quantised_pages import AffinePages, SymmetricPages, TokenPages

N, K, D = 6, 3, 32
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "int8": jnp.int8, "e4m3": jnp.float8_e4m3fn}


@pytest.fixture(autouse=True, scope="module")
def simulated() -> Iterator[None]:
    parameters = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
    )
    with pltpu.force_tpu_interpret_mode(parameters):
        yield
    pltpu.reset_tpu_interpret_mode_state()
    jax.clear_caches()


def random_pages(kind: str, P: int) -> TokenPages:
    rng = np.random.default_rng(P)

    def bits(dtype, *shape: int) -> jax.Array:
        size = np.prod(shape) * jnp.dtype(dtype).itemsize
        return jnp.asarray(rng.integers(0, 120, size, np.uint8).view(dtype).reshape(shape))

    def pool(row_size: int) -> tuple[int, ...]:
        return pool_shape("paired", N, P, K, row_size)

    numbers = numbers_shape("paired", N, P, 2 * K)  # in rows of registers at P = 64
    if kind == "int4":
        parameters = bits(jnp.uint32, *numbers)
        kv = bits(jnp.uint8, *pool(D // 2))
        return AffinePages(kv=kv, parameters=parameters, layout="paired")
    kv = bits(DTYPES[kind], *pool(D))
    if kind in ("f32", "bf16"):
        return Pages(kv=kv, layout="paired")
    return SymmetricPages(kv=kv, scales=bits(jnp.float32, *numbers), layout="paired")


def pieces(P: int, seed: int) -> np.ndarray:
    """Slots of a decode token, of runs across pages, of padding, and outside the pool; in any
    order."""
    rng = np.random.default_rng(seed)
    runs = [[3 * P - 1], range(P + P // 2, 3 * P - 2), range(5 * P, 6 * P), [4 * P + 5]]
    runs += [[0, 0, 0], [N * P + 3, -1]]
    return np.concatenate([list(runs[i]) for i in rng.permutation(len(runs))])


def check(pages: TokenPages, slots: np.ndarray) -> None:
    """Checks that the kernel writes the bits that `xla` writes, except in the null page."""
    k, v = np.random.default_rng(1).standard_normal((2, len(slots), K, D)).astype(np.float32)
    arguments = jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots, jnp.int32)
    backends = "mosaic_tpu", "xla"
    assert_same(*(write_pages(pages, *arguments, backend=backend) for backend in backends))


def assert_same(got: TokenPages, want: TokenPages) -> None:
    for name, array in want.paged.items():
        both = got.paged[name], array
        chex.assert_trees_all_equal(*(np.asarray(x)[1:].view(np.uint8) for x in both))


@pytest.mark.parametrize("kind", [*DTYPES, "int4"])
@pytest.mark.parametrize("P", [8, pytest.param(24, marks=pytest.mark.slow), 64])
def test_the_slots_of_a_step_hold_its_tokens_and_all_others_their_old_bits(kind, P):
    check(random_pages(kind, P), pieces(P, seed=P))


@pytest.mark.parametrize("slots", [[], [0], [-1, 200], [8], [9, 8, 47, 0]])
def test_few_tokens_or_none_are_written(slots):
    check(random_pages("bf16", 8), np.array(slots))


def test_one_slot_of_each_page_is_written():
    check(random_pages("bf16", 16), np.random.default_rng(0).permutation(np.arange(20, 96, 16)))


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize(
    "change", [dict(MOST_TOKENS=7), dict(NUM_BUFFERS=1), dict(NUM_BUFFERS=2)], ids=str
)
def test_calls_of_few_tokens_or_of_few_buffers_write_the_same(kind, change, monkeypatch):
    for name, value in change.items():
        monkeypatch.setattr(mosaic_tpu, name, value)
    jax.clear_caches()
    check(random_pages(kind, 64), pieces(64, seed=3))


@pytest.mark.parametrize("P", [pytest.param(192, marks=pytest.mark.slow), 256])
def test_scales_of_pages_wider_than_a_register_are_written(P):
    check(random_pages("int8", P), np.array([P, P + 127, P + 128, 2 * P - 1, 2 * P, 4 * P - 3]))


def test_fixed_scales_stay_as_they_are():
    pages = random_pages("int8", 16)
    scales = jnp.linspace(0.01, 0.05, 2 * K)
    check(dataclasses.replace(pages, scales=scales), pieces(16, seed=2))


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
@pytest.mark.parametrize(
    "source, target",
    [([], []), ([2, 3, 4], [3, 2, 5]), ([1, 0, 0, 9], [4, 0, 0, 2]), ([1, 2, 3], [-1, 6, 5])],
    ids=["none", "exchanged", "padded", "outside"],
)
def test_pages_are_copied_all_reads_before_all_writes(kind, source, target):
    pages = random_pages(kind, 8)
    ids = jnp.asarray(source, jnp.int32), jnp.asarray(target, jnp.int32)
    assert_same(*(copy_pages(pages, *ids, backend=backend) for backend in ("mosaic_tpu", "xla")))


@pytest.mark.parametrize(
    ("layout", "dtype", "reason"),
    [
        ("head_major", jnp.float32, "pages must be paired"),
        ("paired", jnp.float16, "float16 is no type of a TPU's vector unit"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(layout, dtype, reason):
    pages = Pages(kv=jnp.zeros(pool_shape(layout, N, 8, K, D), dtype), layout=layout)
    rows, ids = jnp.zeros((1, K, D)), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=f"mosaic_tpu does not take this: {reason}"):
        write_pages(pages, rows, rows, ids, backend="mosaic_tpu")
    with pytest.raises(ValueError, match=f"mosaic_tpu does not take this: {reason}"):
        copy_pages(pages, ids, ids, backend="mosaic_tpu")
