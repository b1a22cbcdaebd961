"""What becomes of each field of an API's request: honoured, refused, or ignored.

No field is ignored in silence. An API has a table of all fields of its official client's types, and this page of
documentation is made of it (`docs/server-fields.md`); a field that is in no table is refused by name.

    HONOURED   does what the API says
    ignored    changes nothing, because it could not change an answer here; the table says why
    refused    with a sentence that names it, unless its value is one that asks for nothing
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from splitinfer.server.problem import Problem, unsupported


@dataclass(frozen=True, slots=True)
class Honoured:
    """A field that does what the API says. ``note``: where that is less than the whole."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field that changes nothing here, and why that is right."""

    why: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is refused, and why. ``asks_nothing``: whether a value asks for nothing, so that it may be there.
    ``details``: by which a client finds out that it can do without (``Problem.details``)."""

    why: str
    asks_nothing: Callable[[Any], bool] = lambda value: value is None
    details: Mapping[str, Any] | None = None


HONOURED = Honoured()
Treatment = Honoured | Ignored | Refused


def is_one_of(*values: Any) -> Callable[[Any], bool]:
    """Whether a value asks for nothing: it is ``None``, or one of these."""
    return lambda value: value is None or any(type(value) is type(one) and value == one for one in values)


def is_empty(value: Any) -> bool:
    """Whether a value asks for nothing: it is ``None``, or an empty list or object."""
    return value is None or value in ([], {}, "")


def honoured(body: Mapping[str, Any], fields: Mapping[str, Treatment]) -> dict[str, Any]:
    """The fields of a request that are honoured, without those that are null.

    Raises:
        Problem: 400, a field is refused, or is none of this API.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        match fields.get(name):
            case None:
                raise Problem(400, f"there is no field {name!r:.60} here", param=name, code="unknown_parameter")
            case Refused(why, asks_nothing, details) if not asks_nothing(value):
                raise unsupported(name, why, details=details)
            case Honoured() if value is not None:
                kept[name] = value
    return kept
