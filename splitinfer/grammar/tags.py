"""Values of a call's arguments that ``text.call_reader`` reads as they were meant.

Where arguments stand one by one, between marks, a value goes on up to the words behind it, and what it is depends on
its schema. So a value is admitted if it

- has none of the words that end something;
- has no blanks at its ends, where it is a text;
- is not read as something else, such as the text ``null`` where a text may also be null.

What could not be read back is refused.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitinfer.core.call_syntax import admitted, referred
from splitinfer.errors import RequestError
from splitinfer.grammar.schemas import ESCAPES, asked, enforceable, in_53_bits

Schema = Mapping[str, Any]
_Rest = dict[str, Any]  # of words by their next letter

_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"})
_OF_TEXTS = _NOTES | {"type", "enum", "const", "minLength", "maxLength"}
_BLANK = r"\s\x1c-\x1f"  # what Python takes off
_ONE_BLANK = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", **ESCAPES}
_ELSEWHERE = re.compile(r'"\$ref": "#(?!/(?:\$defs|definitions)/)')  # the whole would be another there
_FRACTION = 9  # digits of a number's fraction


_ALL = frozenset({"integer", "number", "boolean", "null", "object", "array"})
_NULL = r"\s*(null|None)?\s*"
"""What is read as null where a text may be null, too."""


# -- words that must not come ------------------------------------------------------------------


def without(words: Sequence[str]) -> str:
    """Return a pattern of the texts that have none of some words, of which there is one at least. All begin with one
    letter, and have no other such."""
    rest: _Rest = {}
    for word in words:
        at = rest
        for letter in word[1:]:
            at = at.setdefault(letter, {})
    first = re.escape(words[0][0])
    if not rest:
        return f"[^{first}]*"
    begun = f"{first}{_begun(rest)}"
    return f"(?:[^{first}]|(?:{begun})*{first}{_left(rest, first)})*(?:{begun})*"


def _begun(rest: _Rest) -> str:
    """Return what may have come of a word."""
    ways = [re.escape(letter) + _begun(more) for letter, more in rest.items() if more]
    return f"(?:{'|'.join(ways)})?" if ways else ""


def _left(rest: _Rest, first: str) -> str:
    """Return the pattern of a word's beginning with a letter after it that does not continue the word."""
    ways = [re.escape(letter) + _left(more, first) for letter, more in rest.items() if more]
    other = f"[^{first}" + "".join(map(re.escape, rest)) + "]"
    return f"(?:{'|'.join([other, *ways])})"


def guarded(where: str, schema: Schema, words: Sequence[str]) -> dict[str, Any]:
    """Return a schema of JSON whose texts have none of some words, and whose numbers are not infinite."""
    name = "any-value"
    free = {"$ref": f"#/$defs/{name}"}
    guard = _Guard(where, words, {"pattern": f"^{without(words)}$"} if words else {}, free)
    made = guard.of({"type": ["string", *sorted(_ALL)], "items": True, "additionalProperties": True})
    found = guard.of(enforceable(schema))
    return {**found, "$defs": {**found.get("$defs", {}), name: made}}


def json_of_calls(schema: Schema, *, is_strict: bool = True) -> str:
    """Return the JSON of a call's arguments, in Lark. A blank may stand where models write one, behind ``,`` and ``:``;
    blanks without end are how a small model never comes to its end. ``is_strict``: whether keywords that cannot be
    enforced are refused."""
    return f"%json {json.dumps({**schema, 'x-guidance': {**_ONE_BLANK, 'lenient': not is_strict}})}"


@dataclass(frozen=True, slots=True)
class _Guard:
    where: str
    words: Sequence[str]
    pattern: Schema
    free: Schema

    def of(self, schema: Any) -> Any:
        if schema is True or schema == {}:
            return self.free
        if not isinstance(schema, Mapping):
            return schema
        found = {key: self._inside(key, value) for key, value in schema.items()}
        if {"enum", "const"} & found.keys():
            return found
        types = _types(schema)
        if "string" in types or not {"type", "$ref", "anyOf", "oneOf", "allOf"} & found.keys():
            found |= {"allOf": [*found.get("allOf", ()), self.pattern]} if "pattern" in found else self.pattern
        for kind, key in (("object", "additionalProperties"), ("array", "items")):
            if kind in types:
                found.setdefault(key, self.free)
        return _bounded(found, types) if {"integer", "number"} & {*types} else found

    def _inside(self, key: str, value: Any) -> Any:
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, Mapping):
            return {name: self.of(one) for name, one in value.items()}
        if key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list | tuple):
            return [self.of(one) for one in value]
        if key in ("items", "additionalProperties"):
            return self.of(value)
        if key in ("enum", "const"):
            return self._choices(key, value)
        return value

    def _choices(self, key: str, value: Any) -> Any:
        given = value if key == "enum" and isinstance(value, list | tuple) else [value]
        able = [one for one in given if not any(word in json.dumps(one, ensure_ascii=False) for word in self.words)]
        if not able:
            raise RequestError(f"tools: the choices of {self.where} have what ends a call")
        return able if key == "enum" else value


def _types(schema: Schema) -> Sequence[str]:
    kinds = schema.get("type")
    return [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list | tuple) else []


# -- values between tags -----------------------------------------------------------------------


def value_rules(
    rule: str,
    where: str,
    declared: Any,
    shared: Schema,
    words: Sequence[str],
    behind: str,
    *,
    is_strict: bool = True,
) -> Iterator[str]:
    """Return the Lark of a value and of the tag after it. ``shared``: definitions. ``behind``: the tag, in Lark.

    Raises:
        RequestError: a value of this schema could not be read back.
    """
    if not isinstance(declared, Mapping):
        raise RequestError(f"tools: the parameter {where} cannot be enforced in tags: it needs a schema")
    if _ELSEWHERE.search(json.dumps([declared, shared])):
        raise RequestError(f"tools: the parameter {where} cannot be enforced in tags: its references must be to $defs")
    declared = asked(declared)
    value, or_null = with_one_type(declared, shared)
    if value.get("type") == "string":
        yield from _text_rules(rule, where, value, _Text(words, behind, or_null))
    elif not (kinds := admitted(declared, shared)) or "string" in kinds:
        raise RequestError(f"tools: the parameter {where} cannot be enforced in tags: a text could be another value")
    else:
        schema = json_of_calls(guarded(where, {**shared, **declared}, words), is_strict=is_strict)
        yield f"{rule}: {schema} {behind}"


def kind_of(declared: Any, shared: Schema) -> str:
    """Return the one type of a value, as far as its schema says it; "" if it does not."""
    kind = with_one_type(declared, shared)[0].get("type") if isinstance(declared, Mapping) else None
    return kind if isinstance(kind, str) else ""


def with_one_type(value: Schema, shared: Schema) -> tuple[dict[str, Any], bool]:
    """Return a value's schema with one type if it has one, and whether it may be null besides."""
    if isinstance(kinds := value.get("type"), list | tuple):
        found = [one for one in kinds if one != "null"]
        one_type = {**value, "type": found[0]} if len(found) == 1 else {**value}
        return _some(one_type), "null" in kinds
    for key in ("anyOf", "oneOf"):
        if isinstance(several := value.get(key), list | tuple) and all(isinstance(one, Mapping) for one in several):
            left = [one for one in several if one.get("type") != "null"]
            if len(left) == 1:
                inner, more = with_one_type(left[0], shared)
                rest = {name: one for name, one in value.items() if name != key}
                return {**rest, **inner}, more or len(left) < len(several)
    if isinstance(reference := value.get("$ref"), str):
        target = referred(reference, shared)
        others = {key: one for key, one in value.items() if key != "$ref"}
        return ({**target, **others}, False) if isinstance(target, Mapping) else ({**value}, False)
    choices = value.get("enum", [value["const"]] if "const" in value else ())
    if "type" not in value and choices and all(isinstance(one, str | None) for one in choices):
        return {**_some(value), "type": "string"}, None in choices
    return {**value}, False


def _some(value: Schema) -> dict[str, Any]:
    if isinstance(choices := value.get("enum"), list | tuple):
        return {**value, "enum": [one for one in choices if one is not None]}
    return {**value}


def _bounded(value: dict[str, Any], types: Sequence[str]) -> dict[str, Any]:
    """Return a schema of numbers that are read as floats, are not infinite, and whose fractions end."""
    edges = [value[key] for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if key in value]
    is_coarse = all(isinstance(edge, int | float) and round(edge, _FRACTION) == edge for edge in edges)
    ends = {"multipleOf": 10.0**-_FRACTION} if "number" in types and is_coarse else {}
    return {**ends, **in_53_bits(value)}


@dataclass(frozen=True, slots=True)
class _Text:
    words: Sequence[str]
    behind: str
    or_null: bool

    def may_be(self, text: Any) -> bool:
        return (
            isinstance(text, str)
            and text == text.strip()
            and not any(word in text for word in self.words)
            and not (self.or_null and re.fullmatch(_NULL, text))
        )

    def patterns(self) -> Iterator[str]:
        """Yield patterns that a text must match, all of them."""
        for first in dict.fromkeys(word[0] for word in self.words):
            yield without([word for word in self.words if word[0] == first])
        yield rf"([^{_BLANK}]((.|\n)*[^{_BLANK}])?)?"
        if '"' in self.behind and "<[" in self.behind:
            yield r"[^\n]*"  # a token behind other text: what is lazy cannot end with it


def _text_rules(rule: str, where: str, value: Schema, text: _Text) -> Iterator[str]:
    if unknown := sorted(set(value) - _OF_TEXTS):
        raise RequestError(f"tools: {unknown[0]} of the parameter {where} cannot be enforced in tags")
    choices = value.get("enum", [value["const"]] if "const" in value else None)
    if choices is not None:
        form = " | ".join(map(json.dumps, _choices(where, choices, text)))
    else:
        patterns = [*text.patterns(), *_lengths(where, value)]
        form = " & ".join([*map(_lark, patterns), *([f"~{_lark(_NULL)}"] if text.or_null else [])])
    upper = rule.upper()
    yield f"{upper}_TEXT: {form}"
    yield f"{upper}: {upper}_TEXT" + ' | "null"' * text.or_null
    yield f"{rule}{'' if '<[' in text.behind else '[lazy]'}: {upper} {text.behind}"


def _choices(where: str, choices: Any, text: _Text) -> list[str]:
    given = choices if isinstance(choices, list | tuple) else ()
    able = [one for one in given if text.may_be(one)]
    if not able or not all(isinstance(one, str) for one in given):
        raise RequestError(f"tools: the choices of the parameter {where} cannot be enforced in tags")
    return able


def _lengths(where: str, value: Schema) -> Iterator[str]:
    least, most = value.get("minLength", 0), value.get("maxLength")
    are_numbers = all(type(one) is int for one in (least, 0 if most is None else most))
    if not are_numbers or (most is not None and most < least):
        raise RequestError(f"tools: the lengths of the parameter {where} cannot be enforced in tags")
    if least > 0 or most is not None:
        yield rf"(.|\n){{{max(0, least)},{'' if most is None else most}}}"


def _lark(pattern: str) -> str:
    return "/" + pattern.replace("/", r"\/") + "/"
