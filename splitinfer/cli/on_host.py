"""`splitinfer on-host`: what `up`, `down` and `status` run on the other machines, over ssh. Not for people."""

from typing import Annotated

import typer

from splitinfer.shutdown import shutdown


def on_host(
    mark: Annotated[str, typer.Argument()],
    request: Annotated[str, typer.Argument()],
    program: Annotated[list[str], typer.Argument()],
) -> None:
    """Carry out one request of another machine, and print the answer behind a mark."""
    from splitinfer.engine.versions import own_versions
    from splitinfer.launch.answers import OtherVersion, asked_versions, decode_request, encode
    from splitinfer.launch.on_host import carry_out
    from splitinfer.launch.script import ANSWERED, OTHER_VERSION

    own = own_versions()
    if asked_versions(request) != own:
        typer.echo(f"{mark} {encode(OtherVersion(own))}")
        shutdown.exit(OTHER_VERSION)
    try:
        asked = decode_request(request)
    except ValueError as error:
        typer.echo(f"the request cannot be read: {error}", err=True)
        shutdown.exit(1)
    typer.echo(f"{mark} {encode(carry_out(asked, tuple(program)))}")
    shutdown.exit(ANSWERED)
