"""`splitinfer keys`: makes, lists and removes API keys of `splitinfer serve` in a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitinfer.cli.running import say, tell

if TYPE_CHECKING:
    from splitinfer.server.keys import ApiKey

keys_app = typer.Typer(no_args_is_help=True, help="Make, list and remove API keys for `splitinfer serve`.")

_File = Annotated[Path, typer.Option("--file", help="The file of keys; `serve --api-keys` takes it.")]


@keys_app.command("add")
def add(
    name: Annotated[str, typer.Argument(help="Whose key it is.")],
    file: _File,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            "--scope",
            help="metrics (figures only), use (requests) or admin (also serving options); may be repeated. "
            "Default: use.",
        ),
    ] = None,
    requests_per_minute: Annotated[
        float | None, typer.Option("--requests-per-minute", help="No limit if not given.")
    ] = None,
    concurrent: Annotated[
        int | None, typer.Option("--concurrent", help="Answers at a time; no limit if not given.")
    ] = None,
) -> None:
    """Make a key and print it, once: the file keeps its digest only."""
    from splitinfer.errors import ConfigError
    from splitinfer.server.keys import Scope, add_key

    unknown = next((one for one in scope or () if one not in tuple(Scope)), None)
    if unknown is not None:
        raise ConfigError(f"there is no scope {unknown!r}; there are {', '.join(Scope)}")
    secret = add_key(file, name, map(Scope, scope or [Scope.USE]), requests_per_minute, concurrent)
    say(f"key {name!r} is in {file}; this is shown once:")
    typer.echo(secret)


@keys_app.command("ls")
def ls(file: _File) -> None:
    """List whose keys a file has, with their scopes and limits; the file does not hold the keys themselves."""
    from splitinfer.server.keys import read_keys

    found = read_keys(file)
    tell("\n".join(map(_line, found)) or f"{file} has no key")


@keys_app.command("rm")
def rm(name: Annotated[str, typer.Argument(help="Whose key it is.")], file: _File) -> None:
    """Remove a key; running servers refuse it from now on, too."""
    from splitinfer.server.keys import remove_key

    remove_key(file, name)
    say("removed; running servers know it already")


def _line(key: "ApiKey") -> str:
    rate = "any rate" if key.requests_per_minute is None else f"{key.requests_per_minute:g} requests a minute"
    at_a_time = "any number at a time" if key.concurrent is None else f"{key.concurrent} at a time"
    return f"{key.name}: {', '.join(sorted(key.scopes))}; {rate}, {at_a_time}"
