"""The examples in docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

ROOMS = ("bench", "common", "core", "discovery", "kvstore", "launch", "probes", "system", "weights")
NAMES = [
    module.name
    for room in ROOMS
    for module in pkgutil.walk_packages(importlib.import_module(f"splitinfer.{room}").__path__, f"splitinfer.{room}.")
] + ["splitinfer.server.residents", "scripts.comparing.judge"]


@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
