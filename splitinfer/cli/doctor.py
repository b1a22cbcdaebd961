"""`splitinfer doctor`: reports what this machine and a layout's links offer, and what is missing."""

from typing import TYPE_CHECKING, Annotated

import typer

from splitinfer.cli.options import ModelOption, Timeout, Verbose
from splitinfer.cli.running import finish, say

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
) -> None:
    """Report what is wrong with this machine, whether RDMA over Thunderbolt can work, and how fast links are."""

    def run() -> int:
        from splitinfer.config import find_layout
        from splitinfer.console import errors
        from splitinfer.discovery.discover import find_stages
        from splitinfer.errors import WorkerUnreachable
        from splitinfer.probes.doctor import inspect, show

        found: PlainLayout | None = None if layout is None else find_layout(layout)
        if found is not None and model is not None:
            found = found.with_model(model)
        is_missing = False
        if found is not None:
            try:
                found = find_stages(found)
            except WorkerUnreachable as error:  # what is wrong with this machine may be why
                say(f"splitinfer: {error}")
                found, is_missing = None, True
        with errors.status("inspecting this machine") as status:
            report = inspect(found, connect_timeout, lambda what: status.update(f"measuring {what}"))
        return show(report, as_json=as_json) or int(is_missing)

    finish(run, verbose)
