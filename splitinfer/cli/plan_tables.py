"""Shows a plan: this machine beside the best cut, what is best for other aims, what does not fit. Writes the layout
that was asked for."""

import datetime
import shutil
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console

from splitinfer.chat.formatting import comparison
from splitinfer.console import say
from splitinfer.core.json_text import dumps
from splitinfer.core.layout import Layout
from splitinfer.engine.versions import own_versions
from splitinfer.errors import CannotFit
from splitinfer.placement.asked import Aim
from splitinfer.placement.comparison import beside, layout_text
from splitinfer.placement.document import as_dict, name_in_words, shortage, why
from splitinfer.placement.plan import Plan
from splitinfer.places import write

_WIDTH = 120  # columns where there is no terminal


def show(plan: Plan, aim: Aim, base: Layout | None, out: Path | None, *, as_json: bool) -> int:
    """Print a plan, as a table or ``as_json``, and write the layout for ``aim`` to ``out``; the exit code.

    Raises:
        CannotFit: nothing fits for ``aim``.
        ConfigError: the file cannot be written.
    """
    lacking = {each: shortage(plan.profiles, plan.asked, each) for each in Aim if each not in plan.best}
    if as_json:
        typer.echo(dumps(as_dict(plan, lacking)))
    else:
        shown = beside(plan, aim)
        typer.echo(comparison(shown, shutil.get_terminal_size((_WIDTH, 24)).columns) + "\n")
        say(" ".join([shown.sentence, *_reasons(plan, aim)]), Console(highlight=False))
    if aim not in plan.best:
        raise CannotFit(lacking[aim])
    if out is not None:
        today = datetime.datetime.now().astimezone().date()
        origin = f"By splitinfer {own_versions().splitinfer} on {today}."
        write(out, layout_text(plan, plan.best[aim], origin, base))
        typer.echo(f"wrote {out}, the best cut for {aim}", err=True)
    return 0


def _reasons(plan: Plan, aim: Aim) -> Iterator[str]:
    """The best cut, and why; and those for other aims."""
    if len(plan.profiles.machines) == 1 or aim not in plan.best:
        return
    yield f"Best for {aim}: {name_in_words(plan.profiles, plan.best[aim].cut)}."
    yield from why(plan, plan.best[aim])
    for other, best in plan.best.items():
        if best.cut != plan.best[aim].cut:
            yield f"For {other} (--for {other}): {name_in_words(plan.profiles, best.cut)}."
