"""`splitinfer bench`: the measurement that ``--mode`` chooses."""

from importlib import import_module
from typing import Any

import typer

from splitinfer.bench.options import Mode, Options
from splitinfer.cli.options import with_options


@with_options
def bench(options: Options) -> None:
    """Measure speed beside plain mlx-lm on the same work; the last line is one JSON document."""
    if not options.layout and options.mode is not Mode.LINK:
        raise typer.BadParameter(f"--mode {options.mode} needs a layout: --layout FILE")
    if options.mode is not Mode.LINK:  # links do not compute
        from splitinfer.bench.machine import prefer_openblas

        prefer_openblas()  # may start this program anew, so before anything else
    from splitinfer.bench.report import print_found

    module: Any = import_module(f"splitinfer.bench.{options.mode}")
    found = module.measure(options)
    print_found(found, module.tables(found))
