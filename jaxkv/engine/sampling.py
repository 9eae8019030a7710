"""Drawing tokens from logits on the device, with an independent random stream per request.

All functions are pure. What no row of a batch asks for is skipped at run time, so that one compiled
step serves greedy and sampled requests.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.arith import ceil_div
from jaxkv.engine.request import MAX_TOP_LOGPROBS, SamplingParams
from jaxkv.errors import UsageError


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplingInputs:
    """The sampling parameters of B sequences; most fields are those of SamplingParams.

    Attributes:
      temperature, top_p, min_p, repetition_penalty: `[B]` float32.
      top_k: `[B]` int32.
      seed: `[B]` uint32.
      position: `[B]` int32, position of the token that is drawn. Seed and position fix the draw.
      seen: `[B, ceil(V / 8)]` uint8, the tokens of each sequence as a bit set, least significant
        bit first. All zeros in rows without a repetition penalty.
      want_top: bool scalar, whether any row reports its most likely tokens.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    seed: jax.Array
    position: jax.Array
    seen: jax.Array
    want_top: jax.Array

    @classmethod
    def unpack(cls, controls: jax.Array, seen: jax.Array, want_top: jax.Array) -> "SamplingInputs":
        """Unpacks `controls [B, NUM_CONTROLS]` int32, rows of `pack_controls`."""
        columns = dict(zip(_CONTROLS, controls.T, strict=True))
        for name in _FLOATS:
            columns[name] = jax.lax.bitcast_convert_type(columns[name], jnp.float32)
        columns["seed"] = jax.lax.bitcast_convert_type(columns["seed"], jnp.uint32)
        return cls(**columns, seen=seen, want_top=want_top)


_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty")
_CONTROLS = (*_FLOATS, "top_k", "seed", "position")
NUM_CONTROLS = len(_CONTROLS)
POSITION = _CONTROLS.index("position")


def pack_controls(params: SamplingParams) -> np.ndarray:
    """Sampling parameters as `[NUM_CONTROLS]` int32: the bits of floats and seed, position 0."""
    floats = np.array([getattr(params, name) for name in _FLOATS], np.float32)
    top_k = min(params.top_k, np.iinfo(np.int32).max)
    seed = np.array([params.seed], np.uint32)
    packed = [*floats.view(np.int32), top_k, *seed.view(np.int32), 0]
    return np.array(packed, np.int32)


class SeenTokens:
    """The tokens of one sequence as a bit set, for the repetition penalty.

    Attributes:
      bits: `[ceil(V / 8)]` uint8, least significant bit first.
    """

    def __init__(self, vocab_size: int, tokens: Iterable[int]):
        self.bits = np.zeros(ceil_div(vocab_size, 8), np.uint8)
        self.add(tokens)

    def add(self, tokens: Iterable[int]) -> None:
        """Adds tokens."""
        ids = np.asarray(tokens)
        np.bitwise_or.at(self.bits, ids >> 3, (1 << (ids & 7)).astype(np.uint8))

    def reset(self, tokens: Iterable[int]) -> None:
        """Replaces all tokens."""
        self.bits[:] = 0
        self.add(tokens)


class SamplingRows:
    """Sampling parameters of running sequences, by their rows of the page tables.

    Attributes:
      controls: `[R + 1, NUM_CONTROLS]` int32; the last row is for padding.
    """

    def __init__(self, max_sequences: int, vocab_size: int):
        self.controls = np.tile(pack_controls(SamplingParams()), (max_sequences + 1, 1))
        self._width = ceil_div(vocab_size, 8)
        self._nothing_seen: dict[int, jax.Array] = {}  # by B; already on the device

    def set(self, row: int | None, params: SamplingParams) -> None:
        """Gives a row to a new sequence."""
        self.controls[row] = pack_controls(params)

    def seen(self, bit_sets: dict[int, np.ndarray], num_rows: int) -> jax.Array | np.ndarray:
        """The given bit sets in their rows `[num_rows, ceil(V / 8)]` uint8, zeros in the others."""
        if not bit_sets:
            if num_rows not in self._nothing_seen:
                self._nothing_seen[num_rows] = jnp.zeros((num_rows, self._width), jnp.uint8)
            return self._nothing_seen[num_rows]
        seen = np.zeros((num_rows, self._width), np.uint8)
        for row, bit_set in bit_sets.items():
            seen[row] = bit_set
        return seen


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Tokens drawn for B sequences, and log-probabilities of the model's own distribution.

    Attributes:
      token: `[B]` int32.
      logprob: `[B]` float32, natural log, before penalty, temperature and filters.
      top_tokens: `[B, MAX_TOP_LOGPROBS]` int32, most likely first; zeros unless wanted.
      top_logprobs: `[B, MAX_TOP_LOGPROBS]` float32.
    """

    token: jax.Array
    logprob: jax.Array
    top_tokens: jax.Array
    top_logprobs: jax.Array


class Sampler(Protocol):
    """Draws the next token of each sequence. It is traced into the jitted step, so it must be pure.

    `draw` is the built-in one. A sampler that only changes the logits ends by calling it.

    Example:
      >>> def never_seven(logits, params):
      ...     return draw(logits.at[:, 7].set(-jnp.inf), params)
      >>> engine = Engine(model, EngineConfig(sampler=never_seven))
    """

    def __call__(self, logits: jax.Array, params: SamplingInputs, /) -> jax.Array:
        """Returns token ids `[B]` int32.

        Args:
          logits: `[B, V]` float32.
          params: the sampling parameters of the B sequences.
        """
        ...


def draw(logits: jax.Array, params: SamplingInputs) -> jax.Array:
    """Draws a token from each row of `logits [B, V]` as `SamplingParams` describes.

    Returns:
      Token ids, `[B]` int32.
    """
    adjusted = jax.lax.cond(
        jnp.any(params.repetition_penalty != 1.0), _penalise, lambda x, _: x, logits, params
    )
    greedy = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
    return jax.lax.cond(
        jnp.any(params.temperature > 0.0),
        _draw_noisy,
        lambda x, p, best: best,
        adjusted,
        params,
        greedy,
    )


def sample(logits: jax.Array, params: SamplingInputs, sampler: Sampler = draw) -> Sampled:
    """Draws a token from each row of `logits [B, V]` float32, and reports its log-probability.

    Raises:
      UsageError: the sampler does not return `[B]` int32; said while the step is traced.
    """
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    token = sampler(logits, params)
    B = logits.shape[0]
    if not isinstance(token, jax.Array) or token.shape != (B,) or token.dtype != jnp.int32:
        got = getattr(token, "aval", type(token).__name__)
        raise UsageError(f"the sampler must return token ids [B] = [{B}] int32, got {got}")
    top_logits, top_tokens = jax.lax.cond(params.want_top, _top, _no_top, logits)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return Sampled(
        token=token,
        logprob=chosen - logsumexp,
        top_tokens=top_tokens,
        top_logprobs=top_logits - logsumexp[:, None],
    )


def _penalise(logits: jax.Array, params: SamplingInputs) -> jax.Array:
    V = logits.shape[1]
    bits = jnp.unpackbits(params.seen, axis=-1, count=V, bitorder="little")
    penalty = params.repetition_penalty[:, None]
    punished = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(bits != 0, punished, logits)


def _draw_noisy(logits: jax.Array, params: SamplingInputs, greedy: jax.Array) -> jax.Array:
    """Draws with the Gumbel-max trick; rows with temperature 0 keep the greedy token."""
    hot = params.temperature > 0.0
    # Relative to the largest logit: a tiny temperature sends the others to -inf, and none to inf.
    scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = scaled / jnp.where(hot, params.temperature, 1.0)[:, None]
    filtered = (params.top_k > 0) | (params.top_p < 1.0) | (params.min_p > 0.0)
    kept = jax.lax.cond(jnp.any(filtered), _filter, lambda x, _: x, scaled, params)

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, logits.shape[1:], logits.dtype)

    drawn = jnp.argmax(kept + jax.vmap(noise)(params.seed, params.position), axis=-1)
    return jnp.where(hot, drawn.astype(jnp.int32), greedy)


def _filter(logits: jax.Array, params: SamplingInputs) -> jax.Array:
    """Sets what top-k, then top-p, then min-p exclude to -inf; the most likely token stays."""
    V = logits.shape[1]
    ordered = -jnp.sort(-logits, axis=-1)
    rank = jnp.arange(V, dtype=jnp.int32)[None]
    k = jnp.where(params.top_k > 0, params.top_k, V)[:, None]
    ordered = jnp.where(rank < k, ordered, -jnp.inf)
    probability = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    in_nucleus = (before < params.top_p[:, None]) | (params.top_p >= 1.0)[:, None]
    likely = probability >= params.min_p[:, None] * probability[:, :1]
    # The kept tokens are the first ones in this order, so the last one's logit is the threshold.
    num_kept = jnp.maximum((in_nucleus & likely & (rank < k)).sum(axis=-1), 1)
    threshold = jnp.take_along_axis(ordered, num_kept[:, None] - 1, axis=-1)
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def _top(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    n = min(MAX_TOP_LOGPROBS, logits.shape[1])
    values, tokens = jax.lax.top_k(logits, n)
    padding = ((0, 0), (0, MAX_TOP_LOGPROBS - n))
    return jnp.pad(values, padding, constant_values=-jnp.inf), jnp.pad(tokens, padding)


def _no_top(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (logits.shape[0], MAX_TOP_LOGPROBS)
    return jnp.zeros(shape, logits.dtype), jnp.zeros(shape, jnp.int32)
