"""The checks find each fault that they are there for, and pass what is sound."""

from dataclasses import replace

import numpy as np
import pytest

from jaxkv.cache import CacheSpec, LayerSpec, check_cache, check_tables, choose_formats, init_cache
from pallas_kernels.pages import LAYOUTS

LAYERS = (LayerSpec(kv_heads=2, head_dim=8), LayerSpec(kv_heads=2, head_dim=8, window=4))
SPEC = CacheSpec(
    layers=LAYERS,
    page_size=8,
    num_pages=(5, 6),
    formats=choose_formats("f32", LAYERS),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_fits_its_own_spec(layout):
    spec = replace(SPEC, layout=layout)
    check_cache(init_cache(spec), spec)


@pytest.mark.parametrize(
    "change, message",
    [
        pytest.param(
            dict(num_pages=(5, 7)), r"layer 1: shape of kv is \(6, 8, 4, 8\)", id="number of pages"
        ),
        pytest.param(dict(page_size=16), "layer 0: shape", id="page size"),
        pytest.param(dict(layout="head_major"), "layer 0: layout is token_major", id="layout"),
        pytest.param(
            dict(formats=choose_formats("bf16", LAYERS)), "f32, the spec's bf16", id="format"
        ),
        pytest.param(
            dict(formats=choose_formats("f32,1=f16", LAYERS)),
            "layer 1: format is f32",
            id="a layer",
        ),
        pytest.param(
            dict(layers=LAYERS[:1], formats=SPEC.formats[:1]),
            "has 2 layers, the spec 1",
            id="layers",
        ),
        pytest.param(
            dict(layers=(SPEC.layers[0], replace(SPEC.layers[1], window=5))),
            "layer 1: window is 4, the spec says 5",
            id="window",
        ),
        pytest.param(
            dict(layers=(SPEC.layers[0], replace(SPEC.layers[1], head_dim=16))),
            "layer 1: shape",
            id="head dim",
        ),
    ],
)
def test_a_cache_of_another_spec_is_refused_by_layer(change, message):
    with pytest.raises(ValueError, match=message):
        check_cache(init_cache(SPEC), replace(SPEC, **change))


class Held:
    """A pool in which these pages are held."""

    def __init__(self, *pages: int):
        self.pages = pages

    def state(self, page: int) -> tuple[int, int]:
        if not 0 < page < 10:
            raise ValueError(f"no page {page}")
        return 0, self.pages.count(page)


def check(rows: list[list[int]], kv_lens: list[int], query_lens: list[int], *held: int) -> None:
    table = np.array(rows, np.int32)
    check_tables([table], np.array([kv_lens]), np.array(query_lens), [Held(*held)], SPEC)


def test_a_page_behind_the_window_may_be_gone_and_one_inside_may_not():
    everything, window = np.array([[1, 2, 3]]), np.array([[0, 2, 3]])  # a window of 4
    lengths = np.array([[20]] * 2), np.array([3])
    check_tables([everything, window], *lengths, [Held(1, 2, 3)] * 2, SPEC)
    with pytest.raises(ValueError, match="group 0, sequence 0: page 0 of its tokens is the null"):
        check_tables([window, window], *lengths, [Held(1, 2, 3)] * 2, SPEC)
    with pytest.raises(ValueError, match="group 1, sequence 0: page 1 of its tokens is the null"):
        check_tables([everything, np.array([[0, 0, 3]])], *lengths, [Held(1, 2, 3)] * 2, SPEC)


@pytest.mark.parametrize(
    "rows, kv_lens, query_lens",
    [
        pytest.param([[1, 2], [3, 0]], [12, 8], [1, 8], id="apart"),
        pytest.param([[1, 2], [1, 3]], [12, 12], [4, 1], id="a shared full page"),
        pytest.param([[1, 1], [2, 0]], [8, 3], [1, 1], id="garbage past the live range"),
        pytest.param([[1, 2], [1, 2]], [12, 12], [0, 0], id="nobody writes"),
        pytest.param([[1, 2], [9, 9]], [12, 0], [1, 0], id="an unused row"),
    ],
)
def test_sound_tables_pass(rows, kv_lens, query_lens):
    check(rows, kv_lens, query_lens, 1, 2, 3)


@pytest.mark.parametrize(
    "rows, kv_lens, query_lens, message",
    [
        pytest.param(
            [[1, 2], [1, 2]], [12, 12], [1, 0], "sequence 0: page 2 is written", id="shared tail"
        ),
        pytest.param(
            [[1, 2], [1, 3]], [12, 12], [5, 1], "sequence 0: page 1 is written", id="chunk"
        ),
        pytest.param([[1, 1]], [16], [1], "page 1 is written", id="twice in one row"),
        pytest.param([[1, 0]], [9], [1], "page 1 of its tokens is the null page", id="null"),
        pytest.param([[1, 4]], [9], [1], "page 4 is in use and nobody holds it", id="free"),
        pytest.param([[1, 10]], [9], [1], "no page 10", id="unknown"),
        pytest.param([[1, 2]], [17], [1], "17 tokens need 3 pages, M = 2", id="too long"),
    ],
)
def test_unsound_tables_are_refused_by_sequence_and_page(rows, kv_lens, query_lens, message):
    with pytest.raises(ValueError, match=message):
        check(rows, kv_lens, query_lens, 1, 2, 3)
