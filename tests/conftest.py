"""What every test runs under: strict JAX, devices by marker, and the folder of reference data."""

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxkv.models.pretrained import model_path

# Tests of several folders import it, and its assertions tell their values only if it is rewritten.
pytest.register_assert_rewrite("tests.engine.tiny")

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    # An accidental upcast or broadcast is a bug, even where its values come out right.
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for platform in ("gpu", "tpu"):
        marked = [item for item in items if item.get_closest_marker(platform)]
        if marked and jax.default_backend() != platform:
            here = jax.default_backend()
            skip = pytest.mark.skip(reason=f"needs a {platform.upper()}; JAX runs on {here} here")
            for item in marked:
                item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def compiled_once_a_session(tmp_path_factory) -> Iterator[None]:
    """Keeps compiled programs in a folder that only the processes of this run share.

    Many tests create an engine, and each compiles the same steps.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(folder / "compiled"), 0.3), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of reference outputs, texts and traces; its README says how they were made."""
    return ROOT / "tests" / "data"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return model_path("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    return model_path("gemma3-270m")
