"""JSON schemas such that llguidance enforces them wholly: what it would enforce in part is written otherwise, or
refused.

- Dates are those of the calendar (29 February in leap years alone), and times have no leap seconds.
- A pattern is read as JSON Schema reads it, by ECMAScript: in ``[...]`` the signs ``[``, ``&&``, ``~~`` and ``--``
  mean nothing but themselves.
- A name that is free may come twice, which JSON's readers take for one: so ``minProperties`` can count
  but one of these.
- Whole numbers have 53 bits: a model that repeats a digit comes to an end.
- Keywords that ask for nothing, such as ``"uniqueItems": false``, are left out.
"""

import re
from collections.abc import Mapping
from typing import Any

from splitinfer.errors import RequestError

MOST_EXACT = 2**53  # of the whole numbers that a float64 holds
_NOTES = frozenset({"default", "example", "examples", "title", "description", "$comment"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_NO_DIALECT = frozenset({"http://json-schema.org/schema", "http://json-schema.org/schema#"})  # the newest, whichever

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"
_FORMATS = {"date": f"^{_DAY}$", "time": f"^{_TIME}$", "date-time": f"^{_DAY}T{_TIME}$"}


def enforceable(schema: Any) -> Any:
    """A schema, and all that are inside it, such that llguidance enforces what they say.

    Raises:
        RequestError: it cannot.
    """
    if isinstance(schema, list | tuple):
        return [enforceable(one) for one in schema]
    if not isinstance(schema, Mapping):
        _check_number(schema)
        return schema
    found = {key: _inside(key, value) for key, value in schema.items() if not _asks_nothing(key, value)}
    if "required" in found and not isinstance(found["required"], list):
        raise _refused(f"required must be a list of names, not {found['required']!r:.40}")
    _check_least(found)
    if isinstance(pattern := found.get("pattern"), str):
        found["pattern"] = _as_in_ecmascript(pattern)
    if isinstance(name := found.get("format"), str) and name in _FORMATS:
        del found["format"]
        also = {"pattern": _FORMATS[name]}
        found |= {"allOf": [*found.get("allOf", ()), also]} if "pattern" in found else also
    kinds = found.get("type")
    is_whole = "number" not in kinds and "integer" in kinds if isinstance(kinds, list) else kinds == "integer"
    return in_53_bits(found) if is_whole and not {"enum", "const"} & found.keys() else found


def in_53_bits(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of numbers with the bounds that it lacks."""
    low = {} if "exclusiveMinimum" in schema else {"minimum": -MOST_EXACT}
    high = {} if "exclusiveMaximum" in schema else {"maximum": MOST_EXACT}
    return {**low, **high, **schema}


def _inside(key: str, value: Any) -> Any:
    if key in _NOTES:
        return value
    if key in ("enum", "const"):
        _check_numbers(value)
        return value
    if key in _BY_NAME and isinstance(value, Mapping):
        is_pattern = key == "patternProperties"
        return {_as_in_ecmascript(name) if is_pattern else name: enforceable(one) for name, one in value.items()}
    return enforceable(value)


def _asks_nothing(key: str, value: Any) -> bool:
    """Whether a keyword might as well not be there."""
    return (key in ("uniqueItems", "required") and value is False) or (
        key == "$schema" and isinstance(value, str) and value in _NO_DIALECT
    )


def _check_least(schema: Mapping[str, Any]) -> None:
    """Refuse a count of properties that one which comes twice would meet."""
    least, patterns = schema.get("minProperties"), schema.get("patternProperties")
    are_free = schema.get("additionalProperties") is not False or bool(patterns)
    named = {*schema.get("properties", ()), *schema.get("required", ())}
    if isinstance(least, int) and are_free and least > len(named) + 1:
        raise _refused(f"minProperties of {least}, because names that are free may come twice; list names as required")


def _check_numbers(value: Any) -> None:
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        _check_numbers(each)
    _check_number(value)


def _check_number(value: Any) -> None:
    """Refuse a whole number that llguidance would round."""
    if isinstance(value, int) and abs(value) > MOST_EXACT:
        raise _refused(f"{value} has more digits than can be compared")


def _refused(why: str) -> RequestError:
    return RequestError(f"the grammar cannot be enforced: {why}")


_CLASS = re.compile(r"\\.|(\[\^?\]?)((?:\\.|[^\]\\])*+)(\]|\\?\Z)", re.DOTALL)  # one that is not closed: to the end
_ITEM = re.compile(r"(\\.|.)(?:-(\\.|.))?", re.DOTALL)


def _as_in_ecmascript(pattern: str) -> str:
    """A pattern whose classes of characters have no classes in them, nor signs that join such."""
    return _CLASS.sub(
        lambda found: f"{found[1]}{_ITEM.sub(_item, found[2])}{found[3]}" if found[1] else found[0], pattern
    )


def _item(found: re.Match[str]) -> str:
    """A character of a class, or a range."""
    return "-".join(f"\\{one}" if one in ("[", "&", "~", "-") else one for one in found.groups() if one)
