"""`splitinfer service`: has the system start a worker and keep it running.

`install` takes the options of `splitinfer worker` and writes them down.
"""

from dataclasses import replace
from typing import Annotated, Any

import typer

from splitinfer.cli.options import WorkerOptions, with_options, words_of
from splitinfer.cli.running import say, tell
from splitinfer.common.endpoint import is_loopback
from splitinfer.service.definition import NAME, Definition, absolute, carried

_ALWAYS = ("host", "port")  # written down also where they are not given
_FOLDERS = ("model", "kv_dir", "models_dir")  # they become absolute: a service runs in another folder

service_app = typer.Typer(no_args_is_help=True, help="Let the system start a worker and keep it running.")


@service_app.command("install")
@with_options
def install(
    options: WorkerOptions,
    force: Annotated[bool, typer.Option("--force", help="Replace what is installed, and start it anew.")] = False,
) -> None:
    """Run `splitinfer worker` from now on, and whenever you log in."""
    from splitinfer.service import actions
    from splitinfer.service.definition import find_executable, here

    if options.port == 0:
        raise typer.BadParameter("a service needs a port of its own: coordinators must find it again")
    paths: dict[str, Any] = {name: path and absolute(path) for name in _FOLDERS for path in [getattr(options, name)]}
    words, place = (NAME, *words_of(replace(options, **paths), _ALWAYS)), here()
    actions.refuse_root(place)
    manager = actions.manager_of(place)
    definition = Definition((find_executable(), *words), carried(place.environment))
    if not actions.install(definition, manager, place, force=force):
        say(f"the {NAME} runs already, with these options; --force starts it anew")
        return
    say(f"the {NAME} runs; its log: {manager.log}")
    for sentence in (*_reach(options), *manager.advice()):
        say(f"note: {sentence}")


def _reach(options: WorkerOptions) -> list[str]:
    """Return what a person should know about who can reach it."""
    if is_loopback(options.host):
        return ["it listens on this machine only; with --host 0.0.0.0 other machines reach it"]
    if options.insecure:
        return ["--insecure: anyone who can reach its port can use it, and read what crosses the link"]
    return []


@service_app.command("status")
def status() -> int:
    """Print the installed service, whether it runs, how it ended last, and the end of its log."""
    from splitinfer.service.actions import manager_of
    from splitinfer.service.actions import status as look
    from splitinfer.service.definition import here

    place = here()
    state, is_installed, lines = look(manager_of(place), place)
    tell("\n".join(lines))
    return 0 if is_installed and state.is_running else 1


@service_app.command("remove")
def remove() -> None:
    """Stop the service and remove it; its log, keys, models and stored KV stay."""
    from splitinfer.service.actions import manager_of
    from splitinfer.service.actions import remove as take_away
    from splitinfer.service.definition import here

    was_there = take_away(manager_of(here()))
    say(f"the {NAME} is {'removed' if was_there else 'not installed'}")
