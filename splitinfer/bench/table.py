"""The table of a measurement: a row for each part, a column for each system. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from splitinfer.bench.figures import summarize
from splitinfer.bench.parts import Cell
from splitinfer.bench.printing import range_of


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
        cells = [shown(each.get(part["name"])) for each in systems.values()]
        last = [range_of(ratios[part["name"]]) if part["name"] in ratios else "-"] if ratios else []
        drawn.add_row(f"{part['label']}, {part['unit']}", *cells, *last)
    return drawn


def said(found: Mapping[str, Any], system: str) -> list[str]:
    """What else there is to say of a system's parts, a sentence each."""
    cells, labels = found["systems"][system], {part["name"]: part["label"] for part in found["parts"]}
    return [f"{label}: {cells[name]['said']}" for name, label in labels.items() if cells.get(name, {}).get("said")]


def shown(cell: Mapping[str, Any] | None) -> str:
    """A figure and its limit, as `a of b`."""
    if cell is None or "why_not" in cell:
        return "-"
    limit = "" if cell["limit"] is None else f" of {number(cell['limit'])}"
    return number(cell["median"]) + limit


def number(value: float) -> str:
    """A figure with three digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
