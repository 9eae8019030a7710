"""Has pytest explain the assertions of the suites as it explains those of the test modules, and
keeps what a simulated chip takes long for out of the fast set."""

import pytest

pytest.register_assert_rewrite("jaxkv.testing.attention_suite", "jaxkv.testing.bits_suite")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A class of tests may name those of its own, inherited ones too, that are quick (`brief`)."""
    for item in items:
        if not isinstance(item, pytest.Function) or item.cls is None:
            continue
        brief = getattr(item.cls, "brief", None)
        if brief is not None and item.originalname not in brief:
            item.add_marker(pytest.mark.slow)
