"""Prints what the benchmark found: tables, and one line of JSON; and what it is doing meanwhile."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, RenderableType

from splitinfer.console import errors
from splitinfer.core.json_text import dumps

_WIDTH = 150  # columns, at least, where there is no terminal


def say(text: str) -> None:
    """Print a line to standard error."""
    errors.print(text, soft_wrap=True)


def range_of(figure: Mapping[str, Any], digits: int = 2) -> str:
    """A median with the least and the greatest value."""
    low, median, high = (f"{figure[name]:.{digits}f}" for name in ("low", "median", "high"))
    return f"{median} ({low} to {high})"


def print_found(found: Mapping[str, Any], tables: Iterable[RenderableType]) -> None:
    """Print the tables, then the document on the last line."""
    out = Console(highlight=False)
    out.width = out.width if out.is_terminal else max(out.width, _WIDTH)
    out.print(*tables, sep="\n")
    out.file.write(dumps(found) + "\n")
