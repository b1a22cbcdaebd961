"""The tables of fields against the types of the official clients: whatever these can send has a fate, however deep."""

import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typing_extensions
from anthropic.types import MessageCountTokensParams, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import input_token_count_params, response_create_params
from pydantic import BaseModel

from splitinfer.server import field_page
from splitinfer.server.anthropic import messages
from splitinfer.server.fields import (
    HONOURED,
    LEFT_OUT,
    Form,
    Honoured,
    Ignored,
    Kinds,
    Object,
    Refused,
    Treatment,
    honoured,
    is_one_of,
)
from splitinfer.server.openai import chat, completions, responses
from splitinfer.server.problem import Problem

SCHEMAS = {"InputSchemaTyped"}  # JSON schemas, which the model is told as they are
PAGE = Path(__file__).parents[2] / "docs" / "server-fields.md"


# -- the official types --------------------------------------------------------------------------------


def objects_in(hint: Any) -> Iterator[type]:
    """The types of objects that a value may be, or may be a list of."""
    if isinstance(hint, type) and (typing_extensions.is_typeddict(hint) or issubclass(hint, BaseModel)):
        yield hint
    elif typing.get_origin(hint) not in (dict, typing.Literal):
        for inner in typing.get_args(hint):
            yield from objects_in(inner)


def hints(kind: type) -> dict[str, Any]:
    """The fields of a type of objects."""
    if issubclass(kind, BaseModel):
        return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
    return typing_extensions.get_type_hints(kind)


def words(hint: Any) -> list[Any]:
    """The words that a field may have: those that tell kinds apart."""
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [word for inner in typing.get_args(hint) for word in words(inner)]


def missing(kind: type, fields: Mapping[str, Treatment], path: str) -> Iterator[str]:
    """The fields of a type that are in no table, nested ones included."""
    for name, hint in hints(kind).items():
        where = f"{path}.{name}"
        match fields.get(name):
            case None:
                yield where
            case Honoured(inside=inside, each=each):
                yield from missing_inside(hint, inside or each, where)


def missing_inside(hint: Any, form: Form | None, path: str) -> Iterator[str]:
    for kind in objects_in(hint):
        if kind.__name__ in SCHEMAS:
            continue
        match form:
            case None:
                yield f"{path}: nothing is said of {kind.__name__}"
            case Object(fields=fields):
                yield from missing(kind, fields, path)
            case Kinds():
                yield from missing_kind(kind, form, path)


def missing_kind(kind: type, form: Kinds, path: str) -> Iterator[str]:
    named = words(hints(kind).get(form.key))
    if not named:
        yield f"{path}: {kind.__name__} has no {form.key}"
    for word in named:
        match form.members.get(word, form.members.get(form.default or "")) if word else None:
            case None if word is not None:
                yield f"{path}[{word}]"
            case Honoured(inside=Object(fields=fields)):
                yield from missing(kind, fields, f"{path}[{word}]")


OFFICIAL = [
    (chat_params.CompletionCreateParamsNonStreaming, chat.FIELDS),
    (chat_params.CompletionCreateParamsStreaming, chat.FIELDS),
    (completion_create_params.CompletionCreateParamsNonStreaming, completions.FIELDS),
    (completion_create_params.CompletionCreateParamsStreaming, completions.FIELDS),
    (response_create_params.ResponseCreateParamsNonStreaming, responses.FIELDS),
    (response_create_params.ResponseCreateParamsStreaming, responses.FIELDS),
    (input_token_count_params.InputTokenCountParams, responses.COUNTED),
    (message_create_params.MessageCreateParamsNonStreaming, messages.FIELDS),
    (message_create_params.MessageCreateParamsStreaming, messages.FIELDS),
    (MessageCountTokensParams, messages.COUNTED),
]


@pytest.mark.parametrize(("kind", "fields"), OFFICIAL)
def test_every_field_of_the_official_clients_has_a_fate(kind: type, fields: Mapping[str, Treatment]):
    assert sorted(set(missing(kind, fields, kind.__name__))) == []


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (beta_create_params.MessageCreateParamsStreaming, messages.FIELDS),
        (beta_count_tokens_params.MessageCountTokensParams, messages.COUNTED),
    ],
)
def test_the_betas_of_anthropic_have_one_at_the_top(kind: type, fields: Mapping[str, Treatment]):
    assert typing_extensions.get_type_hints(kind).keys() - fields.keys() == set()


class _Text(typing.TypedDict):
    type: typing.Literal["text"]
    text: str
    shade: str


class _Sound(typing.TypedDict):
    type: typing.Literal["sound", "noise"]
    loudness: float


class _Turn(typing.TypedDict, total=False):
    parts: typing_extensions.Required[str | list[_Text | _Sound]]
    options: _Text
    name: str


def test_what_no_table_has_is_found():
    text = Object("Text", {"type": HONOURED, "text": HONOURED})
    kinds = Kinds("Parts", "type", {"text": Honoured(inside=text), "sound": Refused("text only")})
    assert list(missing(_Turn, {"parts": Honoured(each=kinds), "options": HONOURED}, "T")) == [
        "T.parts[text].shade",
        "T.parts[noise]",
        "T.options: nothing is said of _Text",
        "T.name",
    ]


# -- the page ------------------------------------------------------------------------------------------


def test_the_page_is_made_of_the_tables():
    assert PAGE.read_text() == field_page.page(), "python -m splitinfer.server.field_page > docs/server-fields.md"


def test_headings_of_the_page_are_different():
    headings = [line for line in field_page.page().splitlines() if line.startswith("#")]
    assert len(headings) == len(set(headings)) > 50


def treatments(fields: Mapping[str, Treatment]) -> Iterator[Treatment]:
    for treatment in fields.values():
        yield treatment
        for form in (treatment.inside, treatment.each) if isinstance(treatment, Honoured) else ():
            if form is not None:
                yield from treatments(form.members if isinstance(form, Kinds) else form.fields)


def test_reasons_are_clauses():
    for fields in field_page.ROUTES.values():
        for treatment in treatments(fields):
            if isinstance(treatment, Ignored | Refused):
                assert len(treatment.why) > 12, treatment
                assert not treatment.why.endswith("."), treatment


# -- reading by a table --------------------------------------------------------------------------------

POINT = Object(
    "Point",
    {"type": HONOURED, "x": HONOURED, "note": Ignored("it is for people"), "z": Refused("it is flat", is_one_of(0))},
)
SHAPES = Kinds(
    "Shapes",
    "type",
    {"point": Honoured(inside=POINT), "blob": Refused("it has no form"), "hint": Ignored("left out: for people")},
    default="point",
)
TABLE: Mapping[str, Treatment] = {
    "at": Honoured(inside=POINT),
    "shapes": Honoured(each=SHAPES),
    "one": Honoured(inside=SHAPES),
}


def test_objects_are_read_by_their_tables():
    body = {
        "at": {"x": 1, "note": "!", "z": 0, "unheard": None},
        "shapes": [{"x": 2}, {"type": "hint", "any": 1}, "?", {"type": "point", "x": None}],
        "one": {"type": "hint"},
        "gone": None,
    }
    assert honoured(body, TABLE) == {
        "at": {"x": 1},
        "shapes": [{"x": 2, "type": "point"}, LEFT_OUT, "?", {"type": "point"}],
    }
    assert honoured({"at": "?", "shapes": {}, "one": []}, TABLE) == {"at": "?", "shapes": {}, "one": []}


@pytest.mark.parametrize(
    ("body", "sentence", "param"),
    [
        ({"a": 1}, "there is no field 'a' here", "a"),
        ({"at": {"y": 1}}, "there is no field 'at.y' here", "at.y"),
        ({"at": {"z": 1}}, "at.z is not supported: it is flat", "at.z"),
        ({"at": {"z": False}}, "at.z is not supported: it is flat", "at.z"),
        (
            {"shapes": [{}, {"type": "blob"}]},
            "shapes[1].type 'blob' is not supported: it has no form",
            "shapes[1].type",
        ),
        ({"shapes": [{"type": "line"}]}, "shapes[0].type must be one of point, not 'line'", "shapes[0].type"),
        ({"one": {"type": ["point"]}}, "one.type must be one of point, not ['point']", "one.type"),
    ],
)
def test_what_a_table_refuses_is_named(body: dict[str, Any], sentence: str, param: str):
    with pytest.raises(Problem) as caught:
        honoured(body, TABLE)
    assert (caught.value.status, str(caught.value), caught.value.param) == (400, sentence, param)
