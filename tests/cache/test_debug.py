"""The checks find each fault that they are there for, and pass what is sound."""

import numpy as np
import pytest

from jaxkv.cache import CacheSpec, LayerSpec, choose_formats
from jaxkv.cache.debug import check_tables

LAYERS = (LayerSpec(kv_heads=2, head_dim=8), LayerSpec(kv_heads=2, head_dim=8, window=4))
SPEC = CacheSpec(
    layers=LAYERS,
    page_size=8,
    num_pages=(5, 6),
    formats=choose_formats("f32", LAYERS),
)


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


def test_only_a_page_before_the_window_may_be_missing():
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
        pytest.param([[1, 2], [1, 2]], [12, 12], [0, 0], id="no writer"),
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
        pytest.param([[1, 4]], [9], [1], "page 4 is in use and no sequence holds it", id="free"),
        pytest.param([[1, 10]], [9], [1], "no page 10", id="unknown"),
        pytest.param([[1, 2]], [17], [1], "17 tokens need 3 pages, M = 2", id="too long"),
    ],
)
def test_unsound_tables_are_refused_by_sequence_and_page(rows, kv_lens, query_lens, message):
    with pytest.raises(ValueError, match=message):
        check(rows, kv_lens, query_lens, 1, 2, 3)
