"""`splitinfer up`, `down` and `status`: start, stop and show workers on other machines, over ssh."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitinfer.cli.chat import is_server, prompt_of, run_pipeline
from splitinfer.cli.discover import discover
from splitinfer.cli.options import ChatOptions, sampling, with_options
from splitinfer.cli.running import set_up, show_table
from splitinfer.common.endpoint import WORKER_PORT
from splitinfer.common.plain_text import wrapped
from splitinfer.core.layout import BY_UP
from splitinfer.errors import ConfigError, Refused

if TYPE_CHECKING:
    from splitinfer.launch.hosts import Host, Last
    from splitinfer.launch.ssh import Ssh
    from splitinfer.launch.steps import LaunchSteps
    from splitinfer.llm.automatic import Chosen

_Hosts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="HOST",
        help=r"\[NAME=]\[USER@]HOST\[:PORT]. HOST as in `ssh HOST`; PORT is the worker's, not ssh's. Default: the "
        "hosts of the last `up`.",
    ),
]
_Hostfile = Annotated[
    Path | None, typer.Option("--hostfile", help="Read the hosts from this file, as `mlx.launch` uses it.")
]
_LAYOUT = "layout.yaml"
_Port = Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of workers whose host names none.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions(ChatOptions):
    """The options of `up`, which remembers the model."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="The model: OWNER/MODEL at the hub, a folder or 'demo'. Default: the last `up`'s model."
        ),
    ] = None


def _up(
    options: UpOptions,
    hosts: _Hosts = None,
    hostfile: _Hostfile = None,
    port: _Port = WORKER_PORT,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="End when the workers are up and the layout is written.")
    ] = False,
) -> int:
    """Start workers on other machines over ssh, cut the model, and go on as `chat` does."""
    set_up(options.verbose, info=is_server(options))
    choice = sampling(options)
    if (options.serve is not None) + (options.prompt is not None) + prepare > 1:
        raise ConfigError("--serve, --prompt and --prepare exclude each other; give one of them")
    last = _meant(hosts, hostfile, port, options.model)
    text = None if prepare else prompt_of(options)
    workers = _bring_up(last)
    if prepare:
        return _prepare(options, str(last.model), workers)
    return run_pipeline(options, choice, text, _planned(options, str(last.model), workers))


up = with_options(_up, without=("layout", "workers", "auto"))


def down(hosts: _Hosts = None, hostfile: _Hostfile = None) -> int:
    """Stop the workers that `up` from here has started; workers of others stay."""
    known = _known(hosts, hostfile)
    with _steps() as (steps, _):
        return 0 if all(steps.down(known)) else 1


def status(hosts: _Hosts = None, hostfile: _Hostfile = None) -> int:
    """Show which workers run where: versions, memory, who started them, whom they serve."""
    from splitinfer.launch.steps import COLUMNS

    if not hosts and hostfile is None and not _remembered().hosts:
        return discover()  # without `up`, only announcements show workers

    known = _known(hosts, hostfile)
    with _steps(makes_key=False) as (steps, _):
        found = steps.status(known)
        rows = [row for host, seen in zip(known, found, strict=True) if seen for row in steps.rows(host, seen)]
    if rows:
        show_table(COLUMNS, rows)
    return 0 if all(found) else 1


# ----- which hosts ---------------------------------------------------------------------------------


def _named(hosts: Sequence[str] | None, hostfile: Path | None, port: int) -> "tuple[Host, ...]":
    from splitinfer.launch.hosts import from_hostfile, from_words
    from splitinfer.launch.own import own_names
    from splitinfer.places import read

    if hostfile is None:
        return from_words(hosts or (), port)
    if hosts:
        raise ConfigError("give hosts as arguments or with --hostfile, not both")
    text = read(hostfile)
    if text is None:
        raise ConfigError(f"there is no hostfile {hostfile}")
    return from_hostfile(text, str(hostfile), own_names(), port)


def _remembered() -> "Last":
    from splitinfer.launch.hosts import decode
    from splitinfer.places import of_up, read

    path = of_up() / "last.json"
    return decode(read(path), str(path))


def _meant(hosts: Sequence[str] | None, hostfile: Path | None, port: int, model: str | None) -> "Last":
    """Return the hosts and the model. Raises SplitinferError if they are unknown, or the model does not exist."""
    from splitinfer.launch.hosts import choose
    from splitinfer.models.folder.hub import named_anywhere, open_model

    last = choose(_remembered(), _named(hosts, hostfile, port), model and named_anywhere(model))
    open_model(str(last.model))
    return last


def _known(hosts: Sequence[str] | None, hostfile: Path | None) -> "tuple[Host, ...]":
    from splitinfer.launch.hosts import hosts_of

    return hosts_of(_remembered(), _named(hosts, hostfile, WORKER_PORT))


@contextmanager
def _steps(*, makes_key: bool = True) -> "Iterator[tuple[LaunchSteps, Ssh]]":
    from splitinfer.launch.own import own
    from splitinfer.launch.ssh import Ssh
    from splitinfer.launch.steps import LaunchSteps

    began = time.monotonic()
    with closing(Ssh()) as ssh:
        yield LaunchSteps(own(makes_key=makes_key), ssh.run, lambda mark, line: _print(mark, line, began)), ssh


# ----- up ------------------------------------------------------------------------------------------


def _bring_up(last: "Last") -> list[dict[str, str]]:
    """Bring all hosts up. Return name, address and key of their workers. Raises ConfigError if one did not start."""
    from splitinfer.console import errors
    from splitinfer.launch.steps import check_distinct, problems
    from splitinfer.places import of_up, write

    with _steps() as (steps, ssh), errors.status(f"asking {', '.join(each.name for each in last.hosts)}"):
        started = list(zip(last.hosts, steps.up(last.hosts), strict=True))
        ready = [
            {"name": host.name, "address": host.url(ssh.hostname(host)), "key": str(up.key)}
            for host, up in started
            if up
        ]
    check_distinct([(host, up) for host, up in started if up])
    if ready:  # a mistyped host must not replace these
        write(of_up() / "last.json", last.encode())
    failed = [host.name for host, up in started if up is None]
    if failed:
        raise ConfigError(problems(failed, others=len(started) > len(failed)))
    return ready


def _planned(options: ChatOptions, model: str, workers: Sequence[dict[str, str]]) -> "Chosen":
    """Measure all machines, cut the model, and write the layout."""
    from splitinfer.cli.opening import write_planned
    from splitinfer.places import of_up

    began, path = time.monotonic(), of_up() / _LAYOUT
    chosen = write_planned(options, model, workers, path, lambda name, text: _print("✓", f"{name}: {text}"))
    _print("✓", f"the layout is in {path}", began)
    return replace(chosen, layout=replace(chosen.layout, name=BY_UP))


def _prepare(options: ChatOptions, model: str, workers: Sequence[dict[str, str]]) -> int:
    """Write the layout and return the exit code. Keep the old layout if a worker is busy, for example because its
    coordinator has reconnected at once."""
    from splitinfer.places import of_up

    path = of_up() / _LAYOUT
    try:
        _planned(options, model, workers)
    except Refused as error:
        if not path.exists():
            raise
        _print("!", f"{error}. The layout stays as it was.")
    typer.echo(path)
    return 0


def _print(mark: str, line: str, began: float | None = None) -> None:
    from rich.markup import escape

    from splitinfer.console import errors

    if began is not None and mark != "✗":  # its line ends with a command
        line += f"  {time.monotonic() - began:.1f} s"
    shown = wrapped(line, errors.width - 2) if errors.is_terminal else line
    colour = {"✓": "green", "!": "yellow", "✗": "red"}.get(mark, "default")
    errors.print(f"[{colour}]{mark}[/{colour}] {escape(shown)}", soft_wrap=True)
