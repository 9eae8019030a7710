"""Ragged batches of random queries, keys and values, where they lie in pages, and a naive answer.

`place` writes a `Batch` into pages in the worst way that the contract allows: physical pages are in
random order, each slot that no live token fills holds NaN, and each table entry that no query needs
holds garbage. `naive_attention` answers from the batch, one row and head at a time in float64, and
so shares nothing with the code that is checked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxkv.arith import ceil_div
from jaxkv.testing.layouts import stored
from pallas_kernels import KeyPart, Layout, Pages
from pallas_kernels.pages import LAYOUTS

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B sequences and their queries.

    Attributes:
      q: `[T, H, D]`, all sequences concatenated; rows past the last sequence's are padding.
      keys: for each sequence `[S, K, D]`.
      values: like `keys`.
      q_lens: for each sequence its number of queries, which are its last tokens.
    """

    q: np.ndarray
    keys: Sequence[np.ndarray]
    values: Sequence[np.ndarray]
    q_lens: Sequence[int]

    @property
    def query_starts(self) -> np.ndarray:
        return np.cumsum([0, *self.q_lens])

    def rows(self, b: int) -> slice:
        """The rows of sequence b."""
        return slice(self.query_starts[b], self.query_starts[b + 1])

    def select(self, order: Sequence[int], T: int | None = None) -> "Batch":
        """These sequences in this order, with T rows (as many as now where None)."""
        rows = np.concatenate([self.q[self.rows(b)] for b in order])
        q = np.full_like(self.q, np.nan, shape=(T or len(self.q), *self.q.shape[1:]))
        q[: len(rows)] = rows
        return Batch(
            q=q,
            keys=[self.keys[b] for b in order],
            values=[self.values[b] for b in order],
            q_lens=[self.q_lens[b] for b in order],
        )


def random_batch(
    kv_lens: Sequence[int],
    q_lens: Sequence[int],
    *,
    T: int,
    heads: tuple[int, int] = (4, 2),
    D: int = 16,
    dtypes: tuple[DTypeLike, DTypeLike] = (jnp.float32, jnp.float32),
    seed: int = 0,
) -> Batch:
    """Normal random numbers; `heads` is (H, K), `dtypes` that of q and that of K and V."""
    (H, K), (q_dtype, kv_dtype) = heads, dtypes
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((T, H, D)).astype(q_dtype)
    q[sum(q_lens) :] = np.nan  # padding rows hold anything
    kv = [rng.standard_normal((2, S, K, D)).astype(kv_dtype) for S in kv_lens]
    return Batch(q=q, keys=[k for k, _ in kv], values=[v for _, v in kv], q_lens=q_lens)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The arguments of the call that describe the cache and the raggedness."""

    pages: Pages
    page_table: jax.Array
    kv_lens: jax.Array
    query_starts: jax.Array


def place(
    batch: Batch,
    *,
    P: int = 16,
    M: int = 20,
    layout: Layout = LAYOUTS[0],
    window: int | None = None,
    seed: int = 0,
) -> Placed:
    """Writes a batch into a pool of B * M + 4 pages.

    With a window, the pages that lie wholly outside it for every query are not in the pool.
    """
    rng = np.random.default_rng(seed)
    B, (_, K, D), dtype = len(batch.keys), batch.keys[0].shape, batch.keys[0].dtype
    N = B * M + 4
    kv = np.full((N, P, K, 2, D), np.nan, dtype)
    free = list(rng.permutation(np.arange(1, N)))
    garbage = [-1, INT32_MIN, N, INT32_MAX, 0, *free[:5]]
    table = rng.choice(garbage, (B, M))
    for b, (keys, values, n) in enumerate(zip(batch.keys, batch.values, batch.q_lens, strict=True)):
        first = 0 if window is None else max(0, len(keys) - n - window + 1)
        for m in range(first // P, ceil_div(len(keys), P)):
            table[b, m] = page = free.pop()
            tokens = slice(m * P, (m + 1) * P)
            kv[page, : len(keys[tokens]), :, 0] = keys[tokens]
            kv[page, : len(keys[tokens]), :, 1] = values[tokens]
    kv = stored(kv.reshape(N, P, 2 * K, D), layout)
    return Placed(
        pages=Pages(kv=jnp.asarray(kv), layout=layout),
        page_table=jnp.asarray(table, jnp.int32),
        kv_lens=jnp.asarray([len(keys) for keys in batch.keys], jnp.int32),
        query_starts=jnp.asarray(batch.query_starts, jnp.int32),
    )


def naive_attention(
    batch: Batch,
    *,
    scale: float,
    window: int | None = None,
    sinks: np.ndarray | None = None,
    soft_cap: float | None = None,
    keys: KeyPart | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns out `[T, H, D]` and lse `[T, H]` in float64; see `ragged_paged_attention`."""
    T, H, D = batch.q.shape
    out, lse = np.zeros((T, H, D)), np.full((T, H), -np.inf)
    for b, n in enumerate(batch.q_lens):
        k, v = (x[b].astype(np.float64) for x in (batch.keys, batch.values))
        S, K, _ = k.shape
        for i in range(n):
            row, end = batch.query_starts[b] + i, max(S - n + i + 1, 0)
            first = 0 if window is None else max(end - window, 0)
            if keys is not None:
                low, high = _part(keys, end - 1)
                first, end = max(first, low), max(first, low, min(end, high))
            for h in range(H):
                logits = scale * k[first:end, h // (H // K)] @ batch.q[row, h].astype(np.float64)
                if soft_cap is not None:
                    logits = soft_cap * np.tanh(logits / soft_cap)
                extra = [] if sinks is None else [sinks[h]]
                every = np.concatenate([logits, extra])
                if every.size and every.max() > -np.inf:
                    lse[row, h] = every.max() + np.log(np.exp(every - every.max()).sum())
                    weights = np.exp(logits - lse[row, h])
                    out[row, h] = weights @ v[first:end, h // (H // K)]
    return out, lse


def _part(keys: KeyPart, position: int) -> tuple[int, int]:
    """The keys `[low, high)` of a part, for the query at a position."""
    cut = max(keys.first, (position - keys.recent + 1) // keys.page_size * keys.page_size)
    ends = {"first": (0, keys.first), "middle": (keys.first, cut), "recent": (cut, position + 1)}
    return ends[keys.part]
