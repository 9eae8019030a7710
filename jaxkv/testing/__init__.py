"""Equivalence tests against naive attention, for the project's own code and for a user's.

Three functions each check one thing that a user may write, and raise AssertionError with the name
of the case that failed:

  check_attention      an attention function, for example one that calls a backend of your own
  check_pages          a type of pages
  check_score_method   a method that scores tokens, so that some may be dropped

`AttentionSuite` and `BitsSuite` have more tests of an attention backend, as pytest classes to
derive from. All of them are made of `random_batch`, a ragged batch, `place`, which writes it into
pages, and `naive_attention`, the right answer in float64.

The module needs the extra `testing`; the two suites need pytest as well. docs/testing.md shows how
to use it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkv.testing.attention import CASES, AttentionCase, assert_attention, check_attention
    from jaxkv.testing.attention_suite import AttentionSuite
    from jaxkv.testing.batches import Batch, Placed, naive_attention, place, random_batch
    from jaxkv.testing.bits_suite import BitsSuite
    from jaxkv.testing.pages import check_pages
    from jaxkv.testing.score_methods import check_score_method

_MODULES = {
    "attention": ("CASES", "AttentionCase", "assert_attention", "check_attention"),
    "attention_suite": ("AttentionSuite",),
    "batches": ("Batch", "Placed", "naive_attention", "place", "random_batch"),
    "bits_suite": ("BitsSuite",),
    "pages": ("check_pages",),
    "score_methods": ("check_score_method",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "CASES",
    "AttentionCase",
    "AttentionSuite",
    "Batch",
    "BitsSuite",
    "Placed",
    "assert_attention",
    "check_attention",
    "check_pages",
    "check_score_method",
    "naive_attention",
    "place",
    "random_batch",
]


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used: the suites need pytest, the functions do not."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
