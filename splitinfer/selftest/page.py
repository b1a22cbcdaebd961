"""The page for a person: what was checked, what came of it in a sentence each, and what to do next. Pure but for rich's
own look at the terminal that it is printed to.
"""

from collections.abc import Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from splitinfer.selftest.checks import Check, Fault, State, exit_code
from splitinfer.selftest.document import CONTAINS, CONTAINS_NOT

_MARKS = {
    State.PASSED: ("✓", "green"),
    State.FAILED: ("✗", "red"),
    State.NOT_APPLICABLE: ("·", "dim"),
    State.NOT_RUN: ("?", "yellow"),
}
_FAULTS = {
    Fault.TOKENS: "wrong tokens",
    Fault.TRANSPORT: "a link on this machine",
    Fault.DEVICE: "the device",
    Fault.MEMORY: "memory or kept KV",
    Fault.WORKER: "the worker or the network to it",
    Fault.SPEED: "a slow link",
    Fault.TIME: "not everything could be tried",
}


def page(checks: Sequence[Check], *, seconds: float, file: str | None) -> Group:
    """The page. ``file``: where the document was written; ``None`` if nowhere."""
    found: list[RenderableType] = []
    for group, members in groupby(checks, key=lambda check: check.group):
        found += [Text(f"\n{group}", style="bold"), _grid(list(members))]
    return Group(*found, Text(""), *(Text(line) for line in closing(checks, seconds=seconds, file=file)))


def _grid(checks: Sequence[Check]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(no_wrap=True)
    grid.add_column()
    for check in checks:
        mark, colour = _MARKS[check.state]
        text = Text(check.sentence)
        if check.state in (State.FAILED, State.NOT_RUN) and check.remedy:
            text.append(f"\n→ {check.remedy}", style="bold" if check.state is State.FAILED else "")
        grid.add_row(Text(mark, style=colour), check.name, text)
    return grid


def closing(checks: Sequence[Check], *, seconds: float, file: str | None) -> list[str]:
    """The last lines: how many checks came out how, what failed first of all, what to do next, what the file has."""
    counts = {state: sum(check.state is state for check in checks) for state in State}
    said = [f"{count} {state}" for state, count in counts.items() if count]
    code = exit_code(checks)
    lines = [f"{', '.join(said)}, in {seconds:.0f} s; exit code {code}" + (f": {_FAULTS[Fault(code)]}" if code else "")]
    lines += _next(checks, code)
    if file is None:
        return [*lines, "To send the figures in, run it again with --json FILE."]
    return [
        *lines,
        f"{file} is to be sent in. It has {CONTAINS}.",
        f"It has no {CONTAINS_NOT}. This page may name some.",
    ]


def _next(checks: Sequence[Check], code: int) -> list[str]:
    if not code:
        return ["Next: splitinfer coord with a layout (docs/two-macs.md); on another Mac, run this with --worker too."]
    worst = next(check for check in checks if check.fault == code)
    return [f"First: {worst.group}{f', {worst.name}' if worst.name else ''}: {worst.remedy or worst.sentence}"]
