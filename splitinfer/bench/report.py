"""Shows what a benchmark found: a table with a row for each part and a column for each system, sentences below it, one
line of JSON; and the page to share of a comparison."""

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from splitinfer.bench.figures import summarize
from splitinfer.bench.judge import worst
from splitinfer.bench.parts import Cell
from splitinfer.bench.systems import PIPELINE
from splitinfer.core.json_text import dumps
from splitinfer.places import write
from splitinfer.probes.plain import RIGHT

_WIDTH = 150  # columns, at least, where there is no terminal


def print_found(found: Mapping[str, Any], tables: Iterable[RenderableType]) -> None:
    """Print the tables, then the document on the last line."""
    out = Console(highlight=False)
    out.width = out.width if out.is_terminal else max(out.width, _WIDTH)
    out.print(*tables, sep="\n")
    out.file.write(dumps(found) + "\n")


def range_of(figure: Mapping[str, Any], digits: int = 2) -> str:
    """A median with the least and the greatest value."""
    low, median, high = (f"{figure[name]:.{digits}f}" for name in ("low", "median", "high"))
    return f"{median} ({low} to {high})"


def figures_of(cell: Cell) -> dict[str, Any]:
    """A cell in the document."""
    if cell.why_not:
        return {"why_not": cell.why_not}
    return {**summarize(cell.values), "limit": cell.limit, "said": cell.said}


def table(found: Mapping[str, Any], title: str, caption: Sequence[str]) -> Table:
    """The figures of a document, and sentences below them. Where it has ``ratios``, they are the last column."""
    systems, ratios = found["systems"], found.get("ratios")
    drawn = Table(title=title, caption="\n".join(caption), title_justify="left", caption_justify="left")
    for heading in ("", *systems):
        drawn.add_column(heading, justify="right" if heading else "left")
    if ratios:
        drawn.add_column("ratio (least to most)", justify="right")
    for part in found["parts"]:
        cells = [_shown(each.get(part["name"])) for each in systems.values()]
        last = [range_of(ratios[part["name"]]) if part["name"] in ratios else "-"] if ratios else []
        drawn.add_row(f"{part['label']}, {part['unit']}", *cells, *last)
    return drawn


def said(found: Mapping[str, Any], system: str) -> list[str]:
    """What else there is to say of a system's parts, a sentence each."""
    cells, labels = found["systems"][system], {part["name"]: part["label"] for part in found["parts"]}
    return [f"{label}: {cells[name]['said']}" for name, label in labels.items() if cells.get(name, {}).get("said")]


def _shown(cell: Mapping[str, Any] | None) -> str:
    """A figure and its limit, as `a of b`."""
    if cell is None or "why_not" in cell:
        return "-"
    limit = "" if cell["limit"] is None else f" of {_number(cell['limit'])}"
    return _number(cell["median"]) + limit


def _number(value: float) -> str:
    """A figure with three digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# -- a comparison ------------------------------------------------------------------------------------------------------


def tables(found: Mapping[str, Any]) -> list[RenderableType]:
    """The table of a comparison, and what is to be said below it."""
    cut, model = " + ".join(map(str, found["cut"])), found["model"]
    where = "workers on this machine" if found["workers_here"] else "workers on other machines"
    drawn = table(found, f"{model['model_type']}, {model['layers']} layers cut {cut}, {where}", _caption(found))
    drawn.add_section()
    drawn.add_row("answers", *(worst(found["verdicts"].get(name, ())) or "not judged" for name in found["systems"]))
    return [drawn]


def write_page(found: Mapping[str, Any], path: Path) -> None:
    """Write the page to share: the table, and the document in it as JSON.

    Raises:
        ConfigError: it cannot be written.
    """
    console = Console(record=True, file=io.StringIO(), width=_WIDTH)
    console.print(*tables(found), sep="\n")
    document = dumps(found).replace("<", "\\u003c")
    script = f"<script type='application/json' id='document'>{document}</script></body>"
    write(path, console.export_html(inline_styles=True).replace("</body>", script))


def _caption(found: Mapping[str, Any]) -> list[str]:
    """Sentences below the table: limits, what was not measured, what is wrong."""
    on = found["measured_on"]
    lines = [
        "one trial of each" if found["trials"] == 1 else f"medians of at most {found['trials']} trials",
        "`a of b`: b is what the stages' computing alone allows",
        f"answers are judged by {found['judged_by']}",
        *(
            f"{name}: after {each['prompt_tokens']:,} tokens {each['verdict']}: {each['said']}"
            for name, all_ in found["verdicts"].items()
            for each in all_
            if each["verdict"] != RIGHT
        ),
        *_why_not(found),
        *(f"left out: {each['what']} ({each['why']})" for each in found["left_out"]),
        *said(found, PIPELINE),
        f"{on['processor']}, {on['device']}; {found['took_seconds']:,.0f} s of at most {found['minutes']:g} minutes",
    ]
    return list(dict.fromkeys(lines))


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
