"""Lengths and arrival times of requests, drawn from a distribution.

    chat        log-normal prompts and answers, with means of 160 and 340 tokens: conversations
    instruct    log-normal, with means of 20 and 60 tokens: short instructions
    uniform     prompts of 1 to 2,048 tokens, answers of 1 to 512
    two-kinds   nine in ten short (128 + 64 tokens), one in ten long (4,096 + 512)

Arrivals are a Poisson process. The means of `chat` and `instruct` are those of ShareGPT and Alpaca
in the vLLM paper (arXiv 2309.06180, section 6.1).
"""

import numpy as np

from jaxkv.replay.errors import ReplayError
from jaxkv.replay.traces import TraceRequest

_SPREAD = 0.9  # sigma of the logarithm
MOST_REQUESTS = 10_000_000


def _log_normal(rng: np.random.Generator, n: int, mean: float) -> np.ndarray:
    drawn = rng.lognormal(np.log(mean) - _SPREAD**2 / 2, _SPREAD, n)
    return np.clip(np.rint(drawn), 1, 16 * mean).astype(np.int64)


def _two_kinds(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    is_long = rng.random(n) < 0.1
    return np.where(is_long, 4_096, 128), np.where(is_long, 512, 64)


DISTRIBUTIONS = {
    "chat": lambda rng, n: (_log_normal(rng, n, 160), _log_normal(rng, n, 340)),
    "instruct": lambda rng, n: (_log_normal(rng, n, 20), _log_normal(rng, n, 60)),
    "uniform": lambda rng, n: (rng.integers(1, 2_049, n), rng.integers(1, 513, n)),
    "two-kinds": _two_kinds,
}


def draw_requests(name: str, count: int, per_second: float, seed: int = 0) -> list[TraceRequest]:
    """Draws requests.

    Args:
      name: a name from `DISTRIBUTIONS`.
      count: number of requests.
      per_second: mean number of arrivals per second.
      seed: seed of the random numbers.

    Raises:
      ReplayError: there is no such distribution, or a number is out of range.
    """
    if name not in DISTRIBUTIONS:
        raise ReplayError(f"no lengths {name!r}; there are {', '.join(DISTRIBUTIONS)}")
    if not 1 <= count <= MOST_REQUESTS:
        raise ReplayError(f"{count} requests: must be 1 to {MOST_REQUESTS}")
    if not 1e-6 <= per_second <= 1e9:
        raise ReplayError(f"{per_second} requests per second: must be 1e-6 to 1e9")
    rng = np.random.default_rng(seed)
    prompts, answers = DISTRIBUTIONS[name](rng, count)
    arrivals = np.cumsum(rng.exponential(1 / per_second, count))
    columns = (x.tolist() for x in (arrivals, prompts, answers))
    return [TraceRequest(*row) for row in zip(*columns, strict=True)]
