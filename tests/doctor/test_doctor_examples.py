"""The examples in the docstrings of splitinfer.doctor, and of what it shares with the engine, are right."""

import doctest
import importlib
import pkgutil

import pytest

import splitinfer.doctor

NAMES = [module.name for module in pkgutil.walk_packages(splitinfer.doctor.__path__, "splitinfer.doctor.")]


@pytest.mark.parametrize("name", [*NAMES, "splitinfer.engine.links.reachability", "splitinfer.system.origin"])
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
