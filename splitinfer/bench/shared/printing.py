"""Prints what a mode of the benchmark found: tables, and one line of JSON."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, RenderableType

from splitinfer.core.json_text import dumps
from splitinfer.engine.device.void_steps import MOST_VOID, VOID_STEPS
from splitinfer.machine.selection import emulated_machine


def print_found(
    found: Mapping[str, Any], tables: Iterable[RenderableType], *, as_json: bool, least_width: int = 0
) -> None:
    """Print the tables, unless ``as_json``, then the document on the last line. ``least_width``: columns, at least,
    where there is no terminal. With an emulated accelerator both say how many of its steps were void."""
    out, file = Console(highlight=False), emulated_machine()
    if not as_json:
        out.width = out.width if out.is_terminal else max(out.width, least_width)
        out.print(*tables, *([] if file is None else [_void_note()]), sep="\n")
    accelerator = {} if file is None else {"accelerator": {"machine": file.name, **_void_document()}}
    out.file.write(dumps({**found, **accelerator}) + "\n")


def _void_document() -> dict[str, Any]:
    return {"steps": VOID_STEPS.steps, "void_steps": VOID_STEPS.void, "is_void": VOID_STEPS.are_too_many}


def _void_note() -> str:
    verdict = "so these figures mean nothing" if VOID_STEPS.are_too_many else f"up to {MOST_VOID:.1%} may be"
    return f"emulated: {VOID_STEPS.void:,} of {VOID_STEPS.steps:,} steps were void (computing took longer), {verdict}"
