"""The table of a comparison, and the page to share: one file, with the document in it. Pure, but for writing."""

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from splitinfer.bench.judge import RIGHT, WRONG, worst
from splitinfer.bench.systems import PIPELINE
from splitinfer.bench.table import number, said, table
from splitinfer.core.json_text import dumps
from splitinfer.errors import ConfigError

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 1.6rem 0 .3rem }
.row { display: grid; grid-template-columns: 14rem 1fr; gap: .6rem; align-items: center; margin: .2rem 0 }
.bar { background: #0072b2; height: 1.1rem; display: inline-block; vertical-align: middle; min-width: 1px }
.other .bar { background: #999 } .why, small { color: #666 }
.wrong { color: #b00020; font-weight: 600 } td, th { text-align: left; padding: .15rem .8rem .15rem 0 }
@media (prefers-color-scheme: dark) { body { background: #161616; color: #eee } .why, small { color: #aaa } }
"""


def tables(found: Mapping[str, Any]) -> list[RenderableType]:
    """The table of the terminal, and what is to be said below it."""
    drawn = table(found, _title(found), _caption(found))
    drawn.add_section()
    drawn.add_row("answers", *(worst(found["verdicts"].get(name, ())) or "not judged" for name in found["systems"]))
    return [drawn]


def _title(found: Mapping[str, Any]) -> str:
    cut, model = " + ".join(map(str, found["cut"])), found["model"]
    where = "workers on this machine" if found["workers_here"] else "workers on other machines"
    return f"{model['model_type']}, {model['layers']} layers cut {cut}, {where}"


def _caption(found: Mapping[str, Any]) -> list[str]:
    """Sentences below the table: limits, what was not measured, what is wrong."""
    on = found["measured_on"]
    lines = [
        "one trial of each" if found["trials"] == 1 else f"medians of at most {found['trials']} trials",
        "`a of b`: b is what the stages' computing alone allows",
        f"answers are judged by {found['judged_by']}",
        *(f"{name}: {_answer(each)}" for name, all_ in found["verdicts"].items() for each in all_ if _is_told(each)),
        *_why_not(found),
        *(f"left out: {each['what']} ({each['why']})" for each in found["left_out"]),
        *said(found, PIPELINE),
        f"{on['processor']}, {on['device']}; {found['took_seconds']:,.0f} s of at most {found['minutes']:g} minutes",
    ]
    return list(dict.fromkeys(lines))


def _is_told(verdict: Mapping[str, Any]) -> bool:
    return bool(verdict["verdict"] != RIGHT)


def _answer(verdict: Mapping[str, Any]) -> str:
    return f"after {verdict['prompt_tokens']:,} tokens {verdict['verdict']}: {verdict['said']}"


def _why_not(found: Mapping[str, Any]) -> list[str]:
    """What each system did not do, and why: once for each reason."""
    labels = {part["name"]: part["label"] for part in found["parts"]}
    lines = []
    for name, cells in found["systems"].items():
        by_reason: dict[str, list[str]] = {}
        for part, cell in cells.items():
            if "why_not" in cell:
                by_reason.setdefault(cell["why_not"], []).append(labels[part])
        for reason, parts in by_reason.items():
            what = "nothing was measured" if len(parts) == len(labels) else f"not measured: {'; '.join(parts)}"
            lines.append(f"{name}: {what} ({reason})")
    return lines


def write_page(found: Mapping[str, Any], path: Path) -> None:
    """Write the page.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(page(found), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {path}: {error.strerror}") from error


def page(found: Mapping[str, Any]) -> str:
    """The page: for each part a bar for each system, and the sentences; the document is in it as JSON."""
    rows = "".join(_plot(found, part) for part in found["parts"])
    said = "".join(f"<li>{html.escape(line)}</li>" for line in _caption(found))
    answers = "".join(
        f"<tr class='{'wrong' if worst(each) == WRONG else ''}'><td>{html.escape(name)}</td>"
        f"<td>{worst(each)}</td><td>{len(each)} answers</td></tr>"
        for name, each in found["verdicts"].items()
    )
    document = dumps(found).replace("<", "\\u003c")
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>splitinfer compared</title><style>{_STYLE}"
        f"</style><h1>{html.escape(_title(found))}</h1><h2>Are the answers right?</h2><table>{answers}</table>"
        f"{rows}<h2>Notes</h2><ul>{said}</ul>"
        f"<script type='application/json' id='document'>{document}</script></html>\n"
    )


def _plot(found: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    """One part's bars; the longest is the largest figure or limit."""
    cells = {name: cells[part["name"]] for name, cells in found["systems"].items() if part["name"] in cells}
    figures = [max(cell["high"], cell["limit"] or 0.0) for cell in cells.values() if "why_not" not in cell]
    if not figures:
        return ""
    better = "more is better" if part["unit"] == "tokens/s" else "less is better"
    bars = "".join(_bar(name, cell, max(figures)) for name, cell in cells.items())
    return f"<h2>{html.escape(part['label'])} <small>{part['unit']}, {better}</small></h2>{bars}"


def _bar(name: str, cell: Mapping[str, Any], longest: float) -> str:
    kind = "row" if name == PIPELINE else "row other"
    if "why_not" in cell:
        return f"<div class='{kind}'><span>{name}</span><span class='why'>{html.escape(cell['why_not'])}</span></div>"
    width = 65 * cell["median"] / longest
    limit = "" if cell["limit"] is None else f" <small>of {number(cell['limit'])} by computing alone</small>"
    return (
        f"<div class='{kind}'><span>{name}</span><span><span class='bar' style='width:{width:.1f}%'></span> "
        f"{number(cell['median'])}{limit}</span></div>"
    )
