"""Values of a call's arguments, such that mlx-lm's parser reads them as they were meant.

A parser looks for the words that end a value or a call wherever they stand, and those of tags make a value of the text
between them as far as they understand its schema. So a value is admitted if it

- has none of the words that end something; any other ``<`` may stand there;
- has no blanks at its ends, where it is text between tags;
- is not read as something else: ``null`` as the text of that name, or ``5`` as a number where a text may also be null.

What a parser could not read back is refused.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitinfer.errors import RequestError
from splitinfer.grammar.schemas import ESCAPES, asked, enforceable, in_53_bits

Schema = Mapping[str, Any]
_Rest = dict[str, Any]  # of words by their next letter

_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"})
_OF_TEXTS = _NOTES | {"type", "enum", "const", "minLength", "maxLength"}
_BLANK = r"\s\x1c-\x1f"  # what Python takes off
_CDATA = ("<![CDATA[", "]]>")
_ONE_BLANK = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", **ESCAPES}
_ELSEWHERE = re.compile(r'"\$ref": "#(?!/(?:\$defs|definitions)/)')  # the whole would be another there
_FRACTION = 9  # digits of a number's fraction


@dataclass(frozen=True, slots=True)
class Way:
    """What a parser reads of a value that is declared in one of the ways. ``others``: a pattern of the texts that it
    takes for something else. ``kinds``: the types that it reads besides text."""

    others: str = ""
    kinds: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Reading:
    """How a parser of tags makes values, by how they are declared. ``typed``: one type; ``listed``: ``type`` is a list;
    ``either``: ``anyOf``; ``untyped``: choices alone, or a reference. ``None``: as JSON. has_cdata: text may stand in
    ``<![CDATA[`` and ``]]>``."""

    typed: Way
    listed: Way | None = None
    either: Way | None = None
    untyped: Way | None = None
    has_cdata: bool = False


_SCALARS = frozenset({"integer", "number", "boolean", "null"})
_ALL = _SCALARS | {"object", "array"}
_NULL = "[nN][uU][lL][lL]"
_NIL = f"{_NULL}|[nN][oO][nN][eE]|[nN][iI][lL]"
_NESTED = r"[\[{](.|\n)*"
_LITERAL = (
    r"""[0-9"'(\[{+.#\\\uFEFF-](.|\n)*|[bBrRuUfF]{1,2}["'](.|\n)*|(None|True|False|set)([^a-zA-Z](.|\n)*)?"""
    f"|{_NULL}"
)
AS_JSON = Reading(Way("", _ALL))
BY_PYTHON = Reading(
    Way(_NULL, _ALL),
    Way(_LITERAL, frozenset({"integer", "number"})),
    Way(f"{_NULL}|{_NESTED}", frozenset({"object", "array"})),
    Way(f"{_NULL}|{_NESTED}", frozenset({"object", "array"})),
)
BY_TYPES = Reading(Way(_NULL, _ALL), Way(_NIL, _ALL), Way(_NIL, _ALL), Way(_NIL))
BY_TYPES_OR_CDATA = Reading(*(BY_TYPES.typed, BY_TYPES.listed, BY_TYPES.either, BY_TYPES.untyped), has_cdata=True)


# -- words that must not come ------------------------------------------------------------------


def without(words: Sequence[str]) -> str:
    """A pattern of the texts that have none of some words. Each begins with ``<`` and has no other."""
    rest: _Rest = {}
    for word in words:
        at = rest
        for letter in word[1:]:
            at = at.setdefault(letter, {})
    begun = f"<{_begun(rest)}"
    return f"(?:[^<]|(?:{begun})*<{_left(rest)})*(?:{begun})*"


def _begun(rest: _Rest) -> str:
    """What may have come of a word."""
    ways = [re.escape(letter) + _begun(more) for letter, more in rest.items() if more]
    return f"(?:{'|'.join(ways)})?" if ways else ""


def _left(rest: _Rest) -> str:
    """What comes of a word up to the letter that is not of it."""
    ways = [re.escape(letter) + _left(more) for letter, more in rest.items() if more]
    other = "[^<" + "".join(map(re.escape, rest)) + "]"
    return f"(?:{'|'.join([other, *ways])})"


def guarded(where: str, schema: Schema, words: Sequence[str]) -> dict[str, Any]:
    """A schema of JSON whose texts have none of some words, and whose numbers are not infinite."""
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
    reading: Reading,
    words: Sequence[str],
    behind: str,
    *,
    is_strict: bool = True,
) -> Iterator[str]:
    """Yield the Lark of a value and of the tag behind it. ``shared``: definitions. ``behind``: the tag, in Lark.
    ``is_strict``: as of ``json_of_calls``.

    Raises:
        RequestError: the parser could not read what the schema asks.
    """
    refused = RequestError(
        f"tools: the parameter {where} cannot be enforced in tags: the model's parser needs one type"
    )
    if not isinstance(declared, Mapping):
        raise refused
    if _ELSEWHERE.search(json.dumps([declared, shared])):
        raise RequestError(f"tools: the parameter {where} cannot be enforced in tags: its references must be to $defs")
    declared = asked(declared)
    if reading is AS_JSON and declared.get("type") != "string":
        yield f"{rule}: {json_of_calls(guarded(where, {**shared, **declared}, words), is_strict=is_strict)} {behind}"
        return
    way, value, or_null = _declared(declared, shared, reading)
    if way is None:
        raise refused
    if value["type"] == "string":
        yield from _text_rules(rule, where, value, or_null, _Text(way, reading.has_cdata, words, behind))
    elif value["type"] not in way.kinds:
        raise refused
    else:
        schema = json_of_calls(guarded(where, {**shared, **value}, words), is_strict=is_strict)
        yield f"{rule}: {rule}_json {behind}" + f' | "null" {behind}' * or_null
        yield f"{rule}_json: {schema}"


def _declared(value: Schema, shared: Schema, reading: Reading) -> tuple[Way | None, dict[str, Any], bool]:
    """How a value is declared, the same with one type, and whether it may be null besides."""
    if isinstance(kinds := value.get("type"), str):
        return reading.typed, {**value}, False
    if isinstance(kinds, list | tuple):
        found, or_null = [one for one in kinds if one != "null"], "null" in kinds
        one = {**value, "type": found[0]} if len(found) == 1 and isinstance(found[0], str) else None
        return (reading.listed if one else None), _some(one or {}), or_null
    for key in ("anyOf", "oneOf"):
        if isinstance(several := value.get(key), list | tuple) and all(isinstance(one, Mapping) for one in several):
            left = [one for one in several if one.get("type") != "null"]
            way, inner, more = _declared(left[0], shared, reading) if len(left) == 1 else (None, {}, False)
            if way is reading.typed:
                way = reading.either
            rest = {name: one for name, one in value.items() if name != key}
            return way, {**rest, **inner}, more or len(left) < len(several)
    if isinstance(name := value.get("$ref"), str):
        return _referred(value, name, shared, reading)
    choices = value.get("enum", [value["const"]] if "const" in value else ())
    or_null, inner = None in choices, _some(value)
    is_text = bool(inner.get("enum") or "const" in inner) and all(isinstance(one, str | None) for one in choices)
    return (reading.untyped if is_text else None), {**inner, "type": "string"}, or_null


def _referred(value: Schema, name: str, shared: Schema, reading: Reading) -> tuple[Way | None, dict[str, Any], bool]:
    begins, _, rest = name.partition("/")
    place, _, key = rest.partition("/")
    target = shared.get(place, {}).get(key) if begins == "#" else None
    if not isinstance(target, Mapping) or not isinstance(target.get("type"), str):
        return None, {}, False
    return reading.untyped, {**target, **{key: one for key, one in value.items() if key != "$ref"}}, False


def _some(value: Schema) -> dict[str, Any]:
    if isinstance(choices := value.get("enum"), list | tuple):
        return {**value, "enum": [one for one in choices if one is not None]}
    return {**value}


def _bounded(value: dict[str, Any], types: Sequence[str]) -> dict[str, Any]:
    """Numbers that are read as floats and are not infinite, and whose fractions end."""
    edges = [value[key] for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if key in value]
    is_coarse = all(isinstance(edge, int | float) and round(edge, _FRACTION) == edge for edge in edges)
    ends = {"multipleOf": 10.0**-_FRACTION} if "number" in types and is_coarse else {}
    return {**ends, **in_53_bits(value)}


@dataclass(frozen=True, slots=True)
class _Text:
    way: Way
    has_cdata: bool
    words: Sequence[str]
    behind: str

    def may_be(self, text: Any) -> bool:
        return (
            isinstance(text, str)
            and text == text.strip()
            and not any(word in text for word in self.words)
            and not re.fullmatch(self.way.others or "(?!)", text)
            and not (self.has_cdata and (text.startswith(_CDATA[0]) or _CDATA[1] in text))
        )

    def patterns(self) -> Iterator[str]:
        """Of what may be."""
        yield without(self.words)
        yield rf"([^{_BLANK}]((.|\n)*[^{_BLANK}])?)?"
        if '"' in self.behind and "<[" in self.behind:
            yield r"[^\n]*"  # a token behind other text: what is lazy cannot end with it

    def nots(self) -> Iterator[str]:
        """Of what must not be."""
        if self.way.others:
            yield self.way.others
        if self.has_cdata:
            yield rf"{re.escape(_CDATA[0])}(.|\n)*|(.|\n)*{re.escape(_CDATA[1])}(.|\n)*"


def _text_rules(rule: str, where: str, value: Schema, or_null: bool, text: _Text) -> Iterator[str]:
    if unknown := sorted(set(value) - _OF_TEXTS):
        raise RequestError(f"tools: {unknown[0]} of the parameter {where} cannot be enforced in tags")
    choices = value.get("enum", [value["const"]] if "const" in value else None)
    if choices is not None:
        form = " | ".join(map(json.dumps, _choices(where, choices, text)))
    else:
        patterns = [*text.patterns(), *_lengths(where, value)]
        form = " & ".join([*map(_lark, patterns), *(f"~{_lark(one)}" for one in text.nots())])
    upper = rule.upper()
    yield f"{upper}_TEXT: {form}"
    cdata = f" | {json.dumps(_CDATA[0])} {upper}_TEXT {json.dumps(_CDATA[1])}" if text.has_cdata else ""
    yield f"{upper}: {upper}_TEXT{cdata}" + ' | "null"' * or_null
    is_lazy = "<[" not in text.behind
    yield f"{rule}[lazy]: {upper} {text.behind}" if is_lazy else f"{rule}: {upper} {text.behind}"


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
