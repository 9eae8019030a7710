"""RoPE and its scalings against the papers, written out a channel at a time in float64."""

import cmath
import math

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models import rope
from jaxkv.models.config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling

D = 64
THETA = 10000.0
LLAMA3 = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
)
YARN = YarnScaling(factor=16.0, original_max_positions=4096, attention_factor=1.0)
SCALINGS = {
    "none": None,
    "linear": LinearScaling(factor=4.0),
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn factor": YarnScaling(factor=4.0, original_max_positions=2048, attention_factor=1.25),
}
each_scaling = pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())


def base_frequency(channel: float, theta: float = THETA) -> float:
    """Radians a token, arXiv 2104.09864, equation 15, at a channel counted from 0."""
    return theta ** (-2 * channel / D)


def llama3_frequency(channel: int, scaling: Llama3Scaling) -> float:
    """Returns the frequency by wavelength, as in Llama 3.1's model card."""
    frequency = base_frequency(channel, 500000.0)
    wavelength = 2 * math.pi / frequency
    trained = scaling.original_max_positions
    if wavelength < trained / scaling.high_freq_factor:
        return frequency
    if wavelength > trained / scaling.low_freq_factor:
        return frequency / scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (trained / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def channel_that_turns(times: float, trained: int) -> float:
    """Finds, by bisection, the fractional channel that makes `times` turns in training."""
    low, high = -float(D), 2.0 * D
    for _ in range(200):
        middle = (low + high) / 2
        if trained * base_frequency(middle) / (2 * math.pi) > times:
            low = middle
        else:
            high = middle
    return low


def frequencies(scaling, theta: float = THETA) -> np.ndarray:
    return rope.frequencies(RopeConfig(theta=theta, scaling=scaling), D)[0]


def test_frequencies_fall_geometrically_from_one():
    expected = np.array([base_frequency(channel) for channel in range(D // 2)])
    chex.assert_trees_all_close(frequencies(None), expected, rtol=1e-7)


def test_linear_scaling_divides_positions():
    config = RopeConfig(theta=THETA, scaling=LinearScaling(factor=4.0))
    stretched = rope.rotation(config, D, jnp.arange(0, 400, 4))
    plain = rope.rotation(RopeConfig(theta=THETA), D, jnp.arange(100))
    for found, expected in zip(stretched, plain, strict=True):
        chex.assert_trees_all_close(found, expected, rtol=1e-7, atol=1e-5)


def test_llama3_scaling_is_that_of_its_wavelengths():
    expected = np.array([llama3_frequency(channel, LLAMA3) for channel in range(D // 2)])
    base = np.array([base_frequency(channel, 500000.0) for channel in range(D // 2)])
    chex.assert_trees_all_close(frequencies(LLAMA3, 500000.0), expected, rtol=1e-6)
    ratio = expected / base
    assert (ratio == 1).any() and np.isclose(ratio, 1 / 8).any()
    assert ((ratio > 0.126) & (ratio < 0.999)).any()  # the ramp is met too


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_keeps_fast_channels_divides_slow_ones_and_ramps_between(truncate):
    scaling = YarnScaling(
        factor=16.0, original_max_positions=4096, attention_factor=1.0, truncate=truncate
    )
    first, last = (channel_that_turns(times, 4096) for times in (32.0, 1.0))
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    base = np.array([base_frequency(channel) for channel in range(D // 2)])
    share = np.interp(np.arange(D // 2), [first, last], [0.0, 1.0])  # of the divided frequency
    chex.assert_trees_all_close(
        frequencies(scaling), base * (1 - share) + base / 16 * share, rtol=1e-6
    )
    turns = 4096 * base / (2 * math.pi)
    ratio = frequencies(scaling) / base
    chex.assert_trees_all_close(ratio[turns >= 32], 1, rtol=1e-6)
    chex.assert_trees_all_close(ratio[turns <= 1], 1 / 16, rtol=1e-6)
    assert ((ratio > 0.07) & (ratio < 0.99)).sum() > 5


def test_yarn_whose_bounds_leave_the_channels_is_clamped():
    slow = YarnScaling(factor=2.0, original_max_positions=8, attention_factor=1.0)
    base = np.array([base_frequency(channel) for channel in range(D // 2)])
    ratio = frequencies(slow) / base
    assert np.all(np.diff(ratio) < 1e-6) and ratio[0] == 1
    chex.assert_trees_all_close(ratio[-10:], 0.5, rtol=1e-6)


@each_scaling
def test_rotation_turns_pairs_of_channels_as_complex_numbers(scaling):
    config = RopeConfig(theta=THETA, scaling=scaling)
    step, factor = rope.frequencies(config, D)
    position = np.array([0, 1, 2, 37, 511, 1000], np.int32)
    x = np.random.default_rng(0).standard_normal((len(position), 3, D)).astype(np.float32)
    found = np.asarray(rope.rotate(jnp.asarray(x), rope.rotation(config, D, jnp.asarray(position))))
    for t, head, channel in np.ndindex(len(position), 3, D // 2):
        turn = cmath.exp(1j * float(position[t]) * float(step[channel])) * factor
        turned = complex(x[t, head, channel], x[t, head, channel + D // 2]) * turn
        pair = found[t, head, [channel, channel + D // 2]]
        chex.assert_trees_all_close(
            pair, np.array((turned.real, turned.imag)), rtol=1e-7, atol=4e-4
        )


@each_scaling
def test_a_score_depends_on_the_distance_alone(scaling):
    config = RopeConfig(theta=THETA, scaling=scaling)
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, D)), jnp.float32) for _ in range(2))

    def score(query: int, key: int) -> float:
        turned = [
            rope.rotate(x, rope.rotation(config, D, jnp.array([position])))
            for x, position in ((q, query), (k, key))
        ]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(340, 300) == pytest.approx(score(40, 0), abs=2e-3)
    assert score(340, 300) != pytest.approx(score(41, 0), abs=2e-2)


@each_scaling
def test_a_token_is_rotated_alike_alone_and_in_a_prompt(scaling):
    config = RopeConfig(theta=THETA, scaling=scaling)
    prompt = rope.rotation(config, D, jnp.arange(600))
    for position in (0, 1, 63, 599):
        alone = rope.rotation(config, D, jnp.array([position]))
        for row, rows in zip(alone, prompt, strict=True):
            chex.assert_trees_all_close(row[0], rows[position], rtol=1e-7, atol=1e-6)


def test_the_attention_factor_multiplies_scores_by_its_square():
    plain = RopeConfig(theta=THETA, scaling=YARN)
    scaled = RopeConfig(
        theta=THETA,
        scaling=YarnScaling(factor=16.0, original_max_positions=4096, attention_factor=1.25),
    )
    rng = np.random.default_rng(2)
    q, k = (jnp.asarray(rng.standard_normal((5, 2, D)), jnp.float32) for _ in range(2))
    scores = []
    for config in (plain, scaled):
        turn = rope.rotation(config, D, jnp.arange(5))
        scores.append(np.einsum("thd,shd->hts", rope.rotate(q, turn), rope.rotate(k, turn)))
    chex.assert_trees_all_close(scores[1], scores[0] * 1.25**2, rtol=1e-4, atol=1e-4)


def test_half_precision_is_rotated_in_float32():
    x = jnp.asarray(np.random.default_rng(3).standard_normal((9, 2, D)), jnp.bfloat16)
    turn = rope.rotation(RopeConfig(theta=THETA), D, jnp.arange(9))
    found = rope.rotate(x, turn)
    expected = rope.rotate(x.astype(jnp.float32), turn).astype(jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    chex.assert_trees_all_equal(found.astype(jnp.float32), expected.astype(jnp.float32))
