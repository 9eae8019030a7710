"""Merging parts of a softmax, against the whole one in float64."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import merge_partials

D = 8


def attend(logits: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns out `[D]` and lse of one row in float64; 0 and -inf without keys."""
    if not logits.size:
        return np.zeros(D), np.array(-np.inf)
    lse = logits.max() + np.log(np.exp(logits - logits.max()).sum())
    return np.exp(logits - lse) @ values, lse


def float32(*arrays: np.ndarray) -> tuple[jnp.ndarray, ...]:
    return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4, 80.0], ids=str)
@pytest.mark.parametrize("cut", [0, 1, 5, 9, 10])
def test_parts_merge_into_the_whole_whatever_the_size_of_the_logits(cut, shift):
    rng = np.random.default_rng(cut)
    logits, values = rng.standard_normal(10) + shift, rng.standard_normal((10, D))
    parts = attend(logits[:cut], values[:cut]), attend(logits[cut:], values[cut:])
    want_out, want_lse = attend(logits, values)
    for (out_a, lse_a), (out_b, lse_b) in (parts, parts[::-1]):
        out, lse = merge_partials(*float32(out_a, lse_a, out_b, lse_b))
        # lse is rounded to float32, and its error is a relative error of the weights.
        chex.assert_trees_all_close(out, want_out, rtol=1e-5, atol=1e-5 + abs(shift) * 1e-7)
        chex.assert_trees_all_close(lse, want_lse, rtol=1e-6, atol=1e-6)


def test_an_empty_part_leaves_the_other_as_it_is_and_two_are_empty():
    out, lse = float32(np.random.default_rng(0).standard_normal((3, 2, D)), np.ones((3, 2)) * 7)
    empty_out, empty_lse = jnp.zeros_like(out), jnp.full_like(lse, -jnp.inf)
    for parts in ((out, lse, empty_out, empty_lse), (empty_out, empty_lse, out, lse)):
        merged_out, merged_lse = merge_partials(*parts)
        chex.assert_trees_all_equal(merged_out, out)
        chex.assert_trees_all_equal(merged_lse, lse)
    merged_out, merged_lse = merge_partials(empty_out, empty_lse, empty_out, empty_lse)
    chex.assert_trees_all_equal(merged_out, empty_out)
    chex.assert_trees_all_equal(merged_lse, empty_lse)


def test_a_part_with_much_smaller_logits_has_no_weight():
    out, lse = merge_partials(
        *float32(np.ones(D), np.array(1e30), np.full(D, 5.0), np.array(-1e30))
    )
    chex.assert_trees_all_equal(out, np.ones(D))
    assert lse == np.float32(1e30)


def test_three_parts_merge_alike_in_any_order():
    rng = np.random.default_rng(0)
    a, b, c = (float32(rng.standard_normal((4, D)), rng.standard_normal(4)) for _ in range(3))
    left, right = (
        merge_partials(*merge_partials(*a, *b), *c),
        merge_partials(*a, *merge_partials(*b, *c)),
    )
    for one, other in zip(left, right, strict=True):
        chex.assert_trees_all_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_sum_is_taken_in_float32_and_given_in_the_dtype_of_the_parts():
    parts = [(jnp.full((1, D), x, jnp.bfloat16), jnp.zeros(1)) for x in (1.0, 1.0078125)]
    out, lse = merge_partials(*parts[0], *parts[1])
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    chex.assert_trees_all_equal(out, jnp.full((1, D), (1.0 + 1.0078125) / 2).astype(jnp.bfloat16))
