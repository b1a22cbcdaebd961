"""Reports the figures: a table, then one line of JSON."""

from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from splitinfer.common.json_text import dumps


def report(figures: dict[str, Any], how: str) -> None:
    """Print the table, then the JSON line. ``how``: what was held out."""
    Console().print(figures_table(figures, how))
    typer.echo(dumps({"held_out": how, **figures}))


def figures_table(figures: dict[str, Any], how: str) -> Table:
    table = Table(title=f"held out: {how}", title_justify="left", title_style="")
    table.add_column("model")
    for heading in ("parameters", "nats/token", "bits/byte", "agreement"):
        table.add_column(heading, justify="right")
    for name in ("target", "draft"):
        if row := figures[name]:
            agreement = f"{figures['draft_agreement']:.1%}" if name == "draft" else ""
            nats, bits = f"{row['nats_per_token']:.3f}", f"{row['bits_per_byte']:.3f}"
            table.add_row(name, f"{row['parameters']:,}", nats, bits, agreement)
    return table
