"""The page `reference/server-fields.md`: what becomes of every field of every request, from the models' own schema.

Sorted by what a reader asks: what can be set, what a message may hold, what is ignored, what is refused. A field that
several routes treat alike has one row.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from splitinfer.server.anthropic.messages import CountRequest, MessageRequest
from splitinfer.server.fields import Fields
from splitinfer.server.openai.chat import ChatRequest
from splitinfer.server.openai.completions import CompletionRequest
from splitinfer.server.openai.responses import InputRequest, ResponseRequest
from splitinfer.server.own_routes import DetokenizeRequest, TemplateRequest, TokenizeRequest

Schema = Mapping[str, Any]
ROUTES: Mapping[str, type[Fields]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponseRequest,
    "/v1/responses/input_tokens": InputRequest,
    "/v1/messages": MessageRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/tokenize": TokenizeRequest,
    "/apply-template": TemplateRequest,
    "/detokenize": DetokenizeRequest,
}
_SHORT: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/responses/input_tokens": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
}
"""Routes under the names of their APIs; a route that counts tokens takes what its API takes."""
_INSIDE = "objects"
_INTRODUCTION = """\
# Fields of requests

What [the server](../use/server.md) does with each field that the official clients of OpenAI and Anthropic can send, and
with some fields of other clients. The page is made of the server's request models, and a test compares these with the
types in the clients' packages.

- A field does what its API documents, or what this page says. No field is ignored silently.
- *in* names the APIs: `chat` (`/v1/chat/completions`), `completions` (`/v1/completions`), `responses`
  (`/v1/responses`), `messages` (`/v1/messages`), the routes that only count tokens included; *objects* are those inside
  a request, such as messages and tools.
- `null` counts as not given, under any name. Any other field is refused by name, with the nearest known name.
"""
_IGNORED, _REFUSED = "Ignored: ", "Refused: "
_TYPES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}


class _Field(NamedTuple):
    name: str
    does: str
    takes: str

    @property
    def is_set(self) -> bool:
        return not self.does.startswith((_IGNORED, _REFUSED))


def page() -> str:
    """The page as Markdown."""
    routes = [(_SHORT.get(route, f"`{route}`"), model.model_json_schema()) for route, model in ROUTES.items()]
    objects: dict[str, Schema] = {}
    for _, schema in routes:
        for inner in schema.get("$defs", {}).values():
            objects.setdefault(inner["description"], {**inner, "$defs": schema["$defs"]})
    inside = [(_INSIDE, one) for one in objects.values()]
    lines = [_INTRODUCTION, "## What can be set\n", *_settable(routes), "## Objects in requests\n"]
    for title, one in objects.items():
        lines += [f"### {title}\n", *_object(one)]
    lines += ["## Kinds of messages, parts and tools\n", *_kinds([*routes, *inside])]
    lines += ["## What is ignored\n", "These fields change nothing, for the given reason.\n"]
    lines += _fates([*routes, *inside], _IGNORED)
    lines += ["## What is refused\n", "Status 400, with the field's name and the reason. "]
    lines += ["The values in the last column are accepted, because they request nothing.\n"]
    lines += _fates([*routes, *inside], _REFUSED)
    return "\n".join(lines)


def _fields(schema: Schema) -> Iterator[_Field]:
    """Each field with what it does and what it takes; a kind of object is in the object's title."""
    inner = schema.get("$defs", {})
    for name, one in schema["properties"].items():
        if one.get("description") or "const" not in one:
            yield _Field(name, one.get("description", ""), _takes(one, inner) + _default(one))


def _settable(routes: Sequence[tuple[str, Schema]]) -> Iterator[str]:
    """A table of what several APIs take alike, then one for each API."""
    places: dict[_Field, list[str]] = {}
    for route, schema in routes:
        for one in _fields(schema):
            if one.is_set and route not in places.setdefault(one, []):
                places[one].append(route)
    yield from _table(
        ("field", "what it does", "takes", "in"),
        ((f"`{one.name}`", one.does, one.takes, ", ".join(where)) for one, where in places.items() if len(where) > 1),
    )
    for route in dict.fromkeys(route for route, _ in routes):
        own = [one for one, where in places.items() if where == [route]]
        if own:
            yield f"### Only in {route}\n"
            yield from _table(
                ("field", "what it does", "takes"), ((f"`{one.name}`", one.does, one.takes) for one in own)
            )


def _object(schema: Schema) -> Iterator[str]:
    rows = [one for one in _fields(schema) if one.is_set]
    if any(one.does for one in rows):
        yield from _table(("field", "what it does", "takes"), ((f"`{one.name}`", one.does, one.takes) for one in rows))
    elif rows:
        yield "; ".join(f"`{one.name}`: {one.takes}".removesuffix(": ") for one in rows) + ".\n"
    else:
        yield "Nothing else can be set.\n"


def _fates(owners: Sequence[tuple[str, Schema]], fate: str) -> Iterator[str]:
    """A table of the fields that have this fate, by reason."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for owner, schema in owners:
        for one in _fields(schema):
            if one.does.startswith(fate):
                accepted = one.takes if fate == _REFUSED else ""
                places = found.setdefault((one.does.removeprefix(fate), accepted), {}).setdefault(one.name, [])
                places += [owner] if owner not in places else []
    rows = []
    for (why, accepted), names in found.items():
        by_place: dict[str, list[str]] = {}
        for name, where in names.items():
            by_place.setdefault(", ".join(where), []).append(f"`{name}`")
        rows += [(", ".join(those), why, where, accepted) for where, those in by_place.items()]
    columns = ("field", "why", "in", "accepted")
    keep = 4 if fate == _REFUSED else 3
    yield from _table(columns[:keep], (row[:keep] for row in rows))


def _kinds(owners: Sequence[tuple[str, Schema]]) -> Iterator[str]:
    """What becomes of objects of kinds that have no table."""
    found: dict[tuple[str, str], list[str]] = {}
    for owner, schema in owners:
        for name, one in schema["properties"].items():
            for kinds in _kinds_in(one):
                for line in _of_kinds(kinds):
                    places = found.setdefault((f"`{name}`", line), [])
                    places += [owner] if owner not in places else []
    rows = ((name, ", ".join(where), line) for (name, line), where in found.items())
    yield from _table(("in", "of", "what becomes of it"), rows)


def _table(columns: Sequence[str], rows: Iterator[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _takes(schema: Schema, inner: Mapping[str, Schema]) -> str:
    match schema:
        case {"$ref": ref}:
            title = inner[ref.rpartition("/")[2]]["description"]
            return f"[{title}](#{_anchor(title)})"
        case {"anyOf": types} | {"oneOf": types}:
            words = ", ".join(f"`{word}`" for word in schema.get("kinds", {}).get("words", ()))
            own = [_takes(one, inner) for one in types if one.get("type") != "null" and not (words and "type" in one)]
            return " or ".join(one for one in (words, *own) if one)
        case {"enum": values}:
            return ", ".join(f"`{one if isinstance(one, str) and one else json.dumps(one)}`" for one in values)
        case {"const": value}:
            return f"`{value}`"
        case {"type": "array"}:
            each = _takes(schema.get("items", {}), inner)
            return f"list of {each}{_bounds(schema)}" if each else f"list{_bounds(schema)}"
        case {"type": [*several]}:
            return " or ".join("list" if one == "array" else _TYPES[one] for one in several)
        case {"type": "object"}:
            return f"object{_bounds(schema)}"
        case {"type": kind}:
            return f"{_TYPES[kind]}{_bounds(schema)}"
        case _:
            return _bounds(schema).removeprefix(", ")


def _bounds(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum", _HUGE)
    most = ((schema.get(key), what) for key, what in _MOST.items())
    said = [f"at most {number:,} {what}" for number, what in most if number is not None]
    if low is not None and low > -_HUGE:
        said.append(f"at least {low}" if high >= _HUGE else f"{low} to {high}")
    return "".join(f", {one}" for one in said)


_HUGE = 2**31 - 1
_MOST = {"maxLength": "characters", "maxItems": "entries", "maxProperties": "entries"}


def _default(schema: Schema) -> str:
    value = schema.get("default")
    if value in (None, "", [], {}) or schema.get("description", "").startswith((_IGNORED, _REFUSED)):
        return ""
    return f"; `{value if isinstance(value, str) else json.dumps(value)}` by default"


def _of_kinds(kinds: Schema) -> list[str]:
    key, lines = kinds["key"], list[str]()
    for fate in ("refused", "left_out"):
        by_why: dict[str, list[str]] = {}
        for kind, why in kinds.get(fate, {}).items():
            by_why.setdefault(why, []).append(f"`{kind}`")
        lines += [f"`{key}` {', '.join(those)}: {fate.replace('_', ' ')}, {why}" for why, those in by_why.items()]
    if "others" in kinds:
        lines.append(f"any other `{key}`: left out, {kinds['others']}")
    if "no_words" in kinds:
        lines.append(f"any other word or `{key}`: refused, {kinds['no_words']}")
    if "default" in kinds:
        lines.append(f"one without `{key}` is `{kinds['default']}`")
    return lines


def _kinds_in(schema: Any) -> Iterator[Schema]:
    if isinstance(schema, dict):
        if "kinds" in schema:
            yield schema["kinds"]
        for one in schema.values():
            yield from _kinds_in(one)
    elif isinstance(schema, list):
        for one in schema:
            yield from _kinds_in(one)


def _anchor(title: str) -> str:
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter == "-")
