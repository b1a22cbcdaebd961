"""Reads values of a request's JSON: each of its type, or a sentence that names the field."""

from collections.abc import Mapping
from typing import Any

from splitinfer.core.sequence import MAX_BIASED
from splitinfer.server.problem import Problem

MOST_TOKENS = 2**31 - 1  # and the highest id of one
_MOST_DIGITS = 19  # of a token id; Python reads no more than 4,300 at once


def wrong(name: str, wanted: str, value: Any) -> Problem:
    """A value is not what its field takes."""
    return Problem(400, f"{name} must be {wanted}, not {value!r:.60}", param=name, code="invalid_value")


def number(name: str, value: Any) -> float:
    """A number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(name, "a number", value)
    return value


def whole(name: str, value: Any, low: int, high: int) -> int:
    """A whole number in a range, both ends included."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise wrong(name, f"a whole number from {low} to {high}", value)
    return value


def flag(name: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return value


def text(name: str, value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise wrong(name, "text", value)
    return value


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    return value


def listing(name: str, value: Any) -> list[Any]:
    """A JSON array."""
    if not isinstance(value, list):
        raise wrong(name, "a list", value)
    return value


def texts(name: str, value: Any, most: int) -> tuple[str, ...]:
    """A text, or a list of at most ``most``."""
    found = [value] if isinstance(value, str) else listing(name, value)
    if len(found) > most:
        raise wrong(name, f"at most {most} texts", value)
    return tuple(text(f"{name}[{i}]", one) for i, one in enumerate(found))


def biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Token ids, which JSON has as texts, and their biases."""
    pairs, given = [], mapping(name, value)
    if len(given) > MAX_BIASED:
        raise wrong(name, f"an object with at most {MAX_BIASED:,} token ids", f"one with {len(given):,}")
    for token, bias in given.items():
        if not token.isascii() or not token.isdigit() or len(token) > _MOST_DIGITS:
            raise wrong(name, "an object whose keys are token ids", token)
        pairs.append((int(token), number(f"{name}.{token}", bias)))
    return tuple(pairs)
