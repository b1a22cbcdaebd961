"""What every model of a request has: fields that are known, values of their types, and one sentence for what is wrong.

No field is ignored in silence. A request is a pydantic model with every field of its API's official client, nested ones
included; `docs/reference/server-fields.md` is written from the models (`scripts/book`). A field is one of three:

    typed      does what the API says
    Ignored    changes nothing, because it could not change an answer here; the page says why
    Refused    with a sentence that names it, unless its value is one that asks for nothing

``null`` asks for nothing anywhere, so that it may be there under any name. Objects of several kinds, such as parts of a
message, are told apart by one of their fields (``Kinds``). Models are made once, when their module is imported.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from splitinfer.server.problem import Problem

MOST_TOKENS = 2**31 - 1  # and the highest id of one
MOST_NAME = 512  # characters; OpenAI takes 64 or 128, other servers take more, and some clients send more
_SHOWN = 60  # characters of a value in a sentence


# -- what is wrong ---------------------------------------------------------------------------------


def wrong(
    words: str, *, inside: str = "", code: str = "invalid_value", details: Mapping[str, Any] | None = None
) -> PydanticCustomError:
    """What a validator raises: the sentence behind the field's name. ``inside``: what the name goes on with."""
    return PydanticCustomError("wrong", "{words}", {"words": words, "inside": inside, "code": code, "details": details})


def not_a(wanted: str, value: object, *, inside: str = "") -> PydanticCustomError:
    return wrong(f" must be {wanted}, not {shown(value)}", inside=inside)


def not_supported(
    why: str, *, value: object = None, inside: str = "", details: Mapping[str, Any] | None = None
) -> PydanticCustomError:
    """A field, or a value of it, is not honoured."""
    said = "" if value is None else f" {value!r:.40}"
    sentence = f"{said} is not supported: {why}"
    return wrong(sentence, inside=inside, code="unsupported_parameter", details=details)


def shown(value: object) -> str:
    return f"{value!r:.{_SHOWN}}"


_WANTED = {
    "string_type": "text",
    "float_type": "a number",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}
"""What a field takes, by pydantic's type of the error."""
_MOST = {"too_long": ("max_length", "entries"), "string_too_long": ("max_length", "characters")}

M = TypeVar("M", bound="Fields")


def read(model: type[M], body: Mapping[str, Any]) -> M:
    """A body as a request.

    Raises:
        Problem: 400, in a sentence that names the field.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        found = error.errors(include_url=False)
    # What is there and wrong says more than what is missing.
    raise _problem(next((one for one in found if one["type"] != "missing"), found[0]))


def _problem(error: Any) -> Problem:
    name, context, value = _name(error["loc"]), error.get("ctx", {}), error["input"]
    match error["type"]:
        case "wrong":
            name += context["inside"]
            param = name.removeprefix(".")
            sentence = context["words"].replace("{name}", f"{param!r:.120}") if "{name}" in context["words"] else None
            words = sentence or f"{param}{context['words']}"
            return Problem(400, words, param=param, code=context["code"], details=context["details"])
        case "missing":
            return Problem(400, f"{name} must be given", param=name)
        case "too_short":
            sentence = f"{name} must not be empty"
        case kind if kind in _MOST:
            most, what = _MOST[kind]
            sentence = f"{name} may have {context[most]:,} {what}, not {len(value):,}"
        case kind:
            sentence = f"{name} must be {_WANTED.get(kind, 'something else').format(**context)}, not {shown(value)}"
    return Problem(400, sentence, param=name, code="invalid_value")


def _name(place: tuple[str | int, ...]) -> str:
    """A field as its client would write it. Negative numbers are of ``_either``."""
    name = ""
    for part in place:
        if isinstance(part, str):
            name += f".{part:.{_SHOWN}}" if name else f"{part:.{_SHOWN}}"
        elif part >= 0:
            name += f"[{part}]"
    return name


# -- models and types ------------------------------------------------------------------------------


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    known: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.known = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _of_known_fields(cls, given: Any) -> Any:
        """The fields that ask for something; one alone is named of those that nobody knows, however many there are."""
        if not isinstance(given, dict):
            return given
        asked = without_nulls(given)
        if not asked.keys() <= cls.known:
            unknown = next(name for name in asked if name not in cls.known)
            raise wrong(
                f"there is no field {{name}} here{_meant(unknown, cls.known)}",
                inside=f".{unknown:.{_SHOWN}}",
                code="unknown_parameter",
            )
        return asked


def without_nulls(given: dict[str, Any]) -> dict[str, Any]:
    """An object without what asks for nothing."""
    return {name: value for name, value in given.items() if value is not None} if None in given.values() else given


def _meant(name: str, known: frozenset[str]) -> str:
    near = get_close_matches(name[:_SHOWN], sorted(known), n=1, cutoff=0.75)
    return f"; did you mean {near[0]!r}?" if near else ""


Count = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
CountOrNone = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
TokenId = CountOrNone
Name = Annotated[str, Field(max_length=MOST_NAME)]


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field that changes nothing here, and why that is right. ``most``: characters of a text in it."""

    why: str
    most: int | None = None

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return (
            core_schema.any_schema() if self.most is None else core_schema.no_info_plain_validator_function(self._short)
        )

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        bound = {} if self.most is None else {"maxLength": self.most}
        return {"description": f"Ignored: {self.why}", **bound}

    def _short(self, value: Any) -> Any:
        if self.most is not None and isinstance(value, str) and len(value) > self.most:
            raise wrong(f" may have {self.most:,} characters, not {len(value):,}")
        return value


@dataclass(frozen=True, slots=True, eq=False)  # `Annotated` would take one of two whose values are 0 and False for both
class Refused:
    """A field that is refused, and why. ``neutral``: values that ask for nothing, so that they may be there.
    ``is_neutral`` knows others, which are ``said``. ``details``: by which a client finds out that it can do without
    (``Problem.details``)."""

    why: str
    neutral: tuple[Any, ...] = ()
    is_neutral: Callable[[Any], bool] = lambda _: False
    said: str = ""
    details: Mapping[str, Any] | None = None

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        values = (
            {"enum": list(self.neutral)} if self.neutral else {"enum": [json.loads(self.said)]} if self.said else {}
        )
        return {"description": f"Refused: {self.why}", **values}

    def _check(self, value: Any) -> Any:
        if any(type(value) is type(one) and value == one for one in self.neutral) or self.is_neutral(value):
            return value
        raise not_supported(self.why, details=self.details)


EMPTY: tuple[Any, ...] = ([], {}, "")


@dataclass(frozen=True, slots=True)
class Second:
    """On ``A | B``: a ``kind`` is read as ``B`` and anything else as ``A``, so that an error is of one of them."""

    kind: type

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _either(list(map(handler.generate_schema, get_args(source))), lambda value: isinstance(value, self.kind))


T = TypeVar("T")
Several = Annotated[list[T], Field(fail_fast=True)]
TextOrSeveral = Annotated[str | Several[T], Second(list)]


@dataclass(frozen=True, slots=True)
class Kinds:
    """On a union of models: tells objects apart by the field ``key``. A text among the union's types is taken, too.

    default: the kind of an object without the field.
    refused: why kinds are.
    left_out: why kinds are; such an object is read as ``None``, so that the others keep their numbers.
    others: why all other kinds are left out, if they are.
    words: texts that may stand for an object; ``no_words``: why other texts, and other kinds, are refused.
    """

    key: str
    default: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict, hash=False)
    left_out: Mapping[str, str] = field(default_factory=dict, hash=False)
    others: str = ""
    words: tuple[str, ...] = ()
    no_words: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        types = [one for one in get_args(source) or (source,) if not get_args(one) and one is not NoneType]
        texts = [core_schema.str_schema()] if str in types or self.words else []
        models = [one for one in types if one is not str]
        numbers = {kind: i for i, model in enumerate(models) for kind in kinds_of(model, self.key)}
        schemas = [*map(handler.generate_schema, models), core_schema.none_schema(), *texts]

        def number(value: Any) -> int:
            if isinstance(value, dict):
                return numbers[value[self.key]]
            return len(models) + (value is not None)

        def told_apart(value: Any) -> Any:
            if isinstance(value, str) and texts:
                return self._word(value)
            if not isinstance(value, dict):
                raise not_a("an object", value)
            kind = value.get(self.key)
            if kind is None and self.default is not None:
                return {**value, self.key: self.default}
            if isinstance(kind, str) and kind in numbers:
                return value
            return self._not_taken(kind, numbers)

        return core_schema.no_info_before_validator_function(told_apart, _either(schemas, number))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        found = handler(schema["schema"]) if "schema" in schema else handler(schema)
        notes = {"default": self.default, "refused": dict(self.refused), "left_out": dict(self.left_out)}
        more = {"others": self.others, "no_words": self.no_words, "words": list(self.words)}
        return {**found, "kinds": {name: value for name, value in {"key": self.key, **notes, **more}.items() if value}}

    def _word(self, value: str) -> str:
        if self.words and value not in self.words:
            raise not_supported(self.no_words, value=value)
        return value

    def _not_taken(self, kind: Any, taken: Mapping[str, int]) -> None:
        if isinstance(kind, str):
            if why := self.refused.get(kind, self.no_words):
                raise not_supported(why, value=kind, inside=f".{self.key}")
            if self.others or kind in self.left_out:
                return
        raise not_a(f"one of {', '.join(taken)}", kind, inside=f".{self.key}")


@dataclass(frozen=True, slots=True)
class AsGiven:
    """On a dictionary: it is one of ``model``, and kept as the client gave it. Templates write its fields in order."""

    model: type[Fields]

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def kept(value: Any, check: Callable[[Any], Any]) -> dict[str, Any]:
            check(value)
            return without_nulls(value)

        return core_schema.no_info_wrap_validator_function(kept, handler.generate_schema(self.model))


def kinds_of(model: type[BaseModel], key: str) -> Iterator[str]:
    """The words by which a model is told apart from others."""
    yield from get_args(model.model_fields[key].annotation)


def _either(schemas: list[CoreSchema], number: Callable[[Any], int]) -> CoreSchema:
    """One of several types. Pydantic names the type in an error's place; by negative numbers, which no list has."""
    choices: dict[Any, CoreSchema] = {-1 - i: schema for i, schema in enumerate(schemas)}
    return core_schema.tagged_union_schema(choices, lambda value: -1 - number(value))
