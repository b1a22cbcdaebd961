"""Values that are checked when they are made, and go into plain numbers and back: pydantic does all three."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

import pydantic

NotNegative = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, pydantic.Field(ge=1)]
Bytes = Annotated[int, pydantic.Field(ge=0)]


class Numbers:
    """A base for dataclasses of pydantic."""

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """The value as plain numbers and text, for ``from_dict``."""
        found: dict[str, Any] = pydantic.TypeAdapter(type(self)).dump_python(self, mode="json")
        return found

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> Self:
        """The value that ``as_dict`` returned.

        Raises:
            ValueError: a number is missing, unknown or out of its range.
        """
        value: Self = pydantic.TypeAdapter(cls).validate_python(numbers)
        return value


def sentence(error: Exception) -> str:
    """What is wrong with some numbers, in one line: the first mistake and where it is."""
    if not isinstance(error, pydantic.ValidationError):
        return str(error).partition("\n")[0]
    first = error.errors()[0]
    text = first["msg"].removeprefix("Value error, ")
    text = "there is no such key" if first["type"] == "extra_forbidden" else text
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), text[:1].lower() + text[1:])))
