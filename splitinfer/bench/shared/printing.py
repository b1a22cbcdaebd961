"""Prints what a mode of the benchmark found: tables, and one line of JSON; and what it is doing meanwhile."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, RenderableType

from splitinfer.console import errors
from splitinfer.core.json_text import dumps
from splitinfer.engine.device.late_steps import LATE_STEPS, MOST_LATE
from splitinfer.machine.selection import emulated_machine


def say(text: str) -> None:
    """Print a line to standard error."""
    errors.print(text, soft_wrap=True)


def range_of(figure: Mapping[str, Any], digits: int = 2) -> str:
    """A median with the least and the greatest value."""
    low, median, high = (f"{figure[name]:.{digits}f}" for name in ("low", "median", "high"))
    return f"{median} ({low} to {high})"


def print_found(
    found: Mapping[str, Any], tables: Iterable[RenderableType], *, as_json: bool, least_width: int = 0
) -> None:
    """Print the tables, unless ``as_json``, then the document on the last line. ``least_width``: columns, at least,
    where there is no terminal. With an emulated accelerator both say how many of its steps were late."""
    out, file = Console(highlight=False), emulated_machine()
    if not as_json:
        out.width = out.width if out.is_terminal else max(out.width, least_width)
        out.print(*tables, *([] if file is None else [_late_note()]), sep="\n")
    accelerator = {} if file is None else {"accelerator": {"machine": file.name, **_late_document()}}
    out.file.write(dumps({**found, **accelerator}) + "\n")


def _late_document() -> dict[str, Any]:
    return {"steps": LATE_STEPS.steps, "late_steps": LATE_STEPS.late, "are_too_many": LATE_STEPS.are_too_many}


def _late_note() -> str:
    verdict = "so these figures mean nothing" if LATE_STEPS.are_too_many else f"up to {MOST_LATE:.1%} may be"
    return f"emulated: {LATE_STEPS.late:,} of {LATE_STEPS.steps:,} steps were late (computing took longer), {verdict}"
