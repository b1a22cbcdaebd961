"""Values that are checked when they are made, and go into plain numbers and back: pydantic does all three."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

import pydantic

from splitinfer.core.costs.stage import StageCosts

NotNegative = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, pydantic.Field(ge=1)]
Bytes = Annotated[int, pydantic.Field(ge=0)]


def _costs(found: Any) -> StageCosts:
    try:
        return found if isinstance(found, StageCosts) else StageCosts.from_dict(found)
    except (KeyError, TypeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"costs need seconds, decode, chunk and most_rows ({told})") from error


Costs = Annotated[StageCosts, pydantic.PlainValidator(_costs), pydantic.PlainSerializer(StageCosts.as_dict)]


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
