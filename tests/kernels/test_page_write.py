"""Writes and copies against a dict of slots; nothing else in the pool changes by a bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.testing.layouts import by_tokens, stored
from pallas_kernels import Layout, Pages, copy_pages, write_pages
from pallas_kernels.pages import LAYOUTS

N, P, K, D, T = 7, 8, 2, 16, 6
BACKENDS = ("reference", "xla")
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def random_pool(layout: Layout, dtype=np.float32, seed: int = 0) -> Pages:
    """A pool of random numbers, with a NaN in the first of each slot's."""
    rng = np.random.default_rng(seed)
    kv = rng.standard_normal((N, P, 2 * K, D)).astype(dtype)
    kv[:, :, 0, 0] = np.nan
    return Pages(kv=jnp.asarray(stored(kv, layout)), layout=layout)


def slots_of(pages: Pages) -> dict[int, bytes]:
    """Returns the contents of each slot: K of head 0, V of head 0, K of head 1, ..."""
    rows = by_tokens(np.asarray(pages.kv), pages.layout)
    return {slot: row.tobytes() for slot, row in enumerate(rows.reshape(N * P, 2 * K, D))}


def tokens(dtype=np.float32, count: int = T) -> tuple[np.ndarray, np.ndarray]:
    k, v = np.random.default_rng(1).standard_normal((2, count, K, D)).astype(dtype)
    return k, v


def row_bytes(k: np.ndarray, v: np.ndarray) -> bytes:
    return b"".join(part.tobytes() for head in zip(k, v, strict=True) for part in head)


def int32(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


@every_backend
@every_layout
def test_a_written_slot_holds_its_token_and_every_other_its_old_bits(backend, layout):
    pages, (k, v) = random_pool(layout), tokens()
    slots = (N * P - 1, 8, 0, 15, 7, 33)
    want = slots_of(pages) | {slot: row_bytes(k[t], v[t]) for t, slot in enumerate(slots)}
    got = write_pages(pages, k, v, int32(*slots), backend=backend)
    assert got.layout == layout
    assert slots_of(got) == want


@every_backend
@every_layout
def test_padding_aimed_at_the_null_page_touches_its_first_slot_alone(backend, layout):
    pages, (k, v) = random_pool(layout), tokens()
    want = slots_of(pages) | {50: row_bytes(k[2], v[2])}
    got = slots_of(write_pages(pages, k, v, int32(0, 0, 50, 0, 0, 0), backend=backend))
    assert {slot for slot in got if got[slot] != want[slot]} <= {0}


@every_backend
@every_layout
def test_a_slot_outside_the_pool_writes_nothing(backend, layout):
    pages, (k, v) = random_pool(layout), tokens()
    outside = int32(-1, -P, -N * P, N * P, INT32_MIN, INT32_MAX)
    assert slots_of(write_pages(pages, k, v, outside, backend=backend)) == slots_of(pages)


@every_backend
@pytest.mark.parametrize(
    "of, into",
    [
        (np.float32, jnp.bfloat16),
        (np.float32, np.float16),
        (jnp.bfloat16, np.float16),
        (np.float16, jnp.bfloat16),
        (jnp.bfloat16, np.float32),
    ],
    ids=["f32 to bf16", "f32 to f16", "bf16 to f16", "f16 to bf16", "bf16 to f32"],
)
def test_values_are_rounded_to_the_nearest_even_and_overflow_to_infinity(backend, of, into):
    values = [0.0, -0.0, 1 / 3, 1 + 2**-9, 1 + 3 * 2**-9, 65504, 65520, -70000, 3.3e38, np.inf]
    with np.errstate(over="ignore"):
        k = np.resize(values, (T, K, D)).astype(of)
        v = -k
        want_k, want_v = k.astype(into), v.astype(into)
    pages, slots = random_pool("head_major", into), range(8, 8 + T)
    arrays = jnp.asarray(k), jnp.asarray(v), int32(*slots)
    got = slots_of(write_pages(pages, *arrays, backend=backend))
    assert [got[slot] for slot in slots] == [row_bytes(want_k[t], want_v[t]) for t in range(T)]


@every_backend
def test_no_tokens_and_no_copies_change_nothing(backend):
    pages, (k, v) = random_pool("head_major"), tokens(count=0)
    assert slots_of(write_pages(pages, k, v, int32(), backend=backend)) == slots_of(pages)
    assert slots_of(copy_pages(pages, int32(), int32(), backend=backend)) == slots_of(pages)


@every_backend
@every_layout
@settings(derandomize=True, deadline=None, max_examples=10)
@given(slots=st.lists(st.integers(-5, N * P + 5), min_size=T, max_size=T, unique=True))
def test_any_slots_agree_with_a_dict(backend, layout, slots):
    pages, (k, v) = random_pool(layout, jnp.bfloat16), tokens(jnp.bfloat16)
    want = slots_of(pages)
    for t, slot in enumerate(slots):
        if slot in want:
            want[slot] = row_bytes(k[t], v[t])
    assert slots_of(write_pages(pages, k, v, int32(*slots), backend=backend)) == want


def copied(pages: Pages, pairs: list[tuple[int, int]]) -> dict[int, bytes]:
    before = slots_of(pages)
    moved = {new * P + i: before[old * P + i] for old, new in pairs for i in range(P)}
    return before | moved


@every_backend
@every_layout
@pytest.mark.parametrize(
    "pairs",
    [
        [(1, 2), (2, 3), (3, 4), (0, 0), (0, 0)],
        [(3, 2), (2, 1), (1, 5), (4, 4), (0, 0)],
        [(1, 2), (2, 1), (6, 3), (6, 4), (6, 5)],
    ],
    ids=["chain", "chain backwards", "swap and fan out"],
)
def test_copies_read_every_page_before_any_is_written(backend, layout, pairs):
    pages = random_pool(layout)
    source, target = zip(*pairs, strict=True)
    got = copy_pages(pages, int32(*source), int32(*target), backend=backend)
    assert slots_of(got) == copied(pages, pairs)


@every_backend
@every_layout
def test_a_copy_to_a_page_outside_the_pool_writes_nothing(backend, layout):
    pages = random_pool(layout)
    got = copy_pages(pages, int32(1, 2, 3, 4, 5), int32(-1, -N, N, INT32_MIN, 6), backend=backend)
    assert slots_of(got) == copied(pages, [(5, 6)])


# In place.

DONATED = functools.partial(jax.jit, donate_argnums=0)


@every_layout
def test_a_donated_pool_is_updated_where_it_lies(layout):
    pages, (k, v) = random_pool(layout), tokens()
    address = pages.kv.unsafe_buffer_pointer()
    written = DONATED(write_pages)(pages, k, v, int32(*range(8, 8 + T)))
    assert written.kv.unsafe_buffer_pointer() == address
    copied_pages = DONATED(copy_pages)(written, int32(1), int32(2))
    assert copied_pages.kv.unsafe_buffer_pointer() == address


def test_the_pages_given_are_left_as_they_are_unless_donated():
    pages, (k, v) = random_pool("head_major"), tokens()
    before = dataclasses.replace(pages, kv=jnp.array(pages.kv, copy=True))
    write_pages(pages, k, v, int32(*range(8, 8 + T)))
    copy_pages(pages, int32(1), int32(2))
    assert slots_of(pages) == slots_of(before)
