"""Pages of codes against codes made in numpy, float64; attention over them against naive attention
over what they decode to."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkv.testing.pages import check_attention_over, check_pages, decoded, write_whole_pages
from pallas_kernels import (
    AffinePages,
    AnyPages,
    ChannelPages,
    Layout,
    Pages,
    SymmetricPages,
    copy_pages,
    ragged_paged_attention,
    seal_pages,
    write_pages,
)
from pallas_kernels.codes import encode_symmetric, symmetric_scale
from pallas_kernels.pages import LAYOUTS, numbers_shape, pool_shape

N, P, K, D = 9, 8, 2, 32
BACKENDS = ("reference", "xla")
CODES = {"int8": jnp.int8, "fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}
KINDS = (*CODES, "static", "int4", "kivi4", "kivi2", "narrow")
SCALES = (0.03, 0.02, 0.01, 0.05)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def empty(
    kind: str, layout: Layout, num_pages: int = N, sizes: tuple[int, int] = (P, D)
) -> AnyPages:
    """Returns pages with random codes whose parameters are all NaN; `sizes` is (P, D)."""
    P, D = sizes

    def shape(heads: int, *rest: int) -> tuple[int, ...]:
        return (num_pages, heads, P, *rest)

    def numbers(heads: int) -> tuple[int, ...]:
        return numbers_shape(layout, num_pages, P, heads)

    def pool(row_size: int) -> tuple[int, ...]:
        return pool_shape(layout, num_pages, P, K, row_size)

    nan = float("nan")
    if kind in CODES:
        kv, scales = jnp.ones(pool(D), CODES[kind]), jnp.full(numbers(2 * K), nan)
        return SymmetricPages(kv=kv, scales=scales, layout=layout)
    if kind == "static":
        return SymmetricPages(
            kv=jnp.ones(pool(D), jnp.int8), scales=jnp.array(SCALES), layout=layout
        )
    if kind == "int4":
        codes = jnp.full(pool(D // 2), 0x5A, jnp.uint8)
        parameters = jnp.full(numbers(2 * K), 0x7E007E00, jnp.uint32)  # NaN twice
        return AffinePages(kv=codes, parameters=parameters, layout=layout)
    bits = 4 if kind == "kivi4" else 2
    codes = jnp.full(shape(K, D * bits // 8), 0x5A, jnp.uint8)
    return ChannelPages(
        k=codes,
        v=codes,
        k_parameters=jnp.full((num_pages, K, 2, D), nan, jnp.float16),
        v_parameters=jnp.full(shape(K, 2), nan, jnp.float16),
        k_bits=bits,
        v_bits=bits,
        narrow_k=kind == "narrow",
        layout=layout,
    )


def filled(
    kind: str, layout: Layout, kv: np.ndarray, pages: list[int], backend: str = "xla"
) -> AnyPages:
    """Writes `[n, P, K, 2, D]` into pages, whole ones."""
    return write_whole_pages(empty(kind, layout, N), kv, pages, backend)


def oracle(kind: str, kv: np.ndarray) -> np.ndarray:
    """Returns the expected decoded values of `[n, P, K, 2, D]` float64."""
    if kind in CODES or kind == "static":
        dtype = np.dtype(CODES.get(kind, jnp.int8))
        most = 127.0 if dtype == np.int8 else float(ml_dtypes.finfo(dtype).max)
        scale = np.abs(kv).max(-1, keepdims=True) / most
        if kind == "static":
            scale = np.array(SCALES, np.float32).astype(np.float64).reshape(K, 2, 1)
        ratio = np.clip(kv / scale, -most, most)
        code = np.round(ratio) if dtype == np.int8 else ratio.astype(dtype).astype(np.float64)
        return code * scale
    if kind == "int4":
        return affine(kv, 4, axes=(-1,))
    bits = 4 if kind == "kivi4" else 2
    k, v = kv[..., 0, :], kv[..., 1, :]
    return np.stack([affine(k, bits, axes=(1,)), affine(v, bits, axes=(-1,))], axis=-2)


def affine(x: np.ndarray, bits: int, axes: tuple[int, ...]) -> np.ndarray:
    low, high, most = x.min(axes, keepdims=True), x.max(axes, keepdims=True), 2**bits - 1
    scale = ((high - low) / most).astype(np.float16).astype(np.float64)
    low = low.astype(np.float16).astype(np.float64)
    return np.clip(np.round((x - low) / scale), 0, most) * scale + low


def step_of(kind: str, kv: np.ndarray) -> np.ndarray:
    """Returns the largest error of a value that is not clipped: the distance of codes."""
    size = np.abs(kv).max(-1, keepdims=True)
    if kind == "int4":
        return np.ptp(kv, axis=-1, keepdims=True) / 15
    return size * {"fp8_e4m3": 2.0**-3, "fp8_e5m2": 2.0**-2}.get(kind, 1 / 100)


# Half the distance of two codes, in parts of the largest value of a page and head.
TOLERANCES = dict(int8=1 / 254, fp8_e4m3=2**-4, fp8_e5m2=2**-3, int4=1 / 14, kivi4=1 / 14)


@every_layout
@pytest.mark.parametrize("kind", TOLERANCES)
def test_each_type_of_pages_passes_the_public_check(kind, layout):
    check_pages(lambda n: empty(kind, layout, n), tolerance=1.01 * TOLERANCES[kind])


@every_backend
@every_layout
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "narrow"])
def test_what_is_written_decodes_to_the_nearest_code(kind, layout, backend):
    kv = np.random.default_rng(0).standard_normal((3, P, K, 2, D)).astype(np.float32)
    got = decoded(filled(kind, layout, kv, [7, 2, 5], backend))[[7, 2, 5]]
    want = oracle(kind, kv.astype(np.float64))
    # A value halfway between two codes may go either way.
    off = np.abs(got - want) > 1e-3 * np.abs(kv).max()
    assert off.mean() < 1e-3
    if kind in (*CODES, "int4"):
        assert (np.abs(got - kv) <= step_of(kind, kv)).all()


@every_layout
@pytest.mark.parametrize("kind", KINDS)
def test_backends_write_the_same_codes_and_nothing_else(kind, layout):
    kv = np.random.default_rng(1).standard_normal((2, P, K, 2, D)).astype(np.float32)
    before = jax.device_get(empty(kind, layout).paged)
    written = [jax.device_get(filled(kind, layout, kv, [3, 8], b).paged) for b in BACKENDS]
    others = [page for page in range(N) if page not in (3, 8)]
    for name, array in before.items():
        chex.assert_trees_all_equal(written[0][name], written[1][name])
        chex.assert_trees_all_equal(written[0][name][others], array[others])


@every_layout
def test_narrowed_keys_lose_less_and_values_the_same(layout):
    kv = np.random.default_rng(2).standard_normal((4, P, K, 2, D)).astype(np.float32)
    errors = [
        ((decoded(filled(kind, layout, kv, [1, 2, 3, 4]))[1:5] - kv) ** 2).mean((0, 1, 2, 4))
        for kind in ("kivi2", "narrow")
    ]
    assert errors[1][0] < 0.9 * errors[0][0]
    assert errors[1][1] == errors[0][1]


@every_backend
@every_layout
@pytest.mark.parametrize("kind", KINDS)
def test_a_copied_page_decodes_as_its_source(kind, layout, backend):
    kv = np.random.default_rng(3).standard_normal((2, P, K, 2, D)).astype(np.float32)
    pages = filled(kind, layout, kv, [3, 8])
    ids = (jnp.array(x, jnp.int32) for x in ([3, 8], [8, 1]))
    after = decoded(copy_pages(pages, *ids, backend=backend))
    chex.assert_trees_all_equal(after[[8, 1]], decoded(pages)[[3, 8]])


HARD = {
    "zeros": lambda kv: 0.0 * kv,
    "a constant channel of K": lambda kv: np.where(np.arange(D) == 5, 3.25, kv),
    "all equal": lambda kv: np.full_like(kv, -7.0),
    "outliers": lambda kv: np.where(np.arange(D) == 9, 1e4 * np.sign(kv), kv),
    "tiny": lambda kv: 1e-30 * kv,
    "huge": lambda kv: 1e38 * kv,
    "infinite": lambda kv: np.where(np.arange(D) == 3, np.inf, kv),
    "NaN": lambda kv: np.where(np.arange(D) == 3, np.nan, kv),
}


@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_written_what_is_read_is_finite_and_near(kind, case):
    normal = np.random.default_rng(4).standard_normal((1, P, K, 2, D))
    with np.errstate(all="ignore"):
        kv = HARD[case](normal).astype(np.float32)
    got = decoded(filled(kind, "head_major", kv, [4]))[4:5]
    assert np.isfinite(got).all()
    if kind == "static":
        return  # its scales are of other values
    want = np.clip(np.nan_to_num(kv, nan=0.0, posinf=65504, neginf=-65504), -65504, 65504)
    # No value is further off than a part of its group's range, the coarsest being 2 bits.
    reach = max(np.ptp(want), np.abs(want).max())
    assert np.abs(got - want).max() <= reach * (1 / 4 if "kivi" not in kind else 1 / 3) + 1e-6
    if case == "a constant channel of K" and "kivi" in kind:
        chex.assert_trees_all_equal(got[..., 0, 5], 3.25)
    if case in ("zeros", "all equal"):
        chex.assert_trees_all_close(got, want, rtol=1e-3)


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "xla"])
@every_layout
@pytest.mark.parametrize("kind", KINDS)
def test_attention_over_codes_is_attention_over_what_they_decode_to(kind, layout, backend):
    check_codes(kind, layout, backend, longest=37, window=13)


def check_codes(
    kind: str, layout: Layout, backend: str, *, sizes: tuple[int, int] = (P, D), **options: Any
) -> None:
    """See `check_attention_over`; `sizes` is (P, D)."""
    check_attention_over(
        lambda num_pages: empty(kind, layout, num_pages, sizes),
        functools.partial(ragged_paged_attention, backend=backend),
        **options,
    )


@every_backend
def test_only_the_first_count_pages_are_sealed_and_none_outside_the_pool(backend):
    kv = np.random.default_rng(5).standard_normal((3, 2 * K, P, D)).astype(np.float32)
    exact, pages = Pages(kv=jnp.asarray(kv)), empty("kivi2", "head_major")
    source, target = jnp.array([0, 1, 2], jnp.int32), jnp.array([2, -1, 4], jnp.int32)
    sealed = seal_pages(pages, exact, source, target, jnp.int32(2), backend=backend)
    finite = np.isfinite(decoded(sealed)).all(axis=(1, 2, 3, 4))
    assert finite.tolist() == [page == 2 for page in range(N)]


@pytest.mark.parametrize(("change", "message"), [
    (dict(kv=jnp.zeros((N, 2 * K, P, D), jnp.int16)), "pages.kv must be int8"),
    (dict(scales=jnp.zeros((N, K, P))), r"pages.scales must be float32 \(9, 4, 8\)"),
    (dict(scales=jnp.zeros(3)), r"pages.scales must be float32 \(4,\)"),
])  # fmt: skip
def test_pages_whose_parts_do_not_fit_are_refused(change, message):
    pages = dataclasses.replace(empty("int8", "head_major"), **change)
    with pytest.raises(ValueError, match=message):
        copy_pages(pages, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_no_code_of_float8_is_minus_zero(dtype):
    x = jnp.asarray([[-1.0, -1e-12, -0.0, 0.0, 1e-12, 1.0]], jnp.float32)
    got = np.asarray(encode_symmetric(x, symmetric_scale(x, dtype), dtype)).view(np.uint8)
    assert 0x80 not in got and (got[:, 1:5] == 0).all() and (got[:, ::5] != 0).all()


def test_pages_that_are_written_whole_take_no_tokens():
    rows = jnp.zeros((1, K, D))
    with pytest.raises(ValueError, match="written whole"):
        write_pages(empty("kivi4", "head_major"), rows, rows, jnp.zeros(1, jnp.int32))
