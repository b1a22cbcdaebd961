"""`splitinfer discover`: lists the workers in this machine's networks, or says what to do without any."""

import json
from typing import Annotated

import typer

from splitinfer.cli.options import Verbose, finite
from splitinfer.cli.running import show_table, tell


def discover(
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, max=600, callback=finite, help="How long to look.")
    ] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
    verbose: Verbose = False,
) -> int:
    """List the workers that announce themselves in this machine's networks, and the ways to them."""
    from splitinfer.console import errors
    from splitinfer.discovery import report
    from splitinfer.discovery.discover import discover as look_around
    from splitinfer.engine.versions import own_versions
    from splitinfer.keyring import Keyring

    with errors.status("looking for workers"):
        keyring = Keyring()
        look, found = look_around(seconds, keyring.known(), own_versions(), keyring.own().public)
    if as_json:
        typer.echo(json.dumps(report.as_json(look, found), indent=2))
        return 0 if found else 1
    if found:
        show_table(report.COLUMNS, list(report.rows(found)))
    for note in report.notes(look, found):
        tell(note)
    return 0 if found else 1
