"""No copy of the pool: a step that writes and attends needs memory only for its activations."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.testing.layouts import by_tokens
from pallas_kernels import (
    ChannelPages,
    Pages,
    copy_pages,
    ragged_paged_attention,
    seal_pages,
    write_pages,
)
from pallas_kernels.pages import LAYOUTS, pool_shape

B, H, K, D, P, M = 4, 8, 2, 64, 16, 8
DTYPES = (jnp.float32, jnp.bfloat16)


def int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def write_and_attend(pages, q, k, v, slots, *batch):
    pages = write_pages(pages, k, v, slots)
    return pages, ragged_paged_attention(q, pages, *batch, scale=0.125, window=50)


def arguments(step: Callable, T: int, dtype) -> list[jax.ShapeDtypeStruct]:
    """Returns the arguments of `step` after the pages."""
    q, kv = (jax.ShapeDtypeStruct((T, heads, D), dtype) for heads in (H, K))
    if step is copy_pages:
        return [int32(T), int32(T)]
    new = [kv, kv, int32(T)]
    return new if step is write_pages else [q, *new, int32(B, M), int32(B), int32(B + 1)]


@pytest.mark.parametrize(
    "step, T, dtype, layout",
    [
        *((write_pages, 64, dtype, layout) for dtype in DTYPES for layout in LAYOUTS),
        *((copy_pages, 8, dtype, layout) for dtype in DTYPES for layout in LAYOUTS),
        (write_and_attend, B, jnp.bfloat16, "head_major"),
        (write_and_attend, 200, jnp.float32, "head_major"),
    ],
)
def test_a_step_over_a_donated_pool_aliases_it_and_holds_no_second_one(step, T, dtype, layout):
    pages = Pages(kv=jax.ShapeDtypeStruct(pool_shape(layout, 2048, P, K, D), dtype), layout=layout)
    compiled = jax.jit(step, donate_argnums=0).lower(pages, *arguments(step, T, dtype)).compile()
    memory = compiled.memory_analysis()
    pool_bytes = pages.kv.size * pages.kv.dtype.itemsize
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sealing_into_a_donated_pool_aliases_it_and_holds_no_second_one(layout):
    """Both pools: the codes are written, the floats are read."""
    shape = pool_shape(layout, 2048, P, K, D)
    exact = Pages(kv=jax.ShapeDtypeStruct(shape, jnp.bfloat16), layout=layout)
    codes = jax.ShapeDtypeStruct((2048, K, P, D // 2), jnp.uint8)
    pages = ChannelPages(
        k=codes,
        v=codes,
        k_parameters=jax.ShapeDtypeStruct((2048, K, 2, D), jnp.float16),
        v_parameters=jax.ShapeDtypeStruct((2048, K, P, 2 * D // 32), jnp.float16),
        layout=layout,
    )
    compiled = (
        jax.jit(seal_pages, donate_argnums=0)
        .lower(pages, exact, int32(8), int32(8), jax.ShapeDtypeStruct((), jnp.int32))
        .compile()
    )
    memory = compiled.memory_analysis()
    pool_bytes = sum(x.size * x.dtype.itemsize for x in pages.paged.values())
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 4


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_past_2_to_the_31_elements_are_written_copied_and_read(layout):
    """4.3 GB: an index that overflows 32 bits reads or writes near the pool's start."""
    P, K, D = 64, 4, 128
    N = 2**31 // (P * 2 * K * D) + 16
    last = N - 1
    pages = jax.jit(
        lambda: Pages(kv=jnp.zeros(pool_shape(layout, N, P, K, D), jnp.bfloat16), layout=layout)
    )()
    rng = np.random.default_rng(0)
    k, v = jnp.asarray(rng.standard_normal((2, 3, K, D)), jnp.bfloat16)
    slots = jnp.asarray([last * P + P - 1, (last - 1) * P, 5], jnp.int32)
    pages = jax.jit(write_pages, donate_argnums=0)(pages, k, v, slots)
    source, target = jnp.asarray([last - 1], jnp.int32), jnp.asarray([last - 2], jnp.int32)
    pages = jax.jit(copy_pages, donate_argnums=0)(pages, source, target)

    where = {(last, P - 1): 0, (last - 1, 0): 1, (last - 2, 0): 1, (0, 5): 2}
    for page in (0, 1, 15, 16, N // 2, last - 3, last - 2, last - 1, last):
        held = by_tokens(np.asarray(pages.kv[page]), layout)
        want = np.zeros_like(held)
        for (at, offset), t in where.items():
            if at == page:
                want[offset, 0::2], want[offset, 1::2] = k[t], v[t]
        chex.assert_trees_all_equal(held, want)

    q = jnp.asarray(rng.standard_normal((1, K, D)), jnp.bfloat16)
    table, one = jnp.asarray([[last - 2]], jnp.int32), jnp.asarray([1], jnp.int32)
    starts = jnp.asarray([0, 1], jnp.int32)
    for backend in ("reference", "xla"):
        out = ragged_paged_attention(q, pages, table, one, starts, scale=1.0, backend=backend)
        chex.assert_trees_all_equal(out[0], v[1])
