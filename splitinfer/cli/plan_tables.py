"""Shows a plan: the best cuts side by side, why, and what does not fit. Writes the layout that was asked for."""

import datetime
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from splitinfer.core.json_text import dumps
from splitinfer.core.layout import Layout
from splitinfer.engine.versions import own_versions
from splitinfer.errors import CannotFit
from splitinfer.placement.asked import Aim
from splitinfer.placement.document import as_dict, layout_text, name_in_words, shortage, why
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
        console = Console(highlight=False)
        console.width = console.width if console.is_terminal else max(console.width, _WIDTH)
        console.print(*([_table(plan)] if plan.best else []), *_reasons(plan), *lacking.values(), sep="\n")
    if aim not in plan.best:
        raise CannotFit(lacking[aim])
    if out is not None:
        today = datetime.datetime.now().astimezone().date()
        origin = f"By splitinfer {own_versions().splitinfer} on {today}."
        write(out, layout_text(plan, plan.best[aim], origin, base))
        typer.echo(f"wrote {out}, the best cut for {aim}", err=True)
    return 0


def _table(plan: Plan) -> Table:
    title = f"{plan.profiles.model.name}: {plan.profiles.model.num_layers} layers; {plan.tried:,} cuts"
    table = Table("", *(f"best for {aim}" for aim in plan.best), title=title, title_justify="left")
    for row in _rows(plan):
        table.add_row(*row)
    if plan.asked.acceptance is not None:
        table.caption, table.caption_justify = f"{plan.asked.acceptance:.0%} of drafts are accepted", "left"
    return table


def _rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    asked, best = plan.asked, list(plan.best.values())
    figures = [each.figures for each in best]
    yield "layers", *(name_in_words(plan.profiles, each.cut) for each in best)
    yield "tokens/s of one stream", *(f"{each.one:.3g}" for each in figures)
    yield f"tokens/s of {asked.streams} streams", *(f"{each.many:.3g}" for each in figures)
    if asked.acceptance is not None:
        yield "one stream, with drafts", *(f"{each.one_with_drafts:.3g}" for each in figures)
        yield f"{asked.streams} streams, with drafts", *(f"{each.many_with_drafts:.3g}" for each in figures)
    yield "first token of 4,096", *(f"{each.ttft:.3g} s" for each in figures)
    yield f"{asked.prompt:,} tokens and an answer of {asked.answer:,}", *(f"{each.turn:.3g} s" for each in figures)
    yield "longest context", *(f"{each.longest:,}" for each in figures)


def _reasons(plan: Plan) -> list[str]:
    return [f"{best.aim}: {' '.join(why(plan, best))}" for best in plan.best.values()]
