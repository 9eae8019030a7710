"""A named backend or an error, and for None the first of the platform that takes the call."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Backend, Pages, dispatch, ragged_paged_attention
from pallas_kernels.attention import api as attention
from pallas_kernels.attention import reference
from pallas_kernels.page_write import api as page_write

PLATFORMS = ("cpu", "gpu", "tpu")


def backend(name: str, *platforms: str, refuses: str | None = None) -> Backend:
    return Backend(
        name=name, run=lambda x: (name, x), refusal=lambda x: refuses, platforms=platforms
    )


def never(*_):
    raise AssertionError("this backend must not be asked")


BACKENDS = (
    backend("mosaic", "gpu"),
    backend("refusing", "cpu", "tpu", refuses="x is odd"),
    backend("xla", *PLATFORMS),
    backend("reference"),
)


def chosen(name: str | Backend | None, backends=BACKENDS) -> str:
    return dispatch.choose("op", backends, name, (1,)).name


@pytest.mark.parametrize("platform, best", [("cpu", "xla"), ("gpu", "mosaic"), ("tpu", "xla")])
def test_none_picks_the_best_that_takes_the_call_on_the_platform(monkeypatch, platform, best):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert chosen(None) == best


def test_a_backend_that_is_passed_over_is_logged_with_its_reason(caplog):
    chosen(None)
    assert caplog.messages == ["op: not by refusing: x is odd"]


@pytest.mark.parametrize("name", ["mosaic", "xla", "reference"])
def test_a_named_backend_runs_on_any_platform(monkeypatch, name):
    for platform in PLATFORMS:
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert chosen(name) == name


def test_a_named_backend_that_refuses_raises_its_reason():
    with pytest.raises(ValueError, match="op: refusing does not take this: x is odd"):
        chosen("refusing")


@pytest.mark.parametrize("name", ["xla", backend("own")])
def test_only_the_named_backend_is_asked_whether_it_refuses(name):
    others = (Backend(name="other", run=never, refusal=never, platforms=PLATFORMS), *BACKENDS)
    assert chosen(name, others) == getattr(name, "name", name)


def test_none_that_takes_the_call_is_an_error():
    with pytest.raises(ValueError, match=r"op: none of \['refusing'\] takes this"):
        chosen(None, BACKENDS[:2])


def test_an_unknown_backend_is_refused_with_the_names_that_there_are():
    with pytest.raises(ValueError, match=r"op: no backend 'cuda'; .*mosaic.*reference.*xla"):
        chosen("cuda")


@pytest.mark.parametrize(
    "backends",
    [
        attention.BACKENDS,
        page_write.WRITE_BACKENDS,
        page_write.COPY_BACKENDS,
        page_write.SEAL_BACKENDS,
    ],
    ids=["attention", "write", "copy", "seal"],
)
def test_every_operation_has_a_default_backend_on_every_platform(backends):
    for platform in PLATFORMS:
        present = [one.name for one in backends if platform in one.platforms]
        assert present
        assert "reference" not in present


def test_a_custom_backend_runs_as_a_static_argument_of_a_jitted_function():
    def negated(*arguments):
        out, lse = reference.ragged_paged_attention(*arguments)
        return -out, lse

    def refusal(q, pages, page_table, ragged, sinks, options):
        return "soft caps are not implemented" if options.soft_cap else None

    own = Backend(name="negated", run=negated, refusal=refusal)
    q, kv = jnp.ones((1, 2, 8)), jnp.ones((2, 2, 8, 8))
    arrays = q, Pages(kv=kv, layout="head_major"), jnp.ones((1, 1), jnp.int32)
    lengths = jnp.array([3], jnp.int32), jnp.array([0, 1], jnp.int32)
    attend = jax.jit(ragged_paged_attention, static_argnames=("scale", "backend", "soft_cap"))
    out = attend(*arrays, *lengths, scale=1.0, backend=own)
    chex.assert_trees_all_equal(out, -np.ones((1, 2, 8)))
    with pytest.raises(ValueError, match="negated does not take this: soft caps are not"):
        attend(*arrays, *lengths, scale=1.0, backend=own, soft_cap=2.0)
