"""`splitinfer init`: makes a pipeline of two machines, without ssh and without typing keys."""

import itertools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitinfer.cli.options import PipelineOptions, UseAllOption, WorkerOptions, settings_of
from splitinfer.cli.running import say, set_up
from splitinfer.common.endpoint import WORKER_PORT, Endpoint
from splitinfer.errors import ConfigError

if TYPE_CHECKING:
    from splitinfer.launch.pairing import PairingHello

_READY = 60.0  # seconds for the other machine's worker to come up
_LONG = 60.0  # seconds without the other machine until a hint is printed
_NOBODY = """The other machine has not answered yet. Three things can be wrong:
- `splitinfer init` does not run there, or this machine's code was not typed there;
- the two are in different networks, or macOS has not allowed this: splitinfer doctor;
- they do not find each other: end this with Ctrl-C, and name the other one: splitinfer init HOST"""


def init(
    near: Annotated[
        str | None,
        typer.Argument(
            metavar="HOST[:PORT]",
            help="The other machine's address, if it is not found by itself. PORT: shown beside its code.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="The model. Give it only on the machine where you will chat."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The layout to write. Default: a new file named after the model.")
    ] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the worker.")] = WORKER_PORT,
    uses_all: UseAllOption = False,
) -> int:
    """Make a pipeline of two machines: run this on both, and type each one's code at the other."""
    if uses_all and model is None:
        raise typer.BadParameter("--use-all is for the machine where you chat; add --model")
    return _help(near, port) if model is None else _coordinate(near, model, out, uses_all)


def _file_of(model: str) -> Path:
    """Return a new file for the layout of a model, beside the commands that use it.

    >>> str(_file_of("mlx-community/Qwen3-8B-4bit"))
    'qwen3-8b-4bit-pair.yaml'
    """
    name = re.sub(r"[^a-z0-9.]+", "-", Path(model).resolve().name.lower()).strip("-.") or "model"
    names = (Path(f"{name}-pair{'' if i == 1 else f'-{i}'}.yaml") for i in itertools.count(1))
    return next(each for each in names if not each.exists())


def _help(near: str | None, port: int) -> int:
    """Meet the other machine, exchange keys, then run the worker unless one runs. Return the exit code."""
    set_up(verbose=False, info=True)
    other, _ = _meet(near, port)
    from splitinfer.cli.serve_worker import serve
    from splitinfer.launch.background import show

    if any(each.port == port for each in show().workers):
        say(f"A worker waits at port {port} already. From now on it serves {other.name}, too.")
        return 0
    say(f"From now on, start this worker with:\n\n    splitinfer worker --host 0.0.0.0 --port {port}\n")
    options = WorkerOptions(host="0.0.0.0", port=port)
    return serve(options, shows_stage=False)  # a paired worker needs no line for a layout


def _coordinate(near: str | None, model: str, out: Path | None, uses_all: bool) -> int:
    """Meet the other machine, exchange keys, measure both and write the layout. Return the exit code."""
    from splitinfer.models.folder.hub import named_anywhere, open_model

    if out is not None and out.exists():
        raise ConfigError(f"{out} exists already; remove it, or name another file with --out")
    model, out = named_anywhere(model), out or _file_of(model)
    open_model(model)  # report a wrong name before anybody types
    other, host = _meet(near, None)
    from splitinfer.cli.opening import write_planned

    options = PipelineOptions(model=model, use_all=uses_all, settings=settings_of({"connect_timeout": _READY}))
    address = str(Endpoint(host, other.port or WORKER_PORT))
    write_planned(options, model, [{"name": other.name, "address": address, "key": other.key}], out)
    say(f"The layout is in {out}. Chat with:\n\n    splitinfer chat --layout {out}\n")
    return 0


def _meet(near: str | None, port: int | None) -> "tuple[PairingHello, str]":
    """Return the other machine and its address, once each machine has the other's key."""
    from splitinfer.engine.versions import machine_name, own_versions
    from splitinfer.keyring import Keyring
    from splitinfer.launch.pairing import PORT, Meeting, PairingHello, WrongCode, ask_code, new_code

    keyring = Keyring()
    own = PairingHello(machine_name().partition(".")[0], keyring.own().public, port, own_versions().protocol)
    at = None if near is None else Endpoint.parse(near, PORT)
    meeting, code, typed = Meeting(own, near=[(at.host, at.port)] if at else ()), new_code(), None
    shown = "" if meeting.port == PORT else f" (port {meeting.port})"
    say(f"Run `splitinfer init` on both machines.\n\n    this machine's code: {code}{shown}\n")
    with meeting.open():
        while True:
            try:
                typed = ask_code(_read, say, code, typed)
                say("waiting for the other machine; type this one's code there")
                with _said_after(_LONG, _NOBODY):
                    other, found_at = meeting.with_code(code, typed)
            except WrongCode:
                say("The codes do not match. Type the other machine's code again; Enter keeps it.")
                continue
            keyring.admit(other.key, other.name)
            say(f"paired with {other.name} at {found_at}")
            return other, found_at


@contextmanager
def _said_after(seconds: float, text: str) -> Iterator[None]:
    """Print ``text`` if the ``with`` block takes longer than ``seconds``."""
    timer = threading.Timer(seconds, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _read(question: str) -> str:
    try:
        return input(question)
    except EOFError:
        say("")
        raise ConfigError("no code was typed") from None
