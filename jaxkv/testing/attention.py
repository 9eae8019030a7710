"""Attention functions against naive attention in float64: the cases, and the comparison."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.testing.batches import Batch, Placed, naive_attention, place, random_batch
from pallas_kernels import KeyPart
from pallas_kernels.pages import LAYOUTS, Layout

Attention = Callable[..., Any]  # called like `ragged_paged_attention`, returns out and lse

# Largest relative and absolute error of `out`, by the dtype of the queries, and of `lse`.
TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 1e-3}
LSE_TOLERANCE = 1e-5

# Cached tokens and queries of eight sequences. Pages hold 16 tokens, and a row of the page table
# holds 20 pages, unless a case says otherwise.
LENGTHS = (0, 1, 15, 16, 17, 320, 129, 128)
DECODE = (1, 1, 1, 0, 1, 1, 1, 0)
MIXED = (2, 1, 3, 16, 5, 1, 9, 0)  # sequence 0 has queries, but no key
PREFILL = (0, *LENGTHS[1:])
SINKS = np.array([0.5, -1.0, 3.0, -np.inf], np.float32)


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """A ragged batch, where it lies in pages, and the options of the call.

    Attributes:
      kv_lens: tokens in the cache, per sequence.
      q_lens: queries, per sequence.
      T: rows of q; those after the queries are padding.
      sizes: more arguments of `random_batch`: `heads`, `D`, `dtypes`, `seed`.
      where: more arguments of `place`: `P`, `M`, `layout`, `seed`.
      options: options of the call: `scale`, `window`, `sinks`, `soft_cap`, `keys`.
    """

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    T: int
    sizes: Mapping[str, Any] = field(default_factory=dict)
    where: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def _size_case(
    H: int, K: int, D: int, P: int, M: int, q_dtype: str, kv_dtype: str
) -> AttentionCase:
    return AttentionCase(
        kv_lens=tuple(min(length, M * P) for length in (P, 0, P + 1, 3 * P, P - 1)),
        q_lens=(2, 0, 1, 7, 1),
        T=12,
        sizes=dict(heads=(H, K), D=D, dtypes=(jnp.dtype(q_dtype), jnp.dtype(kv_dtype))),
        where=dict(P=P, M=M),
        options=dict(scale=D**-0.5),
    )


def _random_case(seed: int, T: int, longest_query: int, options: dict[str, Any]) -> AttentionCase:
    """Five sequences of up to 312 tokens, half of which end at the edge of a page or a tile."""
    rng = np.random.default_rng(seed)
    edges = (0, 1, 23, 24, 25, 127, 128, 129, 256, 311, 312)
    kv_lens, q_lens = [], []
    for _ in range(5):
        kv_lens.append(int(rng.choice(edges) if rng.integers(2) else rng.integers(0, 313)))
        q_lens.append(int(rng.integers(0, min(longest_query, T - sum(q_lens)) + 1)))
    return AttentionCase(
        kv_lens=tuple(kv_lens),
        q_lens=tuple(q_lens),
        T=T,
        sizes=dict(heads=(6, 2), seed=seed),
        where=dict(P=24, M=13, seed=seed),
        options=options,
    )


EVERY_LENGTH = {
    f"every length, {name}, {layout}": AttentionCase(
        kv_lens=LENGTHS, q_lens=q_lens, T=T, where=dict(layout=layout)
    )
    for name, q_lens, T, layouts in (
        ("decode", DECODE, 8, LAYOUTS),
        ("mixed", MIXED, 48, (LAYOUTS[0], "paired")),
        ("prefill", PREFILL, 640, ("head_major", "paired")),
    )
    for layout in layouts
}
MANY_SEQUENCES = AttentionCase(
    kv_lens=tuple(np.random.default_rng(0).integers(0, 320, 70).tolist()),
    q_lens=(1,) * 67 + (0,) * 3,
    T=70,
)
ONE_SEQUENCE = {
    f"one sequence, {name}, {length} tokens, {layout}": AttentionCase(
        kv_lens=(length,),
        q_lens=(1,),
        T=1,
        sizes=dict(heads=heads),
        where=dict(P=P, layout=layout),
        options=dict(window=200, soft_cap=5.0),
    )
    for name, heads in (("GQA", (9, 3)), ("MHA", (4, 4)), ("wide GQA", (18, 2)))
    for layout in LAYOUTS
    for length, P in ((1, 16), (128, 24), (300, 16))
}
SIZES = {
    f"H {H}, K {K}, D {D}, P {P}, M {M}, {q_dtype}, {kv_dtype}": _size_case(
        H, K, D, P, M, q_dtype, kv_dtype
    )
    for H, K, D, P, M, q_dtype, kv_dtype in (
        (3, 3, 64, 8, 3, "float32", "float32"),
        (6, 2, 80, 16, 3, "bfloat16", "bfloat16"),
        (5, 1, 96, 24, 3, "float16", "float16"),
        (12, 2, 128, 64, 3, "float32", "bfloat16"),
        (12, 4, 64, 16, 3, "bfloat16", "bfloat16"),
        (14, 2, 256, 256, 3, "bfloat16", "float32"),
        (16, 1, 64, 128, 1, "float32", "float32"),
        (8, 1, 8, 9, 3, "float32", "float16"),
    )
}
# Every number of query heads per KV head up to 16: many more, for a run that may take its time.
GROUP_SIZES = {
    f"{G} heads, D {D}, P {P}": _size_case(G, 1, D, P, 3, "float32", "float32")
    for G in (1, 2, 4, 9, 10, 11, 12, 13, 14, 15)
    for D, P in [((64, 80, 96, 128, 256, 512)[G % 6], (8, 16, 24, 100, 255, 256)[G // 3])]
}
WINDOWS = {
    f"window of {window}": AttentionCase(
        kv_lens=LENGTHS, q_lens=MIXED, T=48, options=dict(window=window)
    )
    for window in (1, 17)  # some of the contexts are shorter than 17
}
OPTIONS = {
    name: AttentionCase(kv_lens=LENGTHS, q_lens=q_lens, T=T, options=options)
    for name, q_lens, T, options in (
        ("sinks of decode", DECODE, 8, dict(sinks=SINKS)),
        ("sinks of a mixed batch", MIXED, 48, dict(sinks=SINKS)),
        ("window, sinks and cap", DECODE, 8, dict(window=17, sinks=SINKS, soft_cap=1.5)),
    )
}
LONG_WINDOW = AttentionCase(kv_lens=(300, 190), q_lens=(300, 150), T=450, options=dict(window=40))
KEY_PARTS = {
    f"the {part} keys": AttentionCase(
        kv_lens=LENGTHS,
        q_lens=MIXED,
        T=48,
        options=dict(keys=KeyPart(part=part, page_size=16, recent=20, first=16)),
    )
    for part in ("first", "middle", "recent")
}
RANDOM = {
    name: [_random_case(seed, T, longest, options) for seed in range(20)]
    for name, T, longest, options in (
        ("decode", 5, 1, dict(window=130)),
        ("plain", 40, 40, {}),
        (
            "options",
            40,
            40,
            dict(window=30, soft_cap=2.0, sinks=np.linspace(-2, 2, 6, dtype=np.float32)),
        ),
    )
}

CASES: Mapping[str, AttentionCase] = {
    **EVERY_LENGTH,
    "many sequences": MANY_SEQUENCES,
    **ONE_SEQUENCE,
    **SIZES,
    **WINDOWS,
    **OPTIONS,
    "window of a long prefill": LONG_WINDOW,
    **KEY_PARTS,
    **{
        f"random {name} {i}": case for name, cases in RANDOM.items() for i, case in enumerate(cases)
    },
}


def check_attention(
    attention: Attention,
    *,
    layouts: Sequence[Layout] = LAYOUTS,
    sizes: Mapping[str, Any] = MappingProxyType({}),
    tolerance: Mapping[str, float] = MappingProxyType(TOLERANCE),
    lse_tolerance: float = LSE_TOLERANCE,
    takes: Callable[[AttentionCase], bool] = lambda case: True,
) -> list[str]:
    """Checks an attention function against naive attention in float64, in every case of `CASES`.

    The cases have all lengths of cache and query, sizes, dtypes and options. Pages lie in a random
    order. NaN is in each slot that no live token fills, and entries of the page table that no query
    needs hold garbage, so that a function that reads what it must not is caught.

    Args:
      attention: called like `pallas_kernels.ragged_paged_attention`, under `jax.jit`, with
        `return_lse=True`. It is hashable, as functions and `functools.partial` are.
      layouts: the layouts of pages that it takes. Cases with others are left out.
      sizes: arguments of `random_batch` for the cases that name none of their own, for example
        `dict(D=64)`.
      tolerance: largest relative and absolute error of `out`, by the dtype of the queries.
      lse_tolerance: the same for `lse`.
      takes: returns False for a case that the function does not take.

    Returns:
      The names of the cases that were checked.

    Raises:
      AssertionError: an answer is wrong; the message begins with the name of the case.
      ValueError: no case is left.

    Example:
      `check_attention(functools.partial(ragged_paged_attention, backend="xla"))`
    """
    checked = []
    for name, case in CASES.items():
        layout = case.where.get("layout", layouts[0])
        if layout not in layouts or not takes(case):
            continue
        batch = random_batch(case.kv_lens, case.q_lens, T=case.T, **{**sizes, **case.sizes})
        where = {"layout": layout, **case.where}
        placed = place(batch, window=case.options.get("window"), **where)
        try:
            out, lse = attend(attention, batch, placed, **case.options)
            assert_attention(out, lse, batch, tolerance, lse_tolerance, **case.options)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        checked.append(name)
    if not checked:
        raise ValueError("no case is left: see `layouts` and `takes`")
    return checked


def assert_attention(
    out: np.ndarray,
    lse: np.ndarray,
    batch: Batch,
    tolerance: Mapping[str, float] = MappingProxyType(TOLERANCE),
    lse_tolerance: float = LSE_TOLERANCE,
    *,
    scale: float = 0.25,
    **options: Any,
) -> None:
    """Checks an answer against `naive_attention`; the options are those of the call.

    Raises:
      AssertionError: `out [T, H, D]` or `lse [T, H]` has a wrong shape, dtype or value, or a
        padding row is not 0 in `out` and minus infinity in `lse`.
    """
    want_out, want_lse = naive_attention(batch, scale=scale, **options)
    chex.assert_shape((out, lse), (want_out.shape, want_lse.shape))
    chex.assert_type((out, lse), (batch.q.dtype, jnp.float32))
    rtol = tolerance[str(out.dtype)]
    chex.assert_trees_all_close(out.astype(np.float64), want_out, rtol=rtol, atol=rtol)
    chex.assert_trees_all_close(lse, want_lse, rtol=lse_tolerance, atol=lse_tolerance)
    padding = slice(sum(batch.q_lens), None)
    chex.assert_trees_all_equal(out[padding], np.zeros_like(out[padding]))
    chex.assert_trees_all_equal(lse[padding], np.full_like(lse[padding], -np.inf))


def attend(
    attention: Attention, batch: Batch, placed: Placed, *, scale: float = 0.25, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Runs an attention function under `jax.jit`; returns `out` and `lse`."""
    arrays = placed.page_table, placed.kv_lens, placed.query_starts
    found = _attend(jnp.asarray(batch.q), placed.pages, *arrays, attention, scale=scale, **options)
    out, lse = jax.device_get(found)
    return out, lse


@partial(
    jax.jit,
    static_argnames=("attention", "scale", "window", "soft_cap", "query_tile", "keys"),
)
def _attend(q, pages, page_table, kv_lens, query_starts, attention, **options):
    return attention(q, pages, page_table, kv_lens, query_starts, return_lse=True, **options)
