"""`splitinfer worker`: runs a worker in this process, or controls the workers in the background of this machine."""

import sys
from typing import Annotated

import typer

from splitinfer.cli.options import WorkerOptions, with_options
from splitinfer.cli.running import set_up, tell
from splitinfer.shutdown import shutdown


@with_options
def worker(
    options: WorkerOptions,
    detach: Annotated[
        bool, typer.Option("--detach", help="Start the worker in the background, and return when it is ready.")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the workers that --detach has started.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Show which workers run on this machine.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --detach, --stop or --show: answer with one line of JSON.")
    ] = False,
    by: Annotated[str | None, typer.Option("--by", metavar="KEY:NAME", hidden=True)] = None,
    versions: Annotated[str | None, typer.Option("--versions", hidden=True)] = None,  # shown in the list of processes
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
) -> int:
    """Wait for a coordinator, hold the layers it names, and serve one coordinator after another."""
    if detach + stop + show > 1 or (as_json and not (detach or stop or show)):
        raise typer.BadParameter("--detach, --stop and --show exclude each other; give one of them, also for --json")
    if detach or stop or show:
        return _in_background(by, as_json, detach=detach, stop=stop)
    if child:
        shutdown.follow_parent(sys.stdin.fileno())
    from splitinfer.cli.serve_worker import serve

    set_up(options.verbose, info=True)
    return serve(options, child=child)


def _in_background(by: str | None, as_json: bool, *, detach: bool, stop: bool) -> int:
    """Start, stop or show workers in the background of this machine. ``by``: the machine whose `up` asks."""
    from splitinfer.keyring import Known
    from splitinfer.launch import background
    from splitinfer.launch.answer import encode, lines

    key, _, name = (by or "").partition(":")
    if detach:
        words = [word for word in sys.argv[2:] if word not in ("--detach", "--json") and not word.startswith("--by=")]
        answer = background.start(words, Known(key, name))
    else:
        answer = background.stop(key) if stop else background.show()
    if as_json:
        typer.echo(encode(answer))
    else:
        nothing = ["nothing was stopped: no worker of --detach runs here"] if stop and not answer.stopped else []
        tell("\n".join([*nothing, *lines(answer)]))
    return 0
