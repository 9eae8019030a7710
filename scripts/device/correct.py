"""How `device check` tests the GPU kernels: each named shape, and some properties.

Attention is compared with the `reference` backend on lengths around every edge, over pages whose
unused slots are NaN and tables whose unused entries name no page. This module is not a command.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.arith import ceil_div
from pallas_kernels import Pages, SharedPrefixes, SymmetricPages, write_pages
from pallas_kernels import ragged_paged_attention as attention
from pallas_kernels.attention import mosaic_gpu
from pallas_kernels.targets.cases import Shape
from scripts.device.peers import Input, Unavailable

TOLERANCE = 2e-2
LONGEST = 1500  # tokens per sequence: the reference gathers a whole table at once
GARBAGE = -7  # table entries that no query needs


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A ragged step: `given.q` has all queries, `q_lens` their number for each sequence."""

    given: Input
    q_lens: Sequence[int]

    def attend(self, backend: str, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns out and lse as float32."""
        given, starts = self.given, jnp.asarray(np.cumsum([0, *self.q_lens]), jnp.int32)
        where = given.q, given.pages, given.table, given.kv_lens, starts
        options = dict(scale=given.scale, return_lse=True) | options
        out, lse = attention(*where, backend=backend, **options)
        return np.asarray(out, np.float32), np.asarray(lse)

    def error(self, **options: Any) -> float:
        """Returns the largest error of the kernel.

        Raises:
          ValueError: the error is above the tolerance.
        """
        got = self.attend("mosaic_gpu", **options)
        return furthest(got, self.attend("reference", **options))


def furthest(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> float:
    """Returns the largest difference of out or lse; raises as `difference` does."""
    return max(map(difference, got, want, ("out", "lse")))


def difference(got: np.ndarray, want: np.ndarray, name: str, most: float = TOLERANCE) -> float:
    """Returns the largest difference.

    Raises:
      ValueError: it is above `most`, or a value is NaN.
    """
    with np.errstate(invalid="ignore"):
        off = np.where(got == want, 0.0, np.abs(got - want))
    off = np.where(np.isnan(off), np.inf, off)
    if not off.max() <= most:
        worst = np.unravel_index(off.argmax(), off.shape)
        at = ", ".join(map(str, worst))
        count = f"{(off > most).sum()} of {off.size}"
        raise ValueError(
            f"{name}[{at}] is {got[worst]:.4g}, should be {want[worst]:.4g}; {count} are off"
        )
    return float(off.max())


def check(name: str, simulated: bool) -> float:
    """Returns the largest error of the kernels on a named shape, or in one of EXTRAS.

    Raises:
      Unavailable: the kernels refuse it.
      ValueError: the error is above the tolerance.
    """
    if name in EXTRAS:
        return EXTRAS[name](simulated)
    shape = Shape.parse(name)
    return _batch(shape, simulated).error(window=shape.window)


def _batch(shape: Shape, simulated: bool) -> Batch:
    """Returns lengths around the edges of pages, blocks and items, and random ones."""
    T, B = (12, 3) if simulated else (shape.T, shape.B)
    if shape.T == shape.B:
        T, q_lens = B, [1] * B
    else:  # as the name says: some sequences have one query, the others share the rest
        singles = 0 if shape.B < 64 else 64
        q_lens = [1] * singles + [(T - singles) // (B - singles)] * (B - singles)
    longest = 40 if simulated else LONGEST
    edges = [n + more for n in (0, shape.P, 64, 512, 1024) for more in (0, 1, -1)]
    rng = np.random.default_rng(1)
    before = rng.permutation([n for n in edges if 0 <= n <= longest])
    before = [*before, *rng.integers(0, longest, B)]
    # Only a single query may be without a key.
    lens = [int(n) + (few if few > 1 else 0) for n, few in zip(before, q_lens, strict=False)]
    q: Any = shape.q
    table: Any = jax.ShapeDtypeStruct((B, 1), jnp.int32)
    reason = mosaic_gpu.refusal(q, shape.pages("head_major"), table)
    if reason:
        raise Unavailable(f"refused: {reason}")
    given = random_input(lens, shape.dtype, shape.H, shape.K, shape.D, shape.P, T=T, poisoned=True)
    return Batch(given=given, q_lens=q_lens)


def _mixed(simulated: bool) -> Batch:
    name = "mixed-bf16-h4-k2-d64-p16" if simulated else "mixed-bf16-h32-k8-d128-p64"
    if not simulated:
        return _batch(Shape.parse(name), simulated)
    given = random_input((33, 5, 40), jnp.bfloat16, 4, 2, 64, 16, T=12, poisoned=True)
    return Batch(given=given, q_lens=(1, 1, 10))


def _options(simulated: bool) -> float:
    batch = _mixed(simulated)
    sinks = jnp.linspace(-2, 2, batch.given.q.shape[1], dtype=jnp.float32)
    return batch.error(sinks=sinks, soft_cap=5.0, window=30)


def _shared(simulated: bool) -> float:
    """Tests a prefix that ends inside a page; the sequences' own tables have no page for it."""
    B, common = (3, 40) if simulated else (8, 1100)
    H, K, D, P = (4, 2, 64, 16) if simulated else (32, 8, 128, 64)
    lens = [common + 7 * b + 1 for b in range(B)]
    given = random_input(lens, jnp.bfloat16, H, K, D, P, poisoned=True)
    # The page that the prefix ends in is each sequence's own: it ends where whole pages do.
    whole = common // P
    table = np.array(given.table)
    table[1:, :whole] = table[0, :whole]
    alike = dataclasses.replace(given, table=jnp.asarray(table))
    want = Batch(given=alike, q_lens=[1] * B).attend("reference")
    table[1:, :whole] = GARBAGE
    hidden = dataclasses.replace(given, table=jnp.asarray(table))
    shared = SharedPrefixes(
        starts=jnp.array([0, B], jnp.int32), lengths=jnp.array([whole * P], jnp.int32)
    )
    got = Batch(given=hidden, q_lens=[1] * B).attend("mosaic_gpu", shared=shared)
    return furthest(got, want)


def _bits(simulated: bool) -> float:
    """Tests that each decoded row has the same bits in a batch and by itself."""
    lens = (17, 40, 33) if simulated else (1400, 513, 64, 1, 999)
    H, K, D, P = (4, 2, 64, 16) if simulated else (32, 8, 128, 16)
    given = random_input(lens, jnp.bfloat16, H, K, D, P, poisoned=True)
    together = Batch(given=given, q_lens=[1] * len(lens)).attend("mosaic_gpu")
    for b, n in enumerate(lens):
        alone = dataclasses.replace(
            given, q=given.q[b : b + 1], table=given.table[b : b + 1], lens=(n,)
        )
        got = Batch(given=alone, q_lens=[1]).attend("mosaic_gpu")
        for one, all_, name in zip(got, together, ("out", "lse"), strict=True):
            difference(one, all_[b : b + 1], f"{name} of row {b} by itself", most=0.0)
    return 0.0


def _write(simulated: bool) -> float:
    """Tests that pages have the bits that `xla` writes, also at sizes that copies do not fit."""
    for K, D, dtype in itertools.chain(
        [(3, 80, jnp.bfloat16), (1, 8, jnp.float32)], [] if simulated else [(8, 128, jnp.bfloat16)]
    ):
        N, P, T = 9, 16, 40
        pages = Pages(kv=jnp.zeros((N, 2 * K, P, D), dtype), layout="head_major")
        k, v = jax.random.normal(jax.random.key(0), (2, T, K, D), jnp.float32)
        slots = np.random.default_rng(3).permutation(np.arange(P, N * P))[:T].astype(np.int32)
        slots[:3] = -1, N * P, 0
        got, want = (
            np.asarray(write_pages(pages, k, v, jnp.asarray(slots), backend=backend).kv[1:])
            for backend in ("mosaic_gpu", "xla")
        )
        difference(
            got.astype(np.float32), want.astype(np.float32), f"page of K = {K}, D = {D}", most=0.0
        )
    return 0.0


EXTRAS: dict[str, Callable[[bool], float]] = {
    "sinks, soft cap and window": _options,
    "a shared prefix": _shared,
    "bits of a row by itself and in a batch": _bits,
    "page writes": _write,
}


def random_input(
    lens: Sequence[int],
    dtype: Any,
    H: int,
    K: int,
    D: int,
    P: int,
    T: int | None = None,
    poisoned: bool = False,
) -> Input:
    """Returns random queries, and random pages in random order.

    Args:
      lens: lengths of the B sequences.
      dtype: dtype of K and V.
      H, K, D, P: as in the README.
      T: number of queries; None for B.
      poisoned: slots that are not live are NaN, and such table entries name no page.
    """
    B, M = len(lens), max(1, *(ceil_div(n, P) for n in lens))
    N = 1 + sum(ceil_div(n, P) for n in lens)
    ids = iter(np.random.default_rng(2).permutation(np.arange(1, N)))
    table = np.full((B, M), GARBAGE if poisoned else 0, np.int32)
    live = np.full((N, P), not poisoned)
    for b, n in enumerate(lens):
        table[b, : ceil_div(n, P)] = here = [next(ids) for _ in range(ceil_div(n, P))]
        for page, start in zip(here, range(0, n, P), strict=True):
            live[page, : n - start] = True
    of_q, of_kv = jax.random.split(jax.random.key(0))
    pages = _random_pages(of_kv, jnp.asarray(live), (N, 2 * K, P, D), jnp.dtype(dtype))
    q = jax.random.normal(of_q, (T or B, H, D), jnp.bfloat16)
    if dtype == jnp.float32:
        q = q.astype(dtype)
    return Input(q=q, pages=pages, table=jnp.asarray(table), lens=tuple(lens))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _random_pages(
    key: jax.Array, live: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype
) -> Pages | SymmetricPages:
    """Replaces slots that are not in `live [N, P]` by NaN."""
    live = live[:, None]
    if dtype.itemsize > 1:
        kv = jax.random.normal(key, shape, jnp.bfloat16)
        kv = jnp.where(live[..., None], kv, jnp.nan)
        return Pages(kv=kv.astype(dtype), layout="head_major")
    codes = jax.random.randint(key, shape, -127, 128, jnp.int8)
    scales = jnp.full(shape[:-1], 1 / 64, jnp.float32)
    if dtype != jnp.int8:
        codes = (codes.astype(jnp.float32) / 32).astype(dtype)
        scales = scales * 32
    scales = jnp.where(live, scales, jnp.nan)
    return SymmetricPages(kv=codes, scales=scales, layout="head_major")
