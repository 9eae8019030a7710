"""One tiny decoder, compiled once, for all tests of the engine."""

import pytest


@pytest.fixture(scope="session")
def tiny():
    from tests.engine.tiny import Tiny

    return Tiny.random()
