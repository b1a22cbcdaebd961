"""The examples in the docstrings of splitinfer.launch are right."""

import doctest
import importlib
import pkgutil

import pytest

import splitinfer.launch

NAMES = [module.name for module in pkgutil.walk_packages(splitinfer.launch.__path__, "splitinfer.launch.")]


@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
