"""The models of requests against the types of the official clients: what these can send has a fate, however deep."""

import typing
from collections.abc import Iterator
from typing import Any

import pytest
import typing_extensions
from anthropic.types import MessageCountTokensParams, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from book import fields as fields_page
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import input_token_count_params, response_create_params
from pydantic import BaseModel

from splitinfer.server.anthropic.messages import CountRequest, MessageRequest
from splitinfer.server.fields import AsGiven, Fields, Ignored, Kinds, Refused, kinds_of, read
from splitinfer.server.openai.chat import ChatRequest
from splitinfer.server.openai.completions import CompletionRequest
from splitinfer.server.openai.responses import InputRequest, ResponseRequest
from splitinfer.server.problem import Problem

SCHEMAS = {"InputSchemaTyped"}  # JSON schemas, which the model is told as they are


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


def notes_in(annotation: Any) -> Iterator[Any]:
    """The models of a field's type, and what is said of it."""
    if isinstance(annotation, AsGiven):
        yield annotation.model
    elif isinstance(annotation, Kinds | Ignored | Refused) or (
        isinstance(annotation, type) and issubclass(annotation, Fields)
    ):
        yield annotation
    else:
        for inner in (*typing.get_args(annotation), *getattr(annotation, "__metadata__", ())):
            yield from notes_in(inner)


def missing(kind: type, model: type[Fields], path: str) -> Iterator[str]:
    """The fields of an official type that a model lacks, nested ones included."""
    known = {field.alias or name: field for name, field in model.model_fields.items()}
    for name, hint in hints(kind).items():
        if name not in known:
            yield f"{path}.{name}"
            continue
        field = known[name]
        notes = [note for one in (field.annotation, *field.metadata) for note in notes_in(one)]
        if any(isinstance(note, Ignored | Refused) for note in notes) or not any(True for _ in objects_in(hint)):
            continue
        if not notes and field.annotation in (Any, dict[str, Any], dict[str, Any] | None):
            continue  # told as it is
        yield from missing_inside(hint, notes, f"{path}.{name}")


def missing_inside(hint: Any, notes: list[Any], path: str) -> Iterator[str]:
    models = [note for note in notes if isinstance(note, type)]
    kinds = [note for note in notes if isinstance(note, Kinds)]
    for kind in objects_in(hint):
        if kind.__name__ in SCHEMAS:
            continue
        if kinds:
            yield from missing_kind(kind, models, kinds, path)
        elif models:
            yield from missing(kind, models[0], path)
        else:
            yield f"{path}: nothing is said of {kind.__name__}"


def missing_kind(kind: type, models: list[type[Fields]], kinds: list[Kinds], path: str) -> Iterator[str]:
    (key,) = {one.key for one in kinds}
    for word in words(hints(kind).get(key)) or [None]:
        own = [model for model in models if (word or kinds[0].default) in kinds_of(model, key)]
        if own:
            yield from missing(kind, own[0], f"{path}[{word}]")
        elif not any(word in one.refused or word in one.left_out or one.others or one.no_words for one in kinds):
            yield f"{path}[{word}]"


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        (chat_params.CompletionCreateParamsNonStreaming, ChatRequest),
        (chat_params.CompletionCreateParamsStreaming, ChatRequest),
        (completion_create_params.CompletionCreateParamsNonStreaming, CompletionRequest),
        (completion_create_params.CompletionCreateParamsStreaming, CompletionRequest),
        (response_create_params.ResponseCreateParamsNonStreaming, ResponseRequest),
        (response_create_params.ResponseCreateParamsStreaming, ResponseRequest),
        (input_token_count_params.InputTokenCountParams, InputRequest),
        (message_create_params.MessageCreateParamsNonStreaming, MessageRequest),
        (message_create_params.MessageCreateParamsStreaming, MessageRequest),
        (MessageCountTokensParams, CountRequest),
    ],
)
def test_every_field_of_the_official_clients_has_a_fate(kind: type, model: type[Fields]):
    assert sorted(set(missing(kind, model, kind.__name__))) == []


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        (beta_create_params.MessageCreateParamsStreaming, MessageRequest),
        (beta_count_tokens_params.MessageCountTokensParams, CountRequest),
    ],
)
def test_the_betas_of_anthropic_have_one_at_the_top(kind: type, model: type[Fields]):
    assert typing_extensions.get_type_hints(kind).keys() - model.known == set()


# -- every field ---------------------------------------------------------------------------------------

LEAST: dict[type[Fields], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "Hello"}]},
    CompletionRequest: {"prompt": "Once"},
    ResponseRequest: {"input": "Hello"},
    InputRequest: {"input": "Hello"},
    MessageRequest: {"messages": [], "max_tokens": 9},
    CountRequest: {"messages": []},
}
REFUSED = [
    (model, name, note)
    for model in LEAST
    for name, field in model.model_fields.items()
    for note in field.metadata
    if isinstance(note, Refused)
]


@pytest.mark.parametrize(("model", "name", "note"), REFUSED)
def test_what_is_refused_is_named_and_neutral_values_ask_for_nothing(model: type[Fields], name: str, note: Refused):
    for value in ("something", {"type": "something"}):
        with pytest.raises(Problem) as caught:
            read(model, {**LEAST[model], name: value})
        assert (caught.value.status, caught.value.param, caught.value.code) == (400, name, "unsupported_parameter")
        assert str(caught.value) == f"{name} is not supported: {note.why}"
    for neutral in (None, *note.neutral):
        read(model, {**LEAST[model], name: neutral})


def test_reasons_are_clauses():
    for model in fields_page.ROUTES.values():
        for field in model.model_fields.values():
            for note in field.metadata:
                if isinstance(note, Ignored | Refused):
                    assert len(note.why) > 12, note
                    assert not note.why.endswith("."), note


# -- the page ------------------------------------------------------------------------------------------


def test_headings_of_the_page_are_different_and_every_field_is_on_it():
    page = fields_page.page()
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert len(headings) == len(set(headings)) > 40
    for model in fields_page.ROUTES.values():
        assert [name for name in model.known if f"`{name}`" not in page] == []
