"""`splitinfer service`: has the system start a command and keep it running.

`install NAME` takes the options of the command NAME and writes them down: its parameters are read from that command's
function, so an option that is added there can be given here.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, get_args

import typer
from typer.models import OptionInfo

from splitinfer.cli.pipeline import worker
from splitinfer.cli.running import finish, set_up
from splitinfer.errors import ConfigError
from splitinfer.service.definition import SERVICES, WORKER, Definition, Service, absolute, carried

_COMMANDS: Mapping[str, Callable[..., None]] = {WORKER.name: worker}

service_app = typer.Typer(no_args_is_help=True, help="Let the system start a command and keep it running.")
_install_app = typer.Typer(no_args_is_help=True, help="Install a service, or replace it, and start it.")
service_app.add_typer(_install_app, name="install")

_Force = Annotated[bool, typer.Option("--force", help="Replace what is installed, and start it anew.")]


def _install_command(service: Service, command: Callable[..., None]) -> Callable[..., None]:
    """The command that installs ``service``: with the options of ``command`` that help lists, and ``--force``."""
    own = [each for each in inspect.signature(command).parameters.values() if not _option(each).hidden]

    def run(context: typer.Context, *, force: bool, **given: Any) -> None:
        set_up(verbose=False)
        if given.get("port") == 0:
            raise typer.BadParameter("a service needs a port of its own: coordinators must find it again")
        names = {each.name: each.opts[0] for each in context.command.params if each.name is not None}
        words = (service.name, *_words(service, own, given, names))
        finish(lambda: _install(service, words, force=force), verbose=False)

    forced = inspect.Parameter("force", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_Force)
    at = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [at, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own), forced]
    run.__doc__ = f"Run `splitinfer {service.name}` from now on, and whenever you log in."
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _option(parameter: inspect.Parameter) -> OptionInfo:
    """The option that an annotation describes."""
    return next(each for each in get_args(parameter.annotation) if isinstance(each, OptionInfo))


def _words(
    service: Service, parameters: Iterable[inspect.Parameter], given: Mapping[str, Any], names: Mapping[str, str]
) -> list[str]:
    """The options as a command line has them; those that have their default value are left out.

    ``given``: their values, ``names``: what they are called there, both by the parameter's name.
    """
    words: list[str] = []
    for each in parameters:
        value = given[each.name]
        if value is None or (value == each.default and each.name not in service.always):
            continue
        if isinstance(value, bool):
            words.append(names[each.name])
        else:
            words += [names[each.name], absolute(str(value)) if each.name in service.folders else str(value)]
    return words


for _service in SERVICES.values():
    _install_app.command(_service.name)(_install_command(_service, _COMMANDS[_service.name]))


def _install(service: Service, words: tuple[str, ...], *, force: bool) -> int:
    from splitinfer.service.actions import install, manager_of, refuse_root
    from splitinfer.service.definition import find_executable
    from splitinfer.service.place import here

    place = here()
    refuse_root(place)
    manager = manager_of(service, place)
    definition = Definition(service, (find_executable(), *words), carried(place.environment))
    if not install(definition, manager, place, force=force):
        typer.echo(f"the {service.name} runs already, with these options; --force starts it anew", err=True)
        return 0
    typer.echo(f"the {service.name} runs; its log: {manager.log}", err=True)
    for sentence in (*_reach(words), *manager.advice()):
        typer.echo(f"note: {sentence}", err=True)
    return 0


def _reach(words: tuple[str, ...]) -> list[str]:
    """What a person should know about who can reach it."""
    if any(host in words for host in ("127.0.0.1", "localhost", "::1")):
        return ["it listens on this machine only; with --host 0.0.0.0 other machines reach it"]
    if "--insecure" in words:
        return ["--insecure: whoever reaches its port can use it, and read what crosses the link"]
    return []


@service_app.command("status")
def status(name: Annotated[str | None, typer.Argument(help="The service; all of them if not given.")] = None) -> None:
    """Print what is installed, whether it runs, how it ended last, and the end of its log."""
    set_up(verbose=False)
    finish(lambda: _status([_known(name)] if name else list(SERVICES.values())), verbose=False)


def _status(services: list[Service]) -> int:
    from splitinfer.service.actions import manager_of
    from splitinfer.service.actions import status as look
    from splitinfer.service.place import here

    place = here()
    found = [look(each, manager_of(each, place), place) for each in services]
    for _, _, lines in found:
        typer.echo("\n".join(lines))
    installed = [state for state, is_installed, _ in found if is_installed]
    return 0 if installed and all(state.is_running for state in installed) else 1


@service_app.command("remove")
def remove(name: Annotated[str, typer.Argument(help="The service.")]) -> None:
    """Stop a service and remove it; its log, keys, models and stored KV stay."""
    set_up(verbose=False)
    finish(lambda: _remove(_known(name)), verbose=False)


def _remove(service: Service) -> int:
    from splitinfer.service.actions import manager_of
    from splitinfer.service.actions import remove as take_away
    from splitinfer.service.place import here

    was_there = take_away(manager_of(service, here()))
    typer.echo(f"the {service.name} is {'removed' if was_there else 'not installed'}", err=True)
    return 0


def _known(name: str) -> Service:
    if name not in SERVICES:
        raise ConfigError(f"there is no service {name}; there is: {', '.join(SERVICES)}")
    return SERVICES[name]
