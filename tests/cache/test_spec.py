"""Sizes and groups of a cache's static description."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.cache import (
    CacheSpec,
    LayerGroup,
    LayerSpec,
    choose_formats,
    get_format,
    init_cache,
)
from jaxkv.kv_format import FORMATS
from pallas_kernels import Pages
from pallas_kernels.pages import LAYOUTS

LAYERS = st.lists(
    st.builds(
        LayerSpec,
        kv_heads=st.integers(1, 3),
        head_dim=st.sampled_from([8, 16]),
        window=st.sampled_from([None, 4, 512]),
    ),
    min_size=1,
    max_size=5,
).map(tuple)


def groups_of(layers: tuple[LayerSpec, ...]) -> tuple[LayerGroup, ...]:
    return CacheSpec.plan(layers, choose_formats("f32", layers), page_size=8, num_tokens=8).groups


@settings(deadline=None, max_examples=15)
@given(
    layers=LAYERS,
    page_size=st.sampled_from([8, 16]),
    name=st.sampled_from(sorted(name for name in FORMATS if "static" not in name)),
    layout=st.sampled_from(LAYOUTS),
    data=st.data(),
)
def test_nbytes_is_the_sum_of_the_bytes_on_the_device(layers, page_size, name, layout, data):
    formats = choose_formats(name, layers)
    plan = CacheSpec.plan(layers, formats, page_size=page_size, num_tokens=page_size)
    num_pages = data.draw(st.tuples(*[st.integers(2, 4)] * len(plan.groups)))
    spec = replace(plan, num_pages=num_pages, layout=layout)
    cache = init_cache(spec)
    assert spec.nbytes == sum(x.nbytes for pages in cache.layers for x in pages.paged.values())
    for g, group in enumerate(spec.groups):
        page_bytes = sum(x[0].nbytes for i in group.members for x in cache.layers[i].paged.values())
        assert spec.bytes_per_page(g) == page_bytes


@given(layers=LAYERS)
def test_every_layer_is_in_the_one_group_of_its_window(layers):
    groups = groups_of(layers)
    assert sorted(i for group in groups for i in group.members) == list(range(len(layers)))
    assert all(layers[i].window == group.window for group in groups for i in group.members)
    assert len({group.window for group in groups}) == len(groups)


def test_groups_come_in_order_of_first_appearance():
    windows = (512, None, 512, None, 4)
    layers = tuple(LayerSpec(kv_heads=1, head_dim=8, window=w) for w in windows)
    groups = [(group.window, group.members) for group in groups_of(layers)]
    assert groups == [(512, (0, 2)), (None, (1, 3)), (4, (4,))]


def test_an_unknown_format_is_refused_with_the_list_of_formats():
    with pytest.raises(ValueError, match=r"no KV format 'int3'; there are f32, bf16, f16"):
        get_format("int3")


@pytest.mark.parametrize(
    "name, dtype", [("f32", jnp.float32), ("bf16", jnp.bfloat16), ("f16", jnp.float16)]
)
def test_a_format_stores_values_as_its_dtype(name, dtype):
    pages = get_format(name).init_pages(2, 8, 1, 8, "head_major")
    assert isinstance(pages, Pages)
    assert pages.kv.dtype == dtype


@pytest.mark.parametrize("name", ["kv_heads", "head_dim", "window"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "x"])
def test_a_layer_names_the_number_that_it_cannot_have(name, value):
    with pytest.raises(ValueError, match=f"{name} of a layer must be a positive integer, got"):
        LayerSpec(**{"kv_heads": 2, "head_dim": 64, name: value})
