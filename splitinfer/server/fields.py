"""What becomes of each field of an API's request: honoured, refused, or ignored.

No field is ignored in silence. An API has a table of all fields of its official client's types, nested ones included,
and the tables are what requests are read by; `docs/server-fields.md` is made of them (`field_page`). A field that is in
no table is refused by name.

    Honoured   does what the API says
    Ignored    changes nothing, because it could not change an answer here; the table says why
    Refused    with a sentence that names it, unless its value is one that asks for nothing

``null`` asks for nothing anywhere, so that it may be there under any name. Objects of several kinds, such as parts of a
message, are told apart by one of their fields (`Kinds`); of a kind that is ignored, the object is left out.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from splitinfer.server import values
from splitinfer.server.problem import Problem, unsupported


@dataclass(frozen=True, slots=True)
class Object:
    """The fields of an object. ``title``: its heading in the documentation."""

    title: str
    fields: Mapping[str, "Treatment"]


@dataclass(frozen=True, slots=True)
class Kinds:
    """Objects of several kinds. ``key``: the field that tells them apart. ``default``: the kind of one without it.
    ``others``: what becomes of kinds that are not named; ``None``: they are refused, with the names of those that are
    taken."""

    title: str
    key: str
    members: Mapping[str, "Treatment"]
    default: str | None = None
    others: "Ignored | None" = None


Form = Object | Kinds


@dataclass(frozen=True, slots=True)
class Honoured:
    """A field that does what the API says. ``note``: where that is less than the whole. ``inside``: the form of the
    object in it. ``each``: the form of each object of the list in it. ``size``: the most of it."""

    note: str = ""
    inside: Form | None = None
    each: Form | None = None
    size: "Size | None" = None


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field that changes nothing here, and why that is right. ``size``: the most of it."""

    why: str
    size: "Size | None" = None


@dataclass(frozen=True, slots=True)
class Size:
    """The most that a field may hold; ``None``: any number. ``entries``: of a list or an object. ``characters``: of a
    text, or of each text in an object. ``names``: characters of each name in an object."""

    entries: int | None = None
    characters: int | None = None
    names: int | None = None

    def check(self, name: str, value: Any) -> None:
        """Refuse a value that is larger, before anybody goes through it. What has another type is left as it is.

        Raises:
            Problem: 400, with the numbers.
        """
        if isinstance(value, str):
            _check_size(name, len(value), self.characters, "characters")
        elif isinstance(value, list | dict):
            _check_size(name, len(value), self.entries, "entries")
        if isinstance(value, dict) and self.names is not None:
            for key, each in value.items():
                _check_size(f"a name in {name}", len(key), self.names, "characters", name)
                if isinstance(each, str):
                    _check_size(f"{name}.{key}", len(each), self.characters, "characters")

    def __str__(self) -> str:
        """For the documentation."""
        each = "characters" if self.names is None else "characters a value"
        bounds = ((self.entries, "entries"), (self.names, "characters a name"), (self.characters, each))
        return "at most " + ", ".join(f"{most:,} {what}" for most, what in bounds if most is not None)


def _check_size(name: str, size: int, most: int | None, what: str, param: str | None = None) -> None:
    if most is not None and size > most:
        raise Problem(400, f"{name} may have {most:,} {what}, not {size:,}", param=param or name, code="invalid_value")


@dataclass(frozen=True, slots=True)
class Values:
    """Values that ask for nothing: ``null``, and these. ``shown``: others, in words; ``matches`` knows them."""

    values: tuple[Any, ...] = ()
    shown: str = ""
    matches: Callable[[Any], bool] = field(default=lambda _: False, compare=False)

    def __call__(self, value: Any) -> bool:
        """Whether a value is one of them."""
        same = (type(value) is type(one) and value == one for one in self.values)
        return value is None or any(same) or self.matches(value)

    def __str__(self) -> str:
        """For the documentation; empty if there is only ``null``."""
        return self.shown or " or ".join(f"`{json.dumps(one)}`" for one in self.values)


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is refused, and why. ``asks_nothing``: values that ask for nothing, so that they may be there.
    ``details``: by which a client finds out that it can do without (``Problem.details``)."""

    why: str
    asks_nothing: Values = Values()
    details: Mapping[str, Any] | None = None


HONOURED = Honoured()
Treatment = Honoured | Ignored | Refused

is_empty = Values(([], {}, ""), "empty")


def is_one_of(*asking_nothing: Any) -> Values:
    """The values that ask for nothing: ``None``, and these."""
    return Values(asking_nothing)


LEFT_OUT: Any = object()
"""Stands in a list for an object of a kind that is left out, so that the others keep their numbers."""


def honoured(body: Mapping[str, Any], fields: Mapping[str, Treatment], inside: str = "") -> dict[str, Any]:
    """The fields of a request that are honoured, without those that are null; the same of all objects inside.

    Of kinds that have a default, objects have it written out. What has another type than its field takes is left as it
    is, for whoever reads the value. ``inside``: the name of the object.

    Raises:
        Problem: 400, a field is refused, or is none of this API.
    """
    kept: dict[str, Any] = {}
    for key, value in body.items():
        if value is None:
            continue
        name = f"{inside}.{key:.60}" if inside else key
        match fields.get(key):
            case None:
                raise Problem(400, f"there is no field {name!r:.120} here", param=name, code="unknown_parameter")
            case Refused(why, asks_nothing, details) if not asks_nothing(value):
                raise unsupported(name, why, details=details)
            case Ignored(size=Size() as size):
                size.check(name, value)
            case Honoured(inside=form, each=each, size=size):
                if size is not None:
                    size.check(name, value)
                found = _honoured_inside(name, value, form, each)
                if found is not LEFT_OUT:
                    kept[key] = found
    return kept


def _honoured_inside(name: str, value: Any, form: Form | None, each: Form | None) -> Any:
    """What is honoured of an object, or of the objects of a list."""
    if form is not None and isinstance(value, dict):
        return honoured_object(name, value, form)
    if each is None or not isinstance(value, list):
        return value
    return [honoured_object(f"{name}[{i}]", v, each) if isinstance(v, dict) else v for i, v in enumerate(value)]


def honoured_object(name: str, given: Mapping[str, Any], form: Form) -> Any:
    """What is honoured of one object; ``LEFT_OUT`` if it is of a kind that is.

    Raises:
        Problem: 400, as ``honoured``.
    """
    if isinstance(form, Object):
        return honoured(given, form.fields, name)
    kind = given.get(form.key)
    kind = form.default if kind is None else kind
    match form.members.get(kind, form.others) if isinstance(kind, str) else None:
        case Honoured(inside=inner):
            found = {**given, form.key: kind}
            return found if inner is None else honoured_object(name, found, inner)
        case Ignored():
            return LEFT_OUT
        case Refused(why):
            raise unsupported(f"{name}.{form.key}", why, kind)
    raise values.wrong(f"{name}.{form.key}", f"one of {', '.join(_taken(form))}", kind)


def _taken(form: Kinds) -> list[str]:
    return [kind for kind, treatment in form.members.items() if isinstance(treatment, Honoured)]
