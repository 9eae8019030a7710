"""Ragged paged attention: the public call, its checks, and the list of backends.

`reference` says what is computed; `xla`, `mosaic_gpu` and `mosaic_tpu` say how it is made fast.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.attention import mosaic_gpu, mosaic_tpu, reference, xla
from pallas_kernels.attention.options import AttentionOptions, KeyPart
from pallas_kernels.attention.ragged import Ragged, SharedPrefixes
from pallas_kernels.checks import FLOATS, check_pages, require, require_array
from pallas_kernels.dispatch import Backend
from pallas_kernels.quantised_pages import AnyPages

# In order of preference: the first one for the platform that takes the arguments runs.
BACKENDS = (
    Backend(
        name="mosaic_gpu",
        run=mosaic_gpu.ragged_paged_attention,
        refusal=mosaic_gpu.refusal,
        platforms=("gpu",),
    ),
    Backend(
        name="mosaic_tpu",
        run=mosaic_tpu.ragged_paged_attention,
        refusal=mosaic_tpu.refusal,
        platforms=("tpu",),
    ),
    Backend(name="xla", run=xla.ragged_paged_attention, platforms=("cpu", "gpu", "tpu")),
    Backend(name="reference", run=reference.ragged_paged_attention),
)


def ragged_paged_attention(
    q: jax.Array,
    pages: AnyPages,
    page_table: jax.Array,
    kv_lens: jax.Array,
    query_starts: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    sinks: jax.Array | None = None,
    soft_cap: float | None = None,
    query_tile: int | None = None,
    keys: KeyPart | None = None,
    shared: SharedPrefixes | None = None,
    return_lse: bool = False,
    backend: str | Backend | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes causal attention of ragged queries over paged keys and values.

    Query i of the n queries of sequence b has position `kv_lens[b] - n + i`, and sees the keys at
    positions up to its own. The K and V of this step must already be in the pages. H // K query
    heads share each KV head (GQA and MQA; MHA if H equals K).

    T, B and M are at least 1. All keyword arguments except `sinks` and `shared` are static. There
    is no gradient.

    Entries of `page_table` after a sequence's pages, or of pages outside the window of all its
    queries, may hold anything. NaN in a slot that no query sees never reaches an output.

    Args:
      q: `[T, H, D]` float32, bfloat16 or float16: the queries of all sequences, padding last.
      pages: K and V, of any type of pages, with K heads of dimension D.
      page_table: `[B, M]` int32, logical page to physical page.
      kv_lens: `[B]` int32, tokens in the cache, this step's included; at most M * P.
      query_starts: `[B + 1]` int32, first row of each sequence, ascending from 0. Rows from
        `query_starts[B]` on are padding.
      scale: factor of q.k.
      window: number of keys that a query sees, its own included: keys at positions > p - window.
      sinks: `[H]` float32, one more logit per head in the softmax's denominator.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, before masks and sinks.
      query_tile: rows that a backend computes together. None chooses by T and B. With a fixed value
        of 64 or more, the bits of a row do not depend on what else is in the batch.
      keys: the part of the keys that this call uses; None for all. See `KeyPart`.
      shared: which sequences begin with the same pages. It changes no result, apart from rounding.
        `mosaic_gpu` reads those pages once for all of the sequences; other backends ignore it.
      return_lse: also return the logarithm of the softmax's denominator, sink included.
      backend: `reference`, `xla`, `mosaic_gpu` or `mosaic_tpu`; or a `Backend` of your own; or
        None for the best one on this platform that takes these arrays. Each backend's `refusal`
        says what it does not take.

    Returns:
      `out [T, H, D]` in q's dtype, accumulated in float32. With `return_lse` also `lse [T, H]`
      float32, the natural logarithm. A row that sees no key has out 0 and lse -inf (or the sink, if
      there is one). A padding row has out 0 and lse -inf.

    Raises:
      ValueError: a shape, dtype or size is wrong, and the message names the dimension; or the named
        backend does not take the arguments.

    Example:
      One sequence with 20 tokens in the pages 3 and 1, and its last query:

          out = ragged_paged_attention(
              q, pages, jnp.array([[3, 1]]), jnp.array([20]), jnp.array([0, 1]), scale=D**-0.5
          )
    """
    _check_arrays(q, pages, page_table, kv_lens, query_starts, sinks)
    _check_options(scale, window, soft_cap, query_tile, keys)
    if shared is not None:
        _check_shared(shared)
    options = AttentionOptions(
        scale=scale, window=window, soft_cap=soft_cap, query_tile=query_tile, keys=keys
    )
    ragged = Ragged(kv_lens=kv_lens, query_starts=query_starts, shared=shared)
    arguments = (q, pages, page_table, ragged, sinks, options)
    chosen = dispatch.choose("ragged_paged_attention", BACKENDS, backend, arguments)
    out, lse = _checked_result(chosen.name, chosen.run(*arguments), q)
    return (out, lse) if return_lse else out


def _checked_result(name: str, result: Any, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a backend returned; raises ValueError if it is not what the operation promises."""
    got = jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x).name), result)
    want = ((q.shape, q.dtype.name), (q.shape[:2], "float32"))
    require(got == want, f"backend {name} must return out and lse as {want}, it returned {got}")
    return result


def _check_arrays(
    q: jax.Array,
    pages: AnyPages,
    page_table: jax.Array,
    kv_lens: jax.Array,
    query_starts: jax.Array,
    sinks: jax.Array | None,
) -> None:
    check_pages(pages)
    for name, array in (
        ("q", q),
        ("page_table", page_table),
        ("kv_lens", kv_lens),
        ("query_starts", query_starts),
    ):
        require_array(name, array)
    require(q.ndim == 3, f"q must be [T, H, D], got {q.shape}")
    require(q.dtype in FLOATS, f"q must be float32, bfloat16 or float16, got {q.dtype}")
    T, H, D = q.shape
    require(T >= 1 and H >= 1, f"q needs T >= 1 and H >= 1, got T = {T}, H = {H}")
    K = pages.num_kv_heads
    require(pages.head_dim == D, f"D of q is {D}, of the pages {pages.head_dim}")
    require(H % K == 0, f"H = {H} query heads are not a multiple of K = {K} KV heads")
    require(page_table.ndim == 2, f"page_table must be [B, M], got {page_table.shape}")
    B, M = page_table.shape
    require(B >= 1 and M >= 1, f"page_table needs B >= 1 and M >= 1, got {page_table.shape}")
    require(kv_lens.shape == (B,), f"kv_lens must be [B] = [{B}], got {kv_lens.shape}")
    require(
        query_starts.shape == (B + 1,),
        f"query_starts must be [B + 1] = [{B + 1}], got {query_starts.shape}",
    )
    for name, array in (
        ("page_table", page_table),
        ("kv_lens", kv_lens),
        ("query_starts", query_starts),
    ):
        require(array.dtype == jnp.int32, f"{name} must be int32, got {array.dtype}")
    if sinks is not None:
        require_array("sinks", sinks)
        require(sinks.shape == (H,), f"sinks must be [H] = [{H}], got {sinks.shape}")
        require(sinks.dtype == jnp.float32, f"sinks must be float32, got {sinks.dtype}")


def _check_shared(shared: SharedPrefixes) -> None:
    is_shared = isinstance(shared, SharedPrefixes)
    require(is_shared, f"shared must be SharedPrefixes, got {type(shared).__name__}")
    for name, array in (("starts", shared.starts), ("lengths", shared.lengths)):
        require_array(f"shared.{name}", array)
        is_list = array.ndim == 1 and array.dtype == jnp.int32
        require(is_list, f"shared.{name} must be int32 of one dimension, got {array}")
    R = shared.lengths.shape[0]
    require(R >= 1, "shared.lengths has R = 0 groups; None shares nothing")
    fits = shared.starts.shape == (R + 1,)
    require(fits, f"shared.starts must be [R + 1] = [{R + 1}], got {shared.starts.shape}")


def _check_options(
    scale: object, window: object, soft_cap: object, query_tile: object, keys: object
) -> None:
    """Checks that static options are plain numbers: a traced number has no value yet."""
    number = (int, float, np.floating)
    fits = isinstance(scale, number) and math.isfinite(scale)
    require(fits, f"scale must be finite and static, got {scale!r}")
    for name, value in (("window", window), ("query_tile", query_tile)):
        is_whole = isinstance(value, int | np.integer) and 0 < value < 2**30
        fits = value is None or (is_whole and not isinstance(value, bool))
        require(bool(fits), f"{name} must be positive, whole and static, or None, got {value!r}")
    fits = soft_cap is None or (
        isinstance(soft_cap, number) and math.isfinite(soft_cap) and soft_cap > 0
    )
    require(bool(fits), f"soft_cap must be positive, finite and static, or None, got {soft_cap!r}")
    fits = keys is None or isinstance(keys, KeyPart)
    require(fits, f"keys must be a KeyPart or None, got {keys!r}")
