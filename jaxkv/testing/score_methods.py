"""Methods that score tokens, against a function in numpy that scores them one at a time."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.compress import FORCED, LayerTokens, Queries, ScoreMethod
from jaxkv.models import rope
from jaxkv.models.config import RopeConfig

H, K, D = 4, 2, 8
ROPE = RopeConfig(theta=100.0)
PADDED = 40  # slots after the tokens


def check_score_method(
    method: ScoreMethod,
    naive: Callable[..., np.ndarray],
    *,
    lengths: Sequence[int] = (5, 70),
    soft_caps: Sequence[float | None] = (None, 1.5),
    rtol: float = 2e-4,
    atol: float = 1e-6,
) -> None:
    """Checks the scores of a method against a naive function in float64.

    The scores must be the same however the queries are cut into chunks, whatever the padding rows
    of a chunk hold, and with jit and without it. Scores of slots without a token are not compared.

    Args:
      method: the method.
      naive: called with the keywords `q [n, H, D]`, `k [K, n, D]`, `v [K, n, D]`, all float64 with
        RoPE applied and q scaled, `cap` (soft cap or None), `keep` (tokens that each head keeps)
        and `turned(x, by)`, which rotates a vector `[D]` by so many further positions. It returns
        scores `[K, n]`, infinity for tokens that the method always keeps. Query t is token t.
      lengths: numbers of tokens n to check.
      soft_caps: soft caps of the attention logits to check.
      rtol: largest relative error.
      atol: largest absolute error.

    Raises:
      AssertionError: a score is wrong; the message says for which length, soft cap and chunk.

    Example:
      `check_score_method(Knorm(), lambda k, **_: -np.linalg.norm(k, axis=-1))`
    """
    for n in lengths:
        for cap in soft_caps:
            keep = n // 2
            want = naive(**tensors(n), cap=cap, keep=keep, turned=turned)
            for chunk, jit in ((64, True), (7, True), (64, False)):
                _, scores = scores_of(method, n, keep, cap, chunk, jit=jit)
                got = np.where(scores[:, :n] == np.float32(FORCED), np.inf, scores[:, :n])
                case = f"{n} tokens, soft cap {cap}, chunks of {chunk}, jit {jit}"
                chex.assert_shape(scores, (K, n + PADDED), custom_message=case)
                chex.assert_type(scores, jnp.float32)
                chex.assert_trees_all_close(got, want, rtol=rtol, atol=atol, custom_message=case)


@cache
def tensors(n: int) -> dict[str, np.ndarray]:
    """Random `q [n, H, D]`, `k` and `v [K, n, D]`, float64."""
    rng = np.random.default_rng(n)
    q = 0.5 * rng.standard_normal((n, H, D))
    k, v = rng.standard_normal((2, K, n, D))
    k[:, : n // 3] *= 1.7  # so that norms and weights differ
    return dict(q=q, k=k, v=v)


def turned(x: np.ndarray, by: int) -> np.ndarray:
    """A vector rotated by some further positions, pairs as complex numbers."""
    half = len(x) // 2
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * by * ROPE.theta ** (-np.arange(half) / half))
    return np.concatenate([z.real, z.imag])


def layer_of(n: int, num_slots: int | None = None) -> LayerTokens:
    """The `tensors` of n tokens, as a layer holds them."""
    S, parts = num_slots or n + PADDED, tensors(n)
    k, v = (np.zeros((K, S, D), np.float32) for _ in "kv")
    k[:, :n], v[:, :n] = parts["k"], parts["v"]
    return LayerTokens(
        k=jnp.asarray(k),
        v=jnp.asarray(v),
        lens=jnp.full(K, n, jnp.int32),
        num_tokens=jnp.int32(n),
        layer=jnp.int32(0),
        turn=partial(rope.turn, ROPE),
    )


def scores_of(
    method: ScoreMethod,
    n: int,
    keep: int,
    cap: float | None = None,
    chunk: int = 64,
    *,
    jit: bool = False,
) -> tuple[Any, jax.Array]:
    """Statistics of a method, its queries observed chunk by chunk, and scores `[K, S]`."""

    def score(k: jax.Array, v: jax.Array, chunks: list[tuple[jax.Array, jax.Array]]) -> Any:
        layer = layer_of(n)
        layer = LayerTokens(k, v, layer.lens, layer.num_tokens, layer.layer, layer.turn)
        statistics = None
        for q, positions in chunks:
            slots = jnp.broadcast_to(positions, (K, chunk))
            new = method.observe(Queries(q, positions, slots, cap), layer)
            statistics = new if statistics is None else method.accumulate(statistics, new)
        return statistics, method.score(layer, statistics, jnp.int32(keep))

    first = 0 if method.num_queries is None else max(0, n - method.num_queries)
    chunks = [_chunk(n, start, chunk) for start in range(first, n, chunk)]
    layer = layer_of(n)
    return (jax.jit(score) if jit else score)(layer.k, layer.v, chunks)


def _chunk(n: int, start: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Queries `[size, H, D]` from a token on, and their positions; what is left is padding."""
    end = min(n, start + size)
    positions = np.full(size, -(2**30), np.int32)
    positions[: end - start] = range(start, end)
    q = np.full((size, H, D), 3.0, np.float32)
    q[: end - start] = tensors(n)["q"][start:end]
    return jnp.asarray(q), jnp.asarray(positions)
