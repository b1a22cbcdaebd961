"""What every mode of the benchmark ends with: tables for a person, and one line of JSON for a program."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, RenderableType

from splitinfer.core.json_text import dumps


def print_found(
    found: Mapping[str, Any], tables: Iterable[RenderableType], *, as_json: bool, least_width: int = 0
) -> None:
    """Tables, unless only JSON is wanted, then the document on the last line. ``least_width``: columns where there is
    no terminal to say how many."""
    out = Console(highlight=False)
    if not as_json:
        out.width = out.width if out.is_terminal else max(out.width, least_width)
        out.print(*tables, sep="\n")
    out.file.write(dumps(found) + "\n")
