"""`splitinfer service`: has the system start a worker and keep it running.

`install` takes the options of `splitinfer worker` and writes them down: its parameters are read from that
command's function, so an option that is added there can be given here.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, get_args

import typer
from typer.models import OptionInfo

from splitinfer.cli.running import finish, say, tell
from splitinfer.cli.worker import worker
from splitinfer.service.definition import NAME, Definition, absolute, carried

_ALWAYS = ("host", "port")  # written down also where they are not given
_NOT_HERE = ("detach", "stop", "show", "as_json")  # options of workers in the background, without a service
_FOLDERS = ("model", "kv_dir")  # whose value is a path, which becomes absolute: a service runs in another folder

service_app = typer.Typer(no_args_is_help=True, help="Let the system start a worker and keep it running.")

_Force = Annotated[bool, typer.Option("--force", help="Replace what is installed, and start it anew.")]


def _install_command() -> Callable[..., None]:
    """The command that installs: with the options of a `splitinfer worker` that stays, and ``--force``."""
    listed = [each for each in inspect.signature(worker).parameters.values() if not _option(each).hidden]
    own = [each for each in listed if each.name not in _NOT_HERE]

    def run(context: typer.Context, *, force: bool, **given: Any) -> None:
        if given.get("port") == 0:
            raise typer.BadParameter("a service needs a port of its own: coordinators must find it again")
        names = {each.name: each.opts[0] for each in context.command.params if each.name is not None}
        finish(lambda: _install((NAME, *_words(own, given, names)), force=force))

    forced = inspect.Parameter("force", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_Force)
    at = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [at, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own), forced]
    run.__doc__ = "Run `splitinfer worker` from now on, and whenever you log in."
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _option(parameter: inspect.Parameter) -> OptionInfo:
    """The option that an annotation describes."""
    return next(each for each in get_args(parameter.annotation) if isinstance(each, OptionInfo))


def _words(parameters: Iterable[inspect.Parameter], given: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """The options as a command line has them; those that have their default value are left out.

    ``given``: their values, ``names``: what they are called there, both by the parameter's name.
    """
    words: list[str] = []
    for each in parameters:
        value = given[each.name]
        if value is None or (value == each.default and each.name not in _ALWAYS):
            continue
        if isinstance(value, bool):
            words.append(names[each.name])
        else:
            words += [names[each.name], absolute(str(value)) if each.name in _FOLDERS else str(value)]
    return words


service_app.command("install")(_install_command())


def _install(words: tuple[str, ...], *, force: bool) -> int:
    from splitinfer.service.actions import install, manager_of, refuse_root
    from splitinfer.service.definition import find_executable, here

    place = here()
    refuse_root(place)
    manager = manager_of(place)
    definition = Definition((find_executable(), *words), carried(place.environment))
    if not install(definition, manager, place, force=force):
        say(f"the {NAME} runs already, with these options; --force starts it anew")
        return 0
    say(f"the {NAME} runs; its log: {manager.log}")
    for sentence in (*_reach(words), *manager.advice()):
        say(f"note: {sentence}")
    return 0


def _reach(words: tuple[str, ...]) -> list[str]:
    """What a person should know about who can reach it."""
    from splitinfer.launch.processes import command_of

    command = command_of(("splitinfer", *words))
    if command is not None and command.is_loopback:
        return ["it listens on this machine only; with --host 0.0.0.0 other machines reach it"]
    if command is not None and command.is_insecure:
        return ["--insecure: whoever reaches its port can use it, and read what crosses the link"]
    return []


@service_app.command("status")
def status() -> None:
    """Print what is installed, whether it runs, how it ended last, and the end of its log."""
    finish(_status)


def _status() -> int:
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
    finish(_remove)


def _remove() -> int:
    from splitinfer.service.actions import manager_of
    from splitinfer.service.actions import remove as take_away
    from splitinfer.service.definition import here

    was_there = take_away(manager_of(here()))
    say(f"the {NAME} is {'removed' if was_there else 'not installed'}")
    return 0
