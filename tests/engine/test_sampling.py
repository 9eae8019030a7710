"""Drawing a token, against filters and penalties written as loops over one row."""

from collections.abc import Sequence as Seq

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.engine import RequestError, SamplingParams
from jaxkv.engine.request import MAX_TOP_LOGPROBS
from jaxkv.engine.sampling import POSITION, Sampled, SamplingInputs, pack_controls, sample

V = 12
ROWS = 4096
# No probability is below 2 % at temperature 1: a kept token that is never drawn is not kept.
LOGITS = np.log(np.array([8, 3, 12, 5, 9, 2.5, 14, 7, 11, 4, 15, 9.5], np.float32) / 100)

sample_rows = jax.jit(sample)


def draw(
    logits: np.ndarray,
    *params: SamplingParams,
    positions: Seq[int] = (),
    seen: Seq[np.ndarray] = (),
    want_top: bool = False,
) -> Sampled:
    """Draws in rows of `logits [R, V]`, padded so that all calls are one compiled program."""
    controls = np.tile(pack_controls(SamplingParams()), (ROWS, 1))
    controls[: len(params)] = [pack_controls(row) for row in params]
    controls[: len(positions), POSITION] = positions
    bits = np.zeros((ROWS, -(-logits.shape[1] // 8)), np.uint8)
    for row, mask in enumerate(seen):
        bits[row] = mask
    inputs = SamplingInputs.unpack(jnp.asarray(controls), jnp.asarray(bits), jnp.asarray(want_top))
    rows = np.zeros((ROWS, logits.shape[1]), np.float32)
    rows[: len(params)] = logits
    result = sample_rows(rows, inputs)
    return jax.tree.map(lambda x: np.asarray(x)[: len(params)], vars(result))


def draws(logits: np.ndarray, **params: float) -> np.ndarray:
    """A token for each of ROWS seeds."""
    rows = [SamplingParams(seed=seed, **params) for seed in range(ROWS)]
    return draw(np.tile(logits, (ROWS, 1)), *rows)["token"]


def kept(logits: np.ndarray, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> dict[int, float]:
    """Probability of each token that may be drawn: top-k, then top-p, then min-p."""
    weights = {i: float(np.exp(x / temperature)) for i, x in enumerate(logits.astype(np.float64))}
    order = sorted(weights, key=lambda i: (-weights[i], i))
    if top_k:
        order = order[:top_k]
    total = sum(weights[i] for i in order)
    nucleus: list[int] = []
    for i in order:
        if top_p < 1 and sum(weights[j] for j in nucleus) / total >= top_p:
            break
        nucleus.append(i)
    likely = [i for i in nucleus if weights[i] >= min_p * weights[order[0]]]
    total = sum(weights[i] for i in likely)
    return {i: weights[i] / total for i in likely}


FILTERS = [
    {},
    dict(temperature=0.7),
    dict(temperature=1.9),
    dict(top_k=1),
    dict(top_k=5),
    dict(top_k=V),
    dict(top_k=2**40),
    dict(top_p=1e-9),
    dict(top_p=0.3),
    dict(top_p=0.65),
    dict(min_p=0.55),
    dict(min_p=1.0),
    dict(top_k=6, top_p=0.65),  # 0.65 of the six, not of all
    dict(top_k=8, min_p=0.7),
    dict(top_p=0.65, min_p=0.7),
    dict(top_k=9, top_p=0.8, min_p=0.5, temperature=1.3),
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_tokens_are_drawn_as_often_as_the_kept_ones_are_likely(params):
    want = kept(LOGITS, **params)
    counts = np.bincount(draws(LOGITS, **{"temperature": 1.0, **params}), minlength=V)
    assert {i for i in range(V) if counts[i]} == set(want)
    expected = np.array([ROWS * want.get(i, 0.0) for i in range(V)])
    live = expected > 0
    chi_square = float(((counts - expected)[live] ** 2 / expected[live]).sum())
    freedom = live.sum() - 1
    assert chi_square <= freedom + 4 * np.sqrt(2 * freedom)  # 4 sigma; the seeds are fixed


def test_equals_of_the_last_kept_token_are_kept_too():
    logits = np.full(V, -30.0, np.float32)
    logits[:5] = np.log([4, 3, 3, 3, 1])
    assert set(draws(logits, temperature=1.0, top_k=2)) == set(range(4))


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 2e-38, 1e-38, 1e-300])
def test_a_tiny_temperature_takes_the_most_likely_token(temperature):
    logits = np.array([1.0, 3.0, 39.0, 40.0, -7.0], np.float32)
    params = [SamplingParams(temperature=temperature, seed=s) for s in range(64)]
    assert set(draw(np.tile(np.pad(logits, (0, V - 5)), (64, 1)), *params)["token"]) == {3}


def test_temperature_zero_takes_the_lowest_id_of_the_most_likely():
    logits = np.array([[0, 2, 5, 5, 1, 5] + [0] * 6, [7] * V], np.float32)
    result = draw(logits, SamplingParams(seed=3), SamplingParams(seed=4, top_k=3, top_p=0.2))
    assert result["token"].tolist() == [2, 0]


def test_a_draw_depends_on_seed_and_position_alone():
    logits = np.tile(LOGITS, (6, 1))
    hot = [SamplingParams(temperature=1.0, seed=s) for s in (1, 2, 3)]
    first = draw(logits[:3], *hot, positions=[5, 6, 7])["token"]
    # The same in other rows, next to greedy, filtered and penalised ones.
    others = [SamplingParams(), SamplingParams(temperature=2.0, top_k=2), hot[2], hot[1], hot[0]]
    second = draw(logits[:5], *others, positions=[0, 0, 7, 6, 5])["token"]
    assert second[2:].tolist() == first[::-1].tolist()


@pytest.mark.parametrize("what", ["seed", "position"])
def test_another_seed_or_position_draws_independently(what):
    n = ROWS // 2
    logits = np.tile(LOGITS, (ROWS, 1))
    other, zeros = list(range(ROWS)), [0] * ROWS
    seeds, positions = (other, zeros) if what == "seed" else (zeros, other)
    rows = [SamplingParams(temperature=1.0, seed=seed) for seed in seeds]
    tokens = draw(logits, *rows, positions=positions)["token"]
    agree = (tokens[:n] == tokens[n:]).mean()
    p = np.exp(LOGITS.astype(np.float64))
    chance = ((p / p.sum()) ** 2).sum()
    assert abs(agree - chance) < 4 * np.sqrt(chance * (1 - chance) / n)


def test_the_largest_seed_works():
    params = SamplingParams(temperature=1.0, seed=2**32 - 1)
    assert 0 <= draw(LOGITS[None], params)["token"][0] < V


def bit_set(*tokens: int) -> np.ndarray:
    bits = np.zeros(-(-V // 8), np.uint8)
    for token in tokens:
        bits[token // 8] |= 1 << token % 8
    return bits


def test_a_repetition_penalty_changes_seen_tokens_alone():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((200, V)).astype(np.float32)
    seen = [rng.permutation(V)[: rng.integers(0, V)].tolist() for _ in range(200)]
    penalties = rng.uniform(0.5, 3.0, 200).tolist()
    want = []
    for row, tokens, penalty in zip(logits, seen, penalties, strict=True):
        punished = [
            x if i not in tokens else (x / penalty if x > 0 else x * penalty)
            for i, x in enumerate(row.tolist())
        ]
        want.append(int(np.argmax(punished)))
    params = [SamplingParams(repetition_penalty=penalty) for penalty in penalties]
    got = draw(logits, *params, seen=[bit_set(*tokens) for tokens in seen])["token"]
    assert got.tolist() == want
    assert got.tolist() != logits.argmax(axis=-1).tolist()


def test_log_probabilities_are_of_the_models_own_distribution():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((8, V)).astype(np.float32) * 3
    params = [
        SamplingParams(temperature=1.5, top_k=4, repetition_penalty=1.7, seed=s) for s in range(8)
    ]
    result = draw(logits, *params, seen=[bit_set(0, 5, 9)] * 8)
    wide = logits.astype(np.float64)
    logprobs = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    chosen = logprobs[np.arange(8), result["token"]]
    chex.assert_trees_all_close(result["logprob"], chosen, rtol=1e-7, atol=1e-5)


def test_top_tokens_are_most_likely_first_and_ties_by_lowest_id():
    logits = np.array([[1, 4, 4, 2, 9, 0, 4, -1, -2, -3, -4, -5]], np.float32)
    result = draw(logits, SamplingParams(), want_top=True)
    order = [4, 1, 2, 6, 3, 0, 5, 7, 8, 9, 10, 11]
    assert result["top_tokens"][0, :V].tolist() == order
    assert result["top_tokens"].shape == (1, MAX_TOP_LOGPROBS)
    logprobs = logits[0, order] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    chex.assert_trees_all_close(result["top_logprobs"][0, :V], logprobs, rtol=1e-7, atol=1e-5)
    assert np.isneginf(result["top_logprobs"][0, V:]).all()  # V is less than the most


NAN, INF = float("nan"), float("inf")
MEANINGLESS = {
    "temperature": (-0.1, NAN, INF),
    "top_k": (-1,),
    "top_p": (0.0, 1.1, NAN),
    "min_p": (-0.1, 1.1, NAN),
    "repetition_penalty": (0.0, -1.0, NAN, INF),
    "seed": (-1, 2**32),
}


@pytest.mark.parametrize(
    "name, value", [(name, value) for name, values in MEANINGLESS.items() for value in values]
)
def test_a_value_without_meaning_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=rf"^{name} must be .*, got {value}$"):
        SamplingParams(**{name: value})


def test_sampling_parameters_cross_over_by_their_bits():
    rows = [
        SamplingParams(
            temperature=0.3,
            top_p=0.9,
            min_p=1e-3,
            repetition_penalty=1.1,
            top_k=10**12,
            seed=2**32 - 1,
        ),
        SamplingParams(),
    ]
    controls = jnp.asarray(np.stack([pack_controls(row) for row in rows]))
    inputs = SamplingInputs.unpack(controls, jnp.zeros((2, 2), jnp.uint8), jnp.asarray(False))
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "seed"):
        want = np.array([getattr(row, name) for row in rows], getattr(inputs, name).dtype)
        chex.assert_trees_all_equal(getattr(inputs, name), want)
    assert inputs.top_k.tolist() == [2**31 - 1, 0]
    assert inputs.seed.dtype == jnp.uint32
