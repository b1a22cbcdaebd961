"""The table of a comparison, and the page to share."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from scripts.comparing.judge import worst
from splitinfer.bench.report import WIDTH, said, table
from splitinfer.bench.systems import PIPELINE
from splitinfer.common.json_text import dumps
from splitinfer.places import write
from splitinfer.probes.plain import RIGHT


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
    console = Console(record=True, file=io.StringIO(), width=WIDTH)
    console.print(*tables(found), sep="\n")
    document = dumps(found).replace("<", "\\u003c")
    script = f"<script type='application/json' id='document'>{document}</script></body>"
    write(path, console.export_html(inline_styles=True).replace("</body>", script))


def _caption(found: Mapping[str, Any]) -> list[str]:
    """Sentences below the table: limits, what was not measured, what is wrong."""
    on = found["measured_on"]
    lines = [
        "one trial of each" if found["trials"] == 1 else f"medians of at most {found['trials']} trials",
        "`a of b`: b is the limit set by the stages' computing alone",
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
