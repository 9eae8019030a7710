"""Llama 3's RoPE scaling, recovered from the divisors that a GGUF file stores instead.

GGUF files of Llama 3.1 and later have no parameters, but a tensor `rope_freqs.weight`: D / 2
divisors of the inverse frequencies w = theta^(-2i/D). Let o be the original length, and l and h the
low and high frequency factors. A divisor d then is

    1 / d = (1 - s) / factor + s,   s = clip((o w / 2 pi - l) / (h - l), 0, 1).

On the ramp s is linear in w, s = a w - b, with b = l / (h - l) and a = o / (2 pi (h - l)). So two
channels on the ramp determine a and b, and with l = 1, as in every Llama 3, also o and h. The
parameters are accepted only if they reproduce every divisor.
"""

import math

import numpy as np

from jaxkv.models.config import Llama3Scaling

_TOLERANCE = 1e-5  # relative; the divisors are float32


def scaling_from_divisors(divisors: np.ndarray, theta: float) -> Llama3Scaling | None:
    """Finds the Llama 3 scaling that has the given divisors.

    Args:
      divisors: float `[D // 2]`.
      theta: the RoPE base.

    Returns:
      The scaling; None if no Llama 3 scaling with a low frequency factor of 1 fits.
    """
    divisors = divisors.astype(np.float64)
    factor = float(divisors[-1])
    ramp = np.flatnonzero((divisors > 1 + _TOLERANCE) & (divisors < factor * (1 - _TOLERANCE)))
    if len(ramp) < 2:
        return None
    frequencies = theta ** (-np.arange(len(divisors)) / len(divisors))
    share = (1 / divisors[ramp] - 1 / factor) / (1 - 1 / factor)
    a, minus_b = np.polyfit(frequencies[ramp], share, 1)
    high = _rounded(1 - 1 / minus_b) if minus_b < 0 else 1.0
    if a <= 0 or high <= 1:
        return None
    found = Llama3Scaling(
        factor=_rounded(factor),
        low_freq_factor=1.0,
        high_freq_factor=high,
        original_max_positions=round(2 * math.pi * a * (high - 1)),
    )
    same = np.allclose(_divisors(found, frequencies), divisors, rtol=_TOLERANCE, atol=0)
    return found if same else None


def _divisors(scaling: Llama3Scaling, frequencies: np.ndarray) -> np.ndarray:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - share) / scaling.factor + share)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
