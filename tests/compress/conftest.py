"""Two tiny decoders, compiled once, for the tests of dropping."""

from dataclasses import replace

import pytest
from flax import nnx


def decoder_of(windows: tuple[int | None, ...], seed: int):
    from jaxkv.models.config import LayerConfig, RopeConfig
    from jaxkv.models.decoder import Decoder
    from tests.engine.tiny import TINY, Tiny

    rope = RopeConfig(theta=100.0)
    layers = tuple(LayerConfig(window=window, rope=rope) for window in windows)
    return Tiny(Decoder(replace(TINY, layers=layers), rngs=nnx.Rngs(seed)))


@pytest.fixture(scope="session")
def mixed():
    """Three layers, the second with a window."""
    return decoder_of((None, 12, None), seed=0)


@pytest.fixture(scope="session")
def full():
    """Two layers without windows."""
    return decoder_of((None, None), seed=1)
