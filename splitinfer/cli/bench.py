"""`splitinfer bench`: a layout beside plain mlx-lm."""

import typer

from splitinfer.bench.options import Options
from splitinfer.cli.options import with_options


@with_options
def bench(options: Options) -> None:
    """Measure speed beside plain mlx-lm on the same work; the last line is one JSON document."""
    if not options.layout:
        raise typer.BadParameter("bench needs a layout: --layout FILE")
    from splitinfer.bench.report import print_found
    from splitinfer.bench.speed import measure, tables

    found = measure(options)
    print_found(found, tables(found))
