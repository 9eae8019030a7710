"""What every test runs under: strict JAX, devices by marker, and the data that may be absent."""

from pathlib import Path

import jax
import pytest

from models.pretrained import model_path

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    # An accidental upcast or broadcast is a bug, even where its values come out right.
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for platform in ("gpu", "tpu"):
        marked = [item for item in items if item.get_closest_marker(platform)]
        if marked and jax.default_backend() != platform:
            skip = pytest.mark.skip(reason=f"JAX runs on {jax.default_backend()} here")
            for item in marked:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder beside the repository that holds reference outputs of other implementations."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs the reference data in {folder}")
    return folder


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return model_path("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    return model_path("gemma3-270m")
