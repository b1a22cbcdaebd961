"""JSON schemas such that llguidance enforces them wholly: what it would enforce in part is written otherwise, or
refused.

- What asks for nothing is left out: formats that JSON Schema does not define, ``propertyNames`` of any text, a ``then``
  without ``if``, ``"uniqueItems": false``.
- A format is a pattern. Some admit less than their standard: hosts have no ``--``, so that none is wrong punycode;
  dates are those of the calendar (29 February in leap years alone), and times have no leap seconds; what may have
  letters of all languages has ASCII.
- A pattern is read as JSON Schema reads it, by ECMAScript: ``.``, ``\\s`` and ``\\S`` have its characters, and in
  ``[...]`` the signs ``[``, ``&&``, ``~~`` and ``--`` mean nothing but themselves.
- ``propertyNames`` are written as properties, or as a pattern of them.
- A name that is free may come twice, which JSON's readers take for one: so ``minProperties`` can count
  but one of these. No name or text has ``\\u``, by which a name could come in another spelling.
- Whole numbers have 53 bits: a model that repeats a digit comes to an end. Bounds beyond these are the last of them.
"""

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from splitinfer.core.call_syntax import referred
from splitinfer.errors import RequestError

MOST_EXACT = 2**53  # of the whole numbers that a float64 holds
ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}  # what may stand behind \ in a text, as llguidance is told it
_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # the characters that need \u

_NOTES = frozenset({"default", "example", "examples", "title", "description", "$comment"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_COUNTS = frozenset(f"{most}{what}" for most in ("min", "max") for what in ("Items", "Length", "Properties"))
_SIGNS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
_NO_DIALECT = frozenset({"http://json-schema.org/schema", "http://json-schema.org/schema#"})  # the newest, whichever

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"
_LABEL = "[a-zA-Z0-9](?:-?[a-zA-Z0-9])*"
_LENGTHS = {"maxLength": 253, "allOf": [{"pattern": r"^[^.]{1,63}(?:\.[^.]{1,63})*$"}]}  # of a host, and of its labels
_IN_NAME, _PERCENT = r"A-Za-z0-9._~!$&'()*+,;=\-", "%[0-9A-Fa-f]{2}"  # of hosts; of paths also : and @
_IN_PATH = f"(?:[{_IN_NAME}:@]|{_PERCENT})"
_PATH, _QUERY = f"(?:/{_IN_PATH}*)*", f"(?:[{_IN_NAME}:@/?]|{_PERCENT})*"
_HOST = f"(?:(?:[{_IN_NAME}:]|{_PERCENT})*@)?(?:[{_IN_NAME}]|{_PERCENT})*(?::[0-9]*)?"
_RELATIVE = f"(?://{_HOST}{_PATH}|/(?:{_IN_PATH}+{_PATH})?|(?:[{_IN_NAME}@]|{_PERCENT})+{_PATH})?"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_VARIABLE = r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*(?:\*|:[1-9][0-9]{0,3})?"
_SIGN = r"\\[dDwWsStnrfv.*+?()\[\]{}|^$/\\-]"
_ONE = rf"(?:[^\\^$.*+?()\[\]{{}}|/\x00-\x1f]|\.|{_SIGN}|\[\^?(?:{_SIGN}|a-z|A-Z|0-9|[A-Za-z0-9_ ])+\])"
_SOME = rf"(?:{_ONE}(?:[*+?]\??|\{{[1-9]\}})?)*"
_GROUPS = rf"{_SOME}(?:\((?:\?:)?{_SOME}(?:\|{_SOME})*\)[*+?]?{_SOME})*"
_FORMATS: dict[str, Mapping[str, Any]] = {
    "date": {"pattern": f"^{_DAY}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DAY}T{_TIME}$"},
    "hostname": {"pattern": rf"^{_LABEL}(?:\.{_LABEL})*$", **_LENGTHS},
    "uri-reference": {"pattern": rf"^(?:[A-Za-z][A-Za-z0-9+.-]*:)?{_RELATIVE}(?:\?{_QUERY})?(?:#{_QUERY})?$"},
    "uri-template": {"pattern": rf"^(?:{_IN_PATH}|[/?#]|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$"},
    "json-pointer": {"pattern": f"^{_POINTER}$"},
    "relative-json-pointer": {"pattern": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$"},
    "regex": {"pattern": rf"^\^?{_GROUPS}(?:\|{_GROUPS})*\$?$"},
    **{name: {"format": name} for name in ("duration", "email", "ipv4", "ipv6", "uri", "uuid")},
}
for _other, _name in {
    "iri": "uri",
    "iri-reference": "uri-reference",
    "idn-email": "email",
    "idn-hostname": "hostname",
}.items():
    _FORMATS[_other] = _FORMATS[_name]
"""The formats of JSON Schema, as llguidance enforces them."""

_EMPTY: tuple[Any, ...] = ({}, True)
_ASKS_NOTHING: Mapping[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "$schema": lambda value, _: isinstance(value, str) and value in _NO_DIALECT,
    "required": lambda value, _: value is False,
    "format": lambda value, _: isinstance(value, str) and value not in _FORMATS,
    "uniqueItems": lambda value, of: value is False or of.get("maxItems") in (0, 1),
    "not": lambda value, _: value is False,
    "if": lambda _, of: not {"then", "else"} & of.keys(),
    "then": lambda _, of: "if" not in of,
    "else": lambda _, of: "if" not in of,
    "propertyNames": lambda value, _: value in _EMPTY or (
        isinstance(value, Mapping) and value.get("type") == "string" and value.keys() <= _NOTES | {"type"}
    ),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), lambda value, _: value in _EMPTY),
}  # fmt: skip
"""By keyword, whether its value, in a schema, might as well not be there."""


def enforceable(schema: Any) -> dict[str, Any]:
    """Return a schema, with all schemas inside it, in a form that llguidance enforces.

    Raises:
        RequestError: it cannot.
    """
    try:
        found = _Schemas(schema).of(schema)
    except (TypeError, ValueError, AttributeError) as error:  # a keyword's value is of a wrong kind
        raise _refused(f"it is not a JSON schema: {error}") from None
    return found if isinstance(found, dict) else {} if found else {"enum": []}


def asked(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without the keywords that ask for nothing."""
    nothing = {key for key, is_nothing in _ASKS_NOTHING.items() if key in schema and is_nothing(schema[key], schema)}
    return {key: value for key, value in schema.items() if key not in nothing}


def in_53_bits(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of numbers with the bounds that it lacks."""
    low = {} if "exclusiveMinimum" in schema else {"minimum": -MOST_EXACT}
    high = {} if "exclusiveMaximum" in schema else {"maximum": MOST_EXACT}
    return {**low, **high, **schema}


class _Schemas:
    """Makes a document's schemas enforceable."""

    def __init__(self, document: Any) -> None:
        self._document = document

    def of(self, schema: Any) -> Any:
        if isinstance(schema, list | tuple):
            return [self.of(one) for one in schema]
        if not isinstance(schema, Mapping):
            _check_value(schema)
            return schema
        if schema.get("not") in _EMPTY:
            return False
        given = {key: _within(key, value) for key, value in asked(schema).items()}
        found = {key: self._inside(key, value) for key, value in self._with_names(given).items()}
        if "required" in found and not isinstance(found["required"], list):
            raise _refused(f"required must be a list of names, not {found['required']!r:.40}")
        _check_least(found)
        if isinstance(pattern := found.get("pattern"), str):
            found["pattern"] = _as_in_ecmascript(pattern)
        if isinstance(name := found.get("format"), str):
            del found["format"]
            also = dict(_FORMATS[name])
            found |= {"allOf": [*found.get("allOf", ()), also]} if also.keys() & found.keys() else also
        if "multipleOf" in found:
            found = _with_steps(found)
        kinds = found.get("type")
        is_whole = "number" not in kinds and "integer" in kinds if isinstance(kinds, list) else kinds == "integer"
        return in_53_bits(found) if is_whole and not {"enum", "const"} & found.keys() else found

    def _inside(self, key: str, value: Any) -> Any:
        if key in _NOTES:
            return value
        if key in ("enum", "const"):
            _check_values(value)
            return value
        if key in _BY_NAME and isinstance(value, Mapping):
            if key == "properties":
                _check_values([*value])
            is_pattern = key == "patternProperties"
            return {_as_in_ecmascript(name) if is_pattern else name: self.of(one) for name, one in value.items()}
        return self.of(value)

    def _with_names(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema that says by other keywords, if they can, which properties its ``propertyNames`` admit."""
        names, properties = self._referred(schema.get("propertyNames")), schema.get("properties") or {}
        if not isinstance(names, Mapping) or names.get("type") not in (None, "string") or "patternProperties" in schema:
            return schema
        about, rest = names.keys() - _NOTES - {"type"}, schema.get("additionalProperties", True)
        found = {**schema, "additionalProperties": False}
        del found["propertyNames"]
        if about == {"enum"} or about == {"const"}:
            choices = [one for one in names.get("enum", [names.get("const")]) if isinstance(one, str)]
            kept = {name: one if name in choices else False for name, one in properties.items()}
            return {**found, "properties": {**dict.fromkeys(choices, rest), **kept}}
        if not properties and (about == {"pattern"} or (about and about <= {"minLength", "maxLength"})):
            lengths = rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
            return {**found, "patternProperties": {names.get("pattern", lengths): rest}}
        return schema

    def _referred(self, schema: Any) -> Any:
        """Return a schema, or the one that its ``$ref`` names."""
        if not isinstance(schema, Mapping) or not isinstance(name := schema.get("$ref"), str) or len(schema) > 1:
            return schema
        return referred(name, self._document)


def _within(key: str, value: Any) -> Any:
    """Return a keyword's number as llguidance reads it: a count is whole, and a bound has at most 53 bits."""
    if key in _COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    sign = _SIGNS.get(key)
    is_beyond = sign and isinstance(value, int | float) and value * sign > MOST_EXACT
    return MOST_EXACT * sign if sign and is_beyond else value


def _with_steps(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose ``multipleOf`` can be enforced. Of choices only multiples stay, and the step goes, because
    llguidance writes a choice and a multiple in different ways."""
    step = schema["multipleOf"]
    if not isinstance(step, int | float) or step <= 0:
        raise _refused(f"multipleOf must be a number over 0, not {step!r:.40}")
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list):
        of_step = [
            one for one in choices if type(one) not in (int, float) or not Fraction(str(one)) % Fraction(str(step))
        ]
        return {key: one for key, one in schema.items() if key not in ("const", "multipleOf")} | {"enum": of_step}
    digits = float(step)
    while digits % 1:
        digits *= 10
    if digits >= 2**32:
        raise _refused(f"multiples of {step} have too many digits; take a rounder multipleOf")
    return schema


def _check_least(schema: Mapping[str, Any]) -> None:
    """Refuse a count of properties that one which comes twice would meet."""
    least, patterns = schema.get("minProperties"), schema.get("patternProperties")
    are_free = schema.get("additionalProperties") is not False or bool(patterns)
    named = {*(schema.get("properties") or ()), *schema.get("required", ())}
    if isinstance(least, int) and are_free and least > len(named) + 1:
        raise _refused(f"minProperties of {least}, because names that are free may come twice; list names as required")


def _check_values(value: Any) -> None:
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        _check_values(each)
    if isinstance(value, Mapping):
        _check_values([*value])
    _check_value(value)


def _check_value(value: Any) -> None:
    """Refuse a whole number that llguidance would round, and a text that is never written."""
    if isinstance(value, int) and abs(value) > MOST_EXACT:
        raise _refused(f"{value} has more digits than can be compared")
    if isinstance(value, str) and (sign := _UNWRITTEN.search(value)):
        raise _refused(f"{json.dumps(value):.60} has {json.dumps(sign[0])}, which no answer in a form has")


def _refused(why: str) -> RequestError:
    return RequestError(f"the grammar cannot be enforced: {why}")


# -- patterns ----------------------------------------------------------------------------------

_BLANKS = r"\x09-\x0d \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_PART = re.compile(r"\\.|\.|\[(\^?)((?:\\.|[^\]\\])*+)(\]|\\?\Z)", re.DOTALL)  # a class that is not closed: to the end
_ITEM = re.compile(r"(\\.|.)(?:-(\\.|.))?", re.DOTALL)
_SETS = frozenset({r"\d", r"\D", r"\w", r"\W", r"\s", r"\S"})
_WRITTEN = {
    ".": r"[^\n\r\u2028\u2029]",
    r"\s": f"[{_BLANKS}]",
    r"\S": f"[^{_BLANKS}]",
    "[]": r"[^\s\S]",
    "[^]": r"[\s\S]",
}
_IN_CLASS = {r"\s": _BLANKS, r"\S": f"[^{_BLANKS}]", r"\b": r"\x08", "[": r"\[", "&": r"\&", "~": r"\~", "-": r"\-"}


def _as_in_ecmascript(pattern: str) -> str:
    """Return a pattern whose characters are ECMAScript's, and whose classes have no signs that join classes."""
    return _PART.sub(_part, pattern)


def _part(found: re.Match[str]) -> str:
    if found[2] is None or found[0] in _WRITTEN:
        return _WRITTEN.get(found[0], found[0])
    return f"[{found[1]}{_ITEM.sub(_item, found[2])}{found[3]}"


def _item(found: re.Match[str]) -> str:
    """Write a character of a class, or a range. Beside a set, such as ``\\d``, the sign ``-`` means itself."""
    ends = [one for one in found.groups() if one]
    return (r"\-" if _SETS.intersection(ends) else "-").join(_IN_CLASS.get(one, one) for one in ends)
