"""Writes JSON for other programs. All that is printed, stored or sent uses this writer. Also bounds JSON of others.

Python's own writer emits NaN and Infinity, which JSON does not have and most parsers refuse.
"""

import json
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

_NESTING = (dict, list, tuple)


def dumps(value: Any, *, indent: int | None = None, separators: tuple[str, str] | None = None) -> str:
    """Return ``value`` as JSON, without escapes for non-ASCII text; numbers that are not finite become null.

    >>> dumps({"rates": [1.5, float("nan")], "most": float("inf"), "name": "è"})
    '{"rates": [1.5, null], "most": null, "name": "è"}'
    """
    try:
        return _encoder(indent, separators).encode(value)
    except ValueError:  # rare: nearly all documents are finite and need no copy
        return _encoder(indent, separators).encode(_finite(value))


@cache
def _encoder(indent: int | None, separators: tuple[str, str] | None) -> json.JSONEncoder:
    return json.JSONEncoder(ensure_ascii=False, allow_nan=False, indent=indent, separators=separators)


def is_deeper(value: Any, most: int) -> bool:
    """Return whether a value is nested more than ``most`` levels deep, too deeply for programs that recurse through
    it."""
    level, depth = [value], 0
    while level and depth <= most:
        inside = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, _NESTING))
        level, depth = [each for below in inside for each in below], depth + 1
    return depth > most


def _finite(value: Any) -> Any:
    """Return ``value`` with ``None`` in place of numbers that are not finite, also as keys."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_finite(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
