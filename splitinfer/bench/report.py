"""Shows a benchmark's results: a table with a row for each part and a column for each system, sentences below it, one
line of JSON."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from splitinfer.bench.figures import summarize
from splitinfer.bench.parts import Cell
from splitinfer.common.json_text import dumps

WIDTH = 150  # the fewest columns without a terminal


def print_found(found: Mapping[str, Any], tables: Iterable[RenderableType]) -> None:
    """Print the tables, then the document on the last line."""
    out = Console(highlight=False)
    out.width = out.width if out.is_terminal else max(out.width, WIDTH)
    out.print(*tables, sep="\n")
    out.file.write(dumps(found) + "\n")


def range_of(figure: Mapping[str, Any]) -> str:
    """Return a median with the lowest and the highest value, as text."""
    low, median, high = (f"{figure[name]:.2f}" for name in ("low", "median", "high"))
    return f"{median} ({low} to {high})"


def figures_of(cell: Cell) -> dict[str, Any]:
    """Return a cell in the document's form."""
    if cell.why_not:
        return {"why_not": cell.why_not}
    return {**summarize(cell.values), "limit": cell.limit, "said": cell.said}


def table(found: Mapping[str, Any], title: str, caption: Sequence[str]) -> Table:
    """Return a table of a document's figures, with ``ratios`` in the last column if it has any, and a caption below."""
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
    """Return the remarks on a system's parts, a sentence each."""
    cells, labels = found["systems"][system], {part["name"]: part["label"] for part in found["parts"]}
    return [f"{label}: {cells[name]['said']}" for name, label in labels.items() if cells.get(name, {}).get("said")]


def _shown(cell: Mapping[str, Any] | None) -> str:
    """Return a figure and its limit, in the form `a of b`."""
    if cell is None or "why_not" in cell:
        return "-"
    limit = "" if cell["limit"] is None else f" of {_number(cell['limit'])}"
    return _number(cell["median"]) + limit


def _number(value: float) -> str:
    """Return a figure with at least three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
