"""The command line: parses options, builds settings and calls one function; errors become one sentence.

Exit codes: 0 success, 1 failure (the sentence gives the reason), 2 a wrong option, from 10 on what `selftest` found,
130 Ctrl-C, 143 SIGTERM (after the
running answer, if that ends within `opening.DRAIN_SECONDS`). A signal that arrives before `main` has installed its
handlers, in the first tenth of a second, ends the process by the system's default: -2 or -15.
Answers go to standard output; everything else goes to standard error.
"""

import re
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from splitinfer.cli.bench import bench
from splitinfer.cli.cache import cache_app
from splitinfer.cli.chat import chat
from splitinfer.cli.discover import discover
from splitinfer.cli.doctor import doctor, selftest
from splitinfer.cli.init import init
from splitinfer.cli.keys import keys_app
from splitinfer.cli.models import models_app
from splitinfer.cli.pair import pair
from splitinfer.cli.plan import plan
from splitinfer.cli.running import finished, say
from splitinfer.cli.serve import serve
from splitinfer.cli.service import service_app
from splitinfer.cli.up import down, status, up
from splitinfer.cli.worker import worker
from splitinfer.shutdown import shutdown

_SWITCH = 0.0005  # seconds that a thread with a received frame may wait for Python's lock; 5 ms by default

app = typer.Typer(name="splitinfer", no_args_is_help=True, pretty_exceptions_enable=False)
_PANELS: dict[str, dict[str, Callable[..., int | None]]] = {
    "Run a model": {"coord": chat, "chat": chat, "serve": serve},
    "Machines": {
        "init": init, "up": up, "down": down, "status": status, "worker": worker, "pair": pair, "discover": discover
    },
    "Plan, measure, check": {"plan": plan, "bench": bench, "doctor": doctor, "selftest": selftest},
}  # fmt: skip
_KEPT = "What is kept here"
for panel, commands in _PANELS.items():
    for name, command in commands.items():
        short = "Same as `coord`." if name == "chat" else None
        app.command(name, rich_help_panel=panel, short_help=short)(command)
for group, name in ((cache_app, "cache"), (keys_app, "keys"), (models_app, "models"), (service_app, "service")):
    app.add_typer(group, name=name, rich_help_panel=_KEPT)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from splitinfer.engine.versions import own_versions

        v = own_versions()
        typer.echo(f"splitinfer {v.splitinfer}, protocol {v.protocol}, mlx {v.mlx}, mlx-lm {v.mlx_lm}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions that both sides of a pipeline must share.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Run one large language model across two or more Macs, cut by layers."""


# What arguments are refused with. Newer versions of typer have their own click, and export only its subclasses.
_UsageError: Any = typer.BadParameter.__base__


def main() -> NoReturn:
    """Run the command that the arguments name, then end the process with its exit code."""
    sys.setswitchinterval(_SWITCH)
    try:
        code = command_line()(prog_name="splitinfer", standalone_mode=False)
    except _UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # that has printed the help
            say(sentence_of(error))
        code = error.exit_code
    except typer.Abort:
        code = 1
    except SystemExit as ending:
        code = ending.code
    shutdown.exit(code if isinstance(code, int) else int(code is not None))


def command_line() -> Any:
    """Return all commands, which return exit codes. Help shows short types, no ranges (an error says them), and none
    for flags, which take no value, so that 80 columns have room for every option's name."""
    root = typer.main.get_command(app)

    def prepare(command: Any) -> None:
        for option in command.get_params(typer.Context(command)):
            option._get_number_range_help_str = str
            if getattr(option, "is_flag", False):
                option.metavar = ""
            elif option.param_type_name == "option":
                option.metavar = option.metavar or _type_of(option)
        for inner in getattr(command, "commands", {}).values():
            prepare(inner)
        if not hasattr(command, "commands"):
            command.callback = finished(command.callback)

    prepare(root)
    return root


def _type_of(option: Any) -> str:
    """Return the word for an option's value in its help, which lists the choices."""
    described = getattr(option, "type_descriptor", None)  # newer versions of typer have it
    kind = str if described is None else described.annotation
    if isinstance(kind, type) and issubclass(kind, Enum):
        return str(option.opts[0]).strip("-").upper().replace("-", "_")
    return {int: "N", float: "N", Path: "PATH"}.get(kind, "TEXT")


def sentence_of(error: Any) -> str:
    """Return the error in the arguments as a sentence, in the form of all other errors of the command line."""
    command = "splitinfer" if error.ctx is None else error.ctx.command_path
    said = error.format_message().removeprefix("Invalid value: ").removeprefix("Invalid value for ").rstrip(".")
    said = re.sub(r"^Got unexpected extra argument\S* \((.*)\)$", r"'\1' is not expected here", said)
    said = said.replace("Value error, ", "").replace(": Input should be", " must be").partition(", unable to parse")[0]
    joint = " See" if said.endswith("?") else "; see"
    return f"splitinfer: {said[:1].lower()}{said[1:]}{joint} {command} --help"
