"""The examples in the docstrings of jaxkv.prefix run and print what they say."""

import doctest
import importlib
import pkgutil

import pytest

import jaxkv.prefix

MODULES = [module.name for module in pkgutil.iter_modules(jaxkv.prefix.__path__, "jaxkv.prefix.")]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", ["PagePool", "PrefixIndex", "PageTables", "EvictionPolicy"])
def test_what_users_call_has_an_example(name):
    assert ">>>" in (getattr(jaxkv.prefix, name).__doc__ or "")
