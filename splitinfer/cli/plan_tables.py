"""Shows a plan: the best cuts side by side, why, and what does not fit. Writes the layout that was asked for."""

import datetime
from collections.abc import Callable
from pathlib import Path

import typer
from rich.table import Table

from splitinfer.bench.shared.printing import print_found
from splitinfer.core.layout import Layout
from splitinfer.engine.versions import own_versions
from splitinfer.errors import CannotFit, ConfigError
from splitinfer.placement.asked import Aim
from splitinfer.placement.document import Origin, as_dict, layout_text
from splitinfer.placement.plan import Best, Plan
from splitinfer.placement.remedies import shortage
from splitinfer.placement.words import name_in_words, shortage_in_words, why

_WIDTH = 120
_Cell = Callable[[Best], str]


def show(plan: Plan, aim: Aim, base: Layout | None, out: Path | None, profiles: str, *, as_json: bool) -> int:
    """Print a plan, and write the layout for ``aim`` to ``out``; the exit code.

    Raises:
        CannotFit: nothing fits for ``aim``.
        ConfigError: the file cannot be written.
    """
    origin = Origin(datetime.datetime.now().astimezone().date().isoformat(), own_versions().splitinfer, profiles)
    lacking = {
        each: shortage_in_words(shortage(plan.profiles, plan.asked, each), plan.asked)
        for each in Aim
        if each not in plan.best
    }
    tables = [_table(plan)] if plan.best else []
    notes = [*_reasons(plan), *(" ".join(lines) for lines in lacking.values())]
    print_found(as_dict(plan, lacking, origin), [*tables, *notes], as_json=as_json, least_width=_WIDTH)
    if aim not in plan.best:
        raise CannotFit(" ".join(lacking[aim]))
    if out is not None:
        _write(out, layout_text(plan, plan.best[aim], origin, base))
        typer.echo(f"wrote {out}, the best for {aim}", err=True)
    return 0


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from error


def _table(plan: Plan) -> Table:
    asked, best = plan.asked, list(plan.best.values())
    title = (
        f"{plan.profiles.model.name}: {plan.profiles.model.num_layers} layers; "
        f"{plan.screened:,} cuts screened, {plan.simulated:,} simulated"
    )
    table = Table("", *(f"best for {each.aim}" for each in best), title=title, title_justify="left")
    for label, cell in _rows(plan):
        table.add_row(label, *(cell(each) for each in best))
    if asked.acceptance is not None:
        table.caption, table.caption_justify = f"drafts: {asked.acceptance:.0%} are right", "left"
    return table


def _rows(plan: Plan) -> list[tuple[str, _Cell]]:
    asked = plan.asked
    rows: list[tuple[str, _Cell]] = [
        ("layers", lambda best: name_in_words(plan, best.cut)),
        ("tokens/s of one stream", lambda best: _number(best.figures.one)),
        (f"tokens/s of {asked.streams} streams", lambda best: _number(best.figures.many)),
    ]
    if asked.acceptance is not None:
        rows += [
            ("one stream, with drafts", lambda best: _number(best.figures.one_with_drafts)),
            (f"{asked.streams} streams, with drafts", lambda best: _number(best.figures.many_with_drafts)),
        ]
    return [
        *rows,
        ("first token of 4,096", lambda best: f"{_number(best.figures.ttft)} s"),
        (f"{asked.prompt:,} tokens and an answer of {asked.answer:,}", lambda best: f"{_number(best.figures.turn)} s"),
        ("longest context", lambda best: f"{best.figures.longest:,}"),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _reasons(plan: Plan) -> list[str]:
    return [f"{best.aim}: {' '.join(why(plan, best))}" for best in plan.best.values()]
