"""How much is tested: what belongs to every change, or everything there is (``scripts/test --all``).

Whole cases that only ``--all`` runs are marked: ``@pytest.mark.long``, or ``long(...)`` among parameters.
A loop inside a test asks ``thorough``.
"""

from typing import Any, TypeVar

import pytest

T = TypeVar("T")

everything = False  # set by conftest.py before any test module is imported


def thorough(usual: T, everything_: T) -> T:
    """The second under ``--all``, else the first."""
    return everything_ if everything else usual


def long(*values: Any) -> Any:
    """Parameters that only ``--all`` runs."""
    return pytest.param(*values, marks=pytest.mark.long)
