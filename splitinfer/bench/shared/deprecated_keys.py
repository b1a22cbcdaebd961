"""Keys of the benchmark's documents that were renamed. For one release a document has both names, and says so."""

from collections.abc import Mapping
from typing import Any

DEPRECATED = {"contenders": "systems"}
"""Old name to present name: a document's ``deprecated``."""


def with_old_keys(found: Mapping[str, Any]) -> dict[str, Any]:
    """``found`` with the value of each renamed key under its old name, too."""
    return {**found, **{old: found[new] for old, new in DEPRECATED.items() if new in found}}
