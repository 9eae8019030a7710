"""`check_pages` lets right pages pass and catches those that are wrong in one place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.testing import check_pages
from jaxkv.testing.pages import write_whole_pages
from pallas_kernels import Pages


def floats(num_pages: int, kind: type[Pages] = Pages) -> Pages:
    return kind(kv=jnp.full((num_pages, 4, 8, 16), jnp.nan), layout="head_major")


def test_pages_of_floats_pass_without_any_error():
    check_pages(floats, tolerance=0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Halved(Pages):
    """Reads half of what was written."""

    def read(self, kv_index, page_ids, offsets, run=1):
        return super().read(kv_index, page_ids, offsets, run) / 2


def test_pages_that_read_another_value_are_caught():
    with pytest.raises(AssertionError, match=r"with an error of 0\.5"):
        check_pages(lambda n: floats(n, Halved), tolerance=0.4)


def test_a_write_that_changes_another_page_is_caught():
    def write(pages: Pages, kv: np.ndarray, ids: list[int]) -> Pages:
        written = write_whole_pages(pages, kv, ids)
        return dataclasses.replace(written, kv=written.kv.at[0, 0, 0, 0].set(0.0))

    with pytest.raises(AssertionError):
        check_pages(floats, tolerance=0, write=write)
