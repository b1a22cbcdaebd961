"""The base of all request models: typed values, one sentence for each error, and a rule for fields that no model has:

    refused   it would change the answer (``Fields.refused``): a sentence names it, unless its value asks for nothing
    ignored   the request is carried out without it, and a header names it: `X-Splitinfer-Ignored`

So a client that is newer than this server gets an answer, and learns which fields had no effect. ``null`` asks for
nothing anywhere. Objects of several kinds, such as parts of a message, are told apart by one of their fields
(``Kinds``).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
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
    """Return an error for a validator to raise. ``words``: the sentence after the field's name. ``inside``: the rest of
    the field's path."""
    return PydanticCustomError("wrong", "{words}", {"words": words, "inside": inside, "code": code, "details": details})


def not_a(wanted: str, value: object, *, inside: str = "") -> PydanticCustomError:
    return wrong(f" must be {wanted}, not {value!r:.{_SHOWN}}", inside=inside)


def not_supported(
    why: str, *, value: object = None, inside: str = "", details: Mapping[str, Any] | None = None
) -> PydanticCustomError:
    """Return an error for a field, or a value of it, that is not supported."""
    said = "" if value is None else f" {value!r:.40}"
    return wrong(f"{said} is not supported: {why}", inside=inside, code="unsupported_parameter", details=details)


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


def read(model: type[M], body: Mapping[str, Any], ignored: "Ignored | None" = None) -> M:
    """Return a body as a request. ``ignored``: gets the names of the fields that have no effect.

    Raises:
        Problem: 400, in a sentence that names the field.
    """
    try:
        return model.model_validate(body, context=ignored)
    except ValidationError as error:
        found = error.errors(include_url=False)
    # A wrong field says more than a missing one.
    raise _problem(next((one for one in found if one["type"] != "missing"), found[0]))


def _problem(error: Any) -> Problem:
    name, context, value = _name(error["loc"]), error.get("ctx", {}), error["input"]
    match error["type"]:
        case "wrong":
            param = (name + context["inside"]).removeprefix(".")
            words = f"{param}{context['words']}"
            return Problem(400, words, param=param, code=context["code"], details=context["details"])
        case "missing":
            return Problem(400, f"{name} must be given", param=name)
        case "too_short":
            sentence = f"{name} must not be empty"
        case kind if kind in _MOST:
            most, what = _MOST[kind]
            sentence = f"{name} may have {context[most]:,} {what}, not {len(value):,}"
        case kind:
            wanted = _WANTED.get(kind, "something else").format(**context)
            sentence = f"{name} must be {wanted}, not {value!r:.{_SHOWN}}"
    return Problem(400, sentence, param=name, code="invalid_value")


def _name(place: tuple[str | int, ...]) -> str:
    """Return a field's path as its client would write it. Negative numbers belong to ``Kinds``."""
    name = ""
    for part in place:
        if isinstance(part, str):
            name += f".{part:.{_SHOWN}}" if name else f"{part:.{_SHOWN}}"
        elif part >= 0:
            name += f"[{part}]"
    return name


# -- fields that no model has ------------------------------------------------------------------------


EMPTY: tuple[Any, ...] = ([], {}, "", False)

Ignored = dict[str, None]
"""Names of fields that have no effect, in their order, as a header may hold them."""
_MOST_IGNORED, _MOST_OF_NAME = 32, 40  # names; characters
_NOT_IN_HEADERS = re.compile(r"[^A-Za-z0-9_.-]+")


def _ignore(name: str, ignored: Ignored | None) -> None:
    if ignored is None or len(ignored) >= _MOST_IGNORED:
        return
    if plain := _NOT_IN_HEADERS.sub("", name[: 4 * _MOST_OF_NAME])[:_MOST_OF_NAME]:
        ignored[plain] = None


@dataclass(frozen=True, slots=True)
class RefusedField:
    """A field that would change the answer, and why the server does not support it.

    neutral: values that ask for nothing and are accepted; ``is_neutral`` accepts further ones.
    details: tells a client's program that it can do without the field (``Problem.details``).
    """

    why: str
    neutral: tuple[Any, ...] = ()
    is_neutral: Callable[[Any], bool] = lambda _: False
    details: Mapping[str, Any] | None = None

    def allows(self, value: Any) -> bool:
        return value in self.neutral or self.is_neutral(value)


class Fields(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)
    known: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, RefusedField]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.known = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _of_known_fields(cls, given: Any, info: ValidationInfo) -> Any:
        """Return the fields that ask for something. Fields of no model are refused or ignored."""
        if not isinstance(given, dict):
            return given
        asked = {name: value for name, value in given.items() if value is not None}
        for name in [name for name in asked if name not in cls.known]:
            refused = cls.refused.get(name)
            if refused is None:
                _ignore(name, info.context)
            elif not refused.allows(asked[name]):
                raise not_supported(refused.why, inside=f".{name}", details=refused.details)
        return asked


# -- types -------------------------------------------------------------------------------------------


def _told(value: Any, info: ValidationInfo) -> Any:
    _ignore(str(info.field_name), info.context)
    return value


NoEffect = Annotated[Any, AfterValidator(_told)]
"""Any value. It has no effect, except for a word in the answer, and counts as ignored."""


def one_of(*words: str) -> AfterValidator:
    """Return an annotation for a text that hardly changes an answer. An unknown word counts as the first one, and as
    ignored."""
    return AfterValidator(lambda value, info: value if value in words else (_told(value, info), words[0])[1])


Count = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
CountOrNone = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
TokenId = CountOrNone
Name = Annotated[str, Field(max_length=MOST_NAME)]
T = TypeVar("T")
ListOf = Annotated[list[T], Field(fail_fast=True)]


def in_list(given: Any) -> Any:
    """Return a list, or a text as a list of one."""
    if not isinstance(given, str | list):
        raise not_a("text or a list", given)
    return [given] if isinstance(given, str) else given


def _parts(given: Any) -> Any:
    return [{"type": "text", "text": one} if isinstance(one, str) else one for one in in_list(given)]


Parts = Annotated[list[T], Field(fail_fast=True), BeforeValidator(_parts)]
"""A list of objects, or a text. A text counts as an object of type ``text``, also in the list."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """An annotation for a union of models: tells objects apart by the field ``key``, a ``Literal`` of each model.

    default: the kind of an object without the field.
    left_out: of a kind that no model has, whether it is read as ``None``, so that the others keep their numbers; else
        it is refused. ``why``: of some kinds, what their sentence says in place of the kinds that there are.
    """

    key: str
    default: str | None = None
    left_out: Callable[[str], bool] = lambda _: False
    why: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        models = [one for one in get_args(source) or (source,) if one is not NoneType]
        numbers = {
            kind: i for i, model in enumerate(models) for kind in get_args(model.model_fields[self.key].annotation)
        }
        schemas = [*map(handler.generate_schema, models), core_schema.none_schema()]

        def told_apart(value: Any) -> Any:
            if not isinstance(value, dict):
                raise not_a("an object", value)
            kind = value.get(self.key)
            if kind is None and self.default is not None:
                return {**value, self.key: self.default}
            if isinstance(kind, str) and kind in numbers:
                return value
            return self._not_taken(kind, numbers)

        # Pydantic puts the choice into an error's path; negative numbers mark it, because no list has them.
        choices: dict[Any, CoreSchema] = {-1 - i: schema for i, schema in enumerate(schemas)}
        union = core_schema.tagged_union_schema(
            choices, lambda value: -1 - (len(models) if value is None else numbers[value[self.key]])
        )
        return core_schema.no_info_before_validator_function(told_apart, union)

    def _not_taken(self, kind: Any, taken: Mapping[str, int]) -> None:
        there = ", ".join(taken)
        if not isinstance(kind, str):
            raise not_a(f"one of {there}", kind, inside=f".{self.key}")
        if not self.left_out(kind):
            raise not_supported(self.why.get(kind, f"it may be {there}"), value=kind, inside=f".{self.key}")


@dataclass(frozen=True, slots=True)
class AsGiven:
    """An annotation for a dictionary: check it against ``model``, but keep the client's order, because templates write
    it."""

    model: type[Fields]

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def kept(value: Any, check: Callable[[Any], Any]) -> dict[str, Any]:
            check(value)
            return {name: one for name, one in value.items() if one is not None and name in self.model.known}

        return core_schema.no_info_wrap_validator_function(kept, handler.generate_schema(self.model))
