"""`check_attention` lets right functions pass and catches those that are wrong in one place."""

from functools import partial
from pathlib import Path
from runpy import run_path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.testing import CASES, check_attention
from pallas_kernels import ragged_paged_attention
from pallas_kernels.pages import LAYOUTS

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "check_a_backend.py"
reference = partial(ragged_paged_attention, backend="reference")
# A few cases that compile fast.
FEW = (f"every length, mixed, {LAYOUTS[0]}", "window of 17", "sinks of decode")


def few(case) -> bool:
    return any(case is CASES[name] for name in FEW)


def test_a_right_function_passes_in_the_cases_that_it_takes():
    assert check_attention(reference, takes=few) == list(FEW)
    with pytest.raises(ValueError, match="no case is left"):
        check_attention(reference, takes=lambda case: False)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_the_backends_pass_in_every_case(backend):
    attention = partial(ragged_paged_attention, backend=backend)
    assert check_attention(attention) == list(CASES)


def window_one_too_wide(*arrays, window=None, **options):
    return reference(*arrays, window=window and window + 1, **options)


def without_sinks(*arrays, sinks=None, **options):
    return reference(*arrays, **options)


def base_two_lse(*arrays, **options):
    out, lse = reference(*arrays, **options)
    return out, lse / np.log(2).astype(np.float32)


def sees_the_next_token(q, pages, page_table, kv_lens, query_starts, **options):
    return reference(q, pages, page_table, kv_lens + 1, query_starts, **options)


def adds_an_unused_slot(q, pages, *arrays, **options):
    """Adds 0 times a slot of the null page."""
    out, lse = reference(q, pages, *arrays, **options)
    return out + (0.0 * pages.kv[0, 0, 0, 0]).astype(out.dtype), lse


def leaves_padding_as_it_is(q, pages, *arrays, **options):
    out, lse = reference(q, pages, *arrays, **options)
    return out.at[-1].set(1.0), lse


def rounds_to_half(q, *arrays, **options):
    out, lse = reference(q, *arrays, **options)
    return out.astype(jnp.float16), lse


@pytest.mark.parametrize(
    "attention, case",
    [
        (window_one_too_wide, "window of 17"),
        (without_sinks, "sinks of decode"),
        (base_two_lse, FEW[0]),
        (sees_the_next_token, FEW[0]),
        (adds_an_unused_slot, FEW[0]),
        (leaves_padding_as_it_is, FEW[0]),
        (rounds_to_half, FEW[0]),
    ],
)
def test_a_wrong_function_is_caught_and_the_case_named(attention, case):
    with pytest.raises(AssertionError, match=case):
        check_attention(attention, takes=few)


def test_the_function_of_the_example_passes():
    """This runs only the fast cases; the example itself runs all of them."""
    attention = run_path(str(EXAMPLE))["attention"]
    assert check_attention(attention, takes=few) == list(FEW)


@pytest.mark.slow
def test_the_example_passes_in_every_case(capsys):
    run_path(str(EXAMPLE), run_name="__main__")
    assert f"{len(CASES)} cases agree" in capsys.readouterr().out
