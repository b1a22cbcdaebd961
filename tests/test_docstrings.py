"""The examples in docstrings are true."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted([*ROOT.glob("splitinfer/**/*.py"), *ROOT.glob("scripts/comparing/*.py")])
    if ">>> " in path.read_text("utf-8")
]


@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
