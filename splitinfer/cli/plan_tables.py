"""Shows a plan: this machine beside the best cut, the best cuts for other aims, and cuts that do not fit. Writes the
layout to a file on request."""

import datetime
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from splitinfer.chat.formatting import comparison
from splitinfer.cli.running import say
from splitinfer.common.json_text import dumps
from splitinfer.common.plain_text import wrapped
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
        width = shutil.get_terminal_size((_WIDTH, 24)).columns
        typer.echo(comparison(shown, width) + "\n")
        text = " ".join([shown.sentence, *_reasons(plan, aim)])
        typer.echo(wrapped(text, width) if sys.stdout.isatty() else text)
    if aim not in plan.best:
        raise CannotFit(lacking[aim])
    if out is not None:
        today = datetime.datetime.now().astimezone().date()
        origin = f"By splitinfer {own_versions().splitinfer} on {today}."
        write(out, layout_text(plan, plan.best[aim], origin, base))
        say(f"wrote {out}, the best cut for {aim}")
    return 0


def _reasons(plan: Plan, aim: Aim) -> Iterator[str]:
    """Yield the best cut, and why; and those for other aims."""
    if len(plan.profiles.machines) == 1 or aim not in plan.best:
        return
    yield f"Best for {aim}: {name_in_words(plan.profiles, plan.best[aim].cut)}."
    yield from why(plan, plan.best[aim])
    for other, best in plan.best.items():
        if best.cut != plan.best[aim].cut:
            yield f"For {other} (--for {other}): {name_in_words(plan.profiles, best.cut)}."
