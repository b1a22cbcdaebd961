"""Kinds of values that a document may have. Pure.

A kind takes anything and returns a value that is allowed, or ``None``. So a document has nothing that its schema does
not name: a key that is not a field is left out, and a text that is neither one of a list nor of a narrow form becomes
``None``. Nothing has to be recognised as private, because nothing is let through.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

Kind = Callable[[Any], Any]
_MOST = 64  # elements of a list


def number(value: Any) -> int | float | None:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def flag(value: Any) -> bool | None:
    """True or false."""
    return value if isinstance(value, bool) else None


def word(allowed: Collection[str], other: str | None = None) -> Kind:
    """One of these texts; ``other`` in place of any other text."""
    known = frozenset(allowed)

    def kind(value: Any) -> str | None:
        if not isinstance(value, str):
            return None
        return str(value) if value in known else other

    return kind


def form(pattern: str, other: str | None = None) -> Kind:
    """A text of exactly this form: its first group, or all of it if there is none."""
    wanted = re.compile(pattern, re.ASCII)

    def kind(value: Any) -> str | None:
        if not isinstance(value, str):
            return None
        found = wanted.fullmatch(value)
        if found is None:
            return other
        return found[1] if wanted.groups else found[0]

    return kind


def listing(each: Kind) -> Kind:
    """A list, of at most 64 elements."""

    def kind(value: Any) -> list[Any] | None:
        return [each(one) for one in list(value)[:_MOST]] if isinstance(value, list | tuple) else None

    return kind


def record(**fields: Kind) -> Kind:
    """A mapping with exactly these keys; ``None`` for a field that is not there."""

    def kind(value: Any) -> dict[str, Any] | None:
        return {name: each(value.get(name)) for name, each in fields.items()} if isinstance(value, Mapping) else None

    return kind


def table(names: Collection[str], each: Kind) -> Kind:
    """A mapping with those of these keys that are there."""

    def kind(value: Any) -> dict[str, Any] | None:
        if not isinstance(value, Mapping):
            return None
        return {name: each(value[name]) for name in names if name in value}

    return kind
