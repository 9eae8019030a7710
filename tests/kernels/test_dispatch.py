"""A named backend or an error, and for None the first of the platform's list that is here."""

import jax
import pytest

from pallas_kernels import dispatch
from pallas_kernels.attention import api as attention
from pallas_kernels.page_write import api as page_write

PREFERENCE = {"cpu": ("xla",), "gpu": ("absent", "mosaic", "xla"), "tpu": ("xla", "mosaic")}
BACKENDS = {name: lambda name=name: name for name in ("reference", "mosaic", "xla")}


def chosen(backend: str | None) -> str:
    return dispatch.choose("op", BACKENDS, PREFERENCE, backend)()


@pytest.mark.parametrize("platform, best", [("cpu", "xla"), ("gpu", "mosaic"), ("tpu", "xla")])
def test_none_picks_the_best_that_is_here_for_the_platform(monkeypatch, platform, best):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert chosen(None) == best


@pytest.mark.parametrize("name", BACKENDS)
def test_a_named_backend_runs_on_any_platform(monkeypatch, name):
    for platform in PREFERENCE:
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert chosen(name) == name


def test_an_unknown_backend_is_refused_with_the_names_that_there_are():
    with pytest.raises(ValueError, match=r"op: no backend 'cuda'; .*mosaic.*reference.*xla"):
        chosen("cuda")


@pytest.mark.parametrize(
    "backends, preference",
    [
        (attention.BACKENDS, attention.PREFERENCE),
        (page_write.WRITE_BACKENDS, page_write.PREFERENCE),
        (page_write.COPY_BACKENDS, page_write.PREFERENCE),
    ],
    ids=["attention", "write", "copy"],
)
def test_every_operation_has_a_default_on_every_platform_and_it_is_not_the_oracle(
    backends, preference
):
    for platform in ("cpu", "gpu", "tpu"):
        present = [name for name in preference[platform] if name in backends]
        assert present
        assert "reference" not in present
