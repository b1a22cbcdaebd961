"""`splitinfer selftest`: checks on this machine, and on a worker elsewhere, what has to be right before it is used."""

from pathlib import Path
from typing import Annotated

import typer

from splitinfer.cli.options import Verbose, finite
from splitinfer.cli.running import finish


def selftest(
    worker: Annotated[
        str | None,
        typer.Option("--worker", help="Also test a worker that runs elsewhere, such as tcp://mini.local:5577."),
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="That worker's key, which it prints when it starts.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file, which holds nothing private.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only what could make answers wrong.")] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", min=10, callback=finite, help="At most, for everything.")
    ] = 180.0,
    verbose: Verbose = False,
) -> None:
    """Test this machine in three minutes: tokens, transports, the device, memory. The exit code says what failed."""

    def run() -> int:
        from splitinfer.errors import ConfigError
        from splitinfer.probes.registry import worker_elsewhere
        from splitinfer.probes.selftest import run_selftest

        if worker is None and key is not None:
            raise ConfigError("--key is a worker's: say where that is with --worker")
        there = None if worker is None else worker_elsewhere(worker, key)
        return run_selftest(there, seconds, quick=quick, file=json_file)

    finish(run, verbose)
