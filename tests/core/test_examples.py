"""The examples in docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import splitinfer.core

MODULES = [found.name for found in pkgutil.walk_packages(splitinfer.core.__path__, "splitinfer.core.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
