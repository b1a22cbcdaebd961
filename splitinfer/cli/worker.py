"""`splitinfer worker`: a worker in this process, or those in the background of this machine."""

import sys
from typing import Annotated

import typer

from splitinfer.cli.options import KVDir, KVDirSize, ModelsDir, ModelsSize, Verbose, disk_of, store_of
from splitinfer.cli.running import finish, tell
from splitinfer.core.endpoint import WORKER_PORT
from splitinfer.kvstore.files import DEFAULT_CAP
from splitinfer.shutdown import shutdown


def worker(
    host: Annotated[
        str,
        typer.Option("--host", help="Address to listen on: 127.0.0.1, only this machine; 0.0.0.0, all networks."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = WORKER_PORT,
    model: Annotated[
        str | None,
        typer.Option("--model", help="The model's folder on this machine, if it is not where the coordinator has it."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="This worker's name; the machine's if not given.")] = None,
    kv_dir: KVDir = None,
    kv_disk_gb: KVDirSize = DEFAULT_CAP / 1e9,
    models_dir: ModelsDir = None,
    models_gb: ModelsSize = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="No keys: anyone who can reach the port can use this worker and read its traffic."
        ),
    ] = False,
    announce: Annotated[
        bool | None,
        typer.Option(
            "--announce/--no-announce",
            help="Let `splitinfer discover` find this worker by multicast DNS. Default: yes, if other machines can "
            "reach it and it has a key.",
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Start the worker in the background, and return when it is ready.")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the workers that --detach has started.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Show which workers run on this machine.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --detach, --stop or --show: answer with one line of JSON.")
    ] = False,
    by: Annotated[str | None, typer.Option("--by", metavar="KEY:NAME", hidden=True)] = None,
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
    verbose: Verbose = False,
) -> None:
    """Wait for a coordinator, hold the layers it names, and serve one coordinator after another."""
    if detach + stop + show > 1 or (as_json and not (detach or stop or show)):
        raise typer.BadParameter("--detach, --stop and --show each say what is to be done; give one, --json beside it")
    if detach or stop or show:
        finish(lambda: _in_background(by, as_json, detach=detach, stop=stop), verbose)
    if child:
        shutdown.follow_parent(sys.stdin.fileno())
    from splitinfer.cli.serve_worker import serve

    disk = disk_of(kv_dir, kv_disk_gb)
    at = (host, 0 if child else port)
    store = store_of(models_dir, models_gb)

    def run() -> int:
        return serve(
            *at, shutdown, name=name, model=model, child=child, disk=disk, insecure=insecure, store=store,
            announce=announce,
        )  # fmt: skip

    finish(run, verbose, info=True)


def _in_background(by: str | None, as_json: bool, *, detach: bool, stop: bool) -> int:
    """Start, stop or show workers in the background of this machine. ``by``: the machine whose `up` asks."""
    from splitinfer.keyring import Known
    from splitinfer.launch import background
    from splitinfer.launch.answer import encode, lines

    key, _, name = (by or "").partition(":")
    asker = Known(key, name) if key else None
    if detach:
        words = [word for word in sys.argv[2:] if word not in ("--detach", "--json") and not word.startswith("--by=")]
        answer = background.start(background.Wanted(tuple(words), asker))
    else:
        answer = background.stop(key) if stop else background.show()
    if as_json:
        typer.echo(encode(answer))
    else:
        tell("\n".join(lines(answer)))
    return 0
