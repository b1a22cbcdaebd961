"""The page `docs/reference/server-fields.md`: what becomes of every field of every request. Made of the models' schema.

python -m splitinfer.server.field_page > docs/reference/server-fields.md
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

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
_INTRODUCTION = """\
# Fields of requests

This page says what [the server](../use/server.md) does with each field that the official clients of OpenAI and
Anthropic can send, and with some fields of other clients. It is generated from the server's request models
(`splitinfer/server/field_page.py`), and a test compares these with the types in the clients' packages.

- A field does what its API documents, or what this page says.
- **Ignored**: the field changes nothing, for the given reason.
- **Refused**: status 400, with the field's name and this sentence. The values in the last column are accepted, because
  they request nothing.

`null` counts as not given, under any name. Any other field is refused by name, with the nearest known name.
"""
_IDLE = ("Ignored: ", "Refused: ")
_TYPES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}


def page() -> str:
    """The page as Markdown. What several routes take alike is written once, where it comes first."""
    return "\n".join([_INTRODUCTION, *_Writer().lines()])


@dataclass(slots=True)
class _Writer:
    _rows: dict[tuple[str, str, str], str] = field(default_factory=dict)  # the first route that has a row
    _objects: dict[str, Schema] = field(default_factory=dict)  # by title

    def lines(self) -> Iterator[str]:
        """All sections' lines."""
        for route, model in ROUTES.items():
            schema = model.model_json_schema()
            yield f"## `{route}`\n"
            yield from self._of_route(route, schema)
            for inner in schema.get("$defs", {}).values():
                self._objects.setdefault(inner["description"], {**inner, "$defs": schema["$defs"]})
        yield "## Objects in requests\n"
        for title, one in self._objects.items():
            yield f"### {title}\n"
            yield from _table(_rows(one))
            yield from _notes(one)

    def _of_route(self, route: str, schema: Schema) -> Iterator[str]:
        rows, known = list[tuple[str, str, str]](), dict[str, list[str]]()
        for row in _rows(schema):
            first = self._rows.setdefault(row, route)
            if first == route:
                rows.append(row)
            else:
                known.setdefault(first, []).append(f"`{row[0]}`")
        for first, names in known.items():
            yield f"As for `{first}`: {', '.join(names)}.\n"
        if rows:
            yield from _table(rows)
        yield from _notes({**schema, "properties": {name: schema["properties"][name] for name, _, _ in rows}})


def _rows(schema: Schema) -> list[tuple[str, str, str]]:
    """Each field with what it does and what it takes; those that do nothing come last."""
    inner = schema.get("$defs", {})
    found = [
        (name, one.get("description", ""), _takes(one, inner) + _default(one))
        for name, one in schema["properties"].items()
    ]
    told = [row for row in found if row[1] or "const" not in schema["properties"][row[0]]]  # a kind is in the title
    return sorted(told, key=lambda row: (row[1][: len(_IDLE[0])] in _IDLE) + row[1].startswith(_IDLE[1]))


def _table(rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """A table; fields that are idle for the same reason have one row."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for name, does, takes in rows:
        grouped.setdefault((does, takes, name if does and not does.startswith(_IDLE) else ""), []).append(f"`{name}`")
    yield "| field | what it does | takes |"
    yield "|---|---|---|"
    for (does, takes, _), names in grouped.items():
        yield f"| {', '.join(names)} | {does} | {takes} |"
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
    if value in (None, "", [], {}) or schema.get("description", "").startswith(_IDLE):
        return ""
    return f"; `{value if isinstance(value, str) else json.dumps(value)}` by default"


def _notes(schema: Schema) -> Iterator[str]:
    """What becomes of objects of kinds that have no table."""
    for name, one in schema["properties"].items():
        for kinds in _kinds_in(one):
            yield from (f"- `{name}`, {line}." for line in _of_kinds(kinds))
    if any(_of_kinds(kinds) for one in schema["properties"].values() for kinds in _kinds_in(one)):
        yield ""


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


if __name__ == "__main__":
    sys.stdout.write(page())
