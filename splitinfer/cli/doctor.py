"""`splitinfer doctor`: reports the abilities of this machine and of a layout's links, and their defects.
`splitinfer selftest`: tests this machine, and a worker elsewhere, before they are used."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitinfer.cli.options import ModelOption, Timeout, Verbose, finite
from splitinfer.cli.running import say

if TYPE_CHECKING:
    from splitinfer.core.layout import Layout as PlainLayout


def doctor(
    layout: Annotated[
        str | None, typer.Option("--layout", help="Also measure the links of this layout; its workers must be running.")
    ] = None,
    model: ModelOption = None,
    connect_timeout: Timeout = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON document.")] = False,
    verbose: Verbose = False,
) -> int:
    """Report problems of this machine, whether RDMA over Thunderbolt can work, and how fast links are."""
    from splitinfer.config import find_layout
    from splitinfer.console import errors
    from splitinfer.discovery.discover import find_stages
    from splitinfer.errors import WorkerUnreachable
    from splitinfer.probes.doctor import show, survey_layout
    from splitinfer.probes.evidence import look

    found: PlainLayout | None = None
    if layout is not None:
        named = find_layout(layout)
        try:
            found = find_stages(named if model is None else named.with_model(model))
        except WorkerUnreachable as error:  # trouble on this machine may be the cause
            say(f"splitinfer: {error}")
    with errors.status("inspecting this machine") as status:
        seen, links = look(found), None  # before links are measured, which starts workers
        if found is not None:
            links = survey_layout(found, connect_timeout, lambda what: status.update(f"measuring {what}"))
    return show(seen, links, as_json=as_json) or int(found is None and layout is not None)


def selftest(
    worker: Annotated[
        str | None,
        typer.Option("--worker", help="Also test a worker that runs elsewhere, such as tcp://mini.local:5577."),
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="That worker's key, which it prints when it starts.")] = None,
    json_file: Annotated[
        Path, typer.Option("--json", help="Write the figures to this file, which holds nothing private.")
    ] = Path("splitinfer-selftest.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Test only the causes of wrong answers.")] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", min=10, callback=finite, help="Time limit for all tests, in seconds.")
    ] = 230.0,
    read: Annotated[
        Path | None, typer.Option("--read", help="Test nothing: print a file of --json that somebody sent.")
    ] = None,
    verbose: Verbose = False,
) -> int:
    """Test this machine in four minutes: tokens, transports, the device, memory. The exit code says what failed."""
    from splitinfer.errors import ConfigError
    from splitinfer.probes.registry import worker_elsewhere
    from splitinfer.probes.selftest import read_report, run_selftest

    if read is not None:
        return read_report(read)
    if worker is None and key is not None:
        raise ConfigError("--key belongs to a worker; give its address with --worker")
    there = None if worker is None else worker_elsewhere(worker, key)
    return run_selftest(there, seconds, quick=quick, file=json_file)
