"""`splitinfer plan --live`: compares the cut of a running pipeline with the best, here, and has the best one loaded."""

import contextlib
import json
from typing import Any

import typer

from splitinfer.errors import ConfigError, PeerError
from splitinfer.llm.live_socket import ask, stages_of
from splitinfer.llm.rebalance import LiveFigures, rebalance
from splitinfer.machine.numbers import sentence
from splitinfer.placement.asked import Aim
from splitinfer.system.private_sockets import listening


def plan_live(pid: int | None, aim: Aim, *, applies: bool, as_json: bool) -> int:
    """Print what another cut would give, and load it if ``applies`` and it is worth it. ``pid``: the process to ask,
    where there are several.

    Raises:
        ConfigError: there is no such process, or more than one.
        PeerError, RequestError: it cannot be asked, or nothing is known yet.
    """
    live = _figures(pid)
    found = rebalance(live, aim)
    document: dict[str, Any] = {
        "aim": str(aim),
        "cut": live.layout.cut,
        "best": found.layout.cut,
        "gain": found.gain,
        "text": found.text,
        "times": dict(live.times),
        "stages": stages_of(found.layout),
    }
    if not as_json:
        typer.echo(found.text)
    if applies and found.is_worth_it:
        done = _asked(pid, {"ask": "recut", "from": stages_of(live.layout), "stages": stages_of(found.layout)})
        document["paused"] = done["paused"]
        if not as_json:
            typer.echo(f"{done['cut']} is in force; requests waited {done['paused']:.1f} s.")
    if as_json:
        typer.echo(json.dumps(document))
    return 0


def _figures(pid: int | None) -> LiveFigures:
    found = _asked(pid, {"ask": "figures"})
    try:
        return LiveFigures.from_dict(found)
    except (ValueError, TypeError, KeyError) as error:
        raise PeerError(f"the pipeline is of another version of splitinfer: {sentence(error)}") from error


def _asked(pid: int | None, question: dict[str, Any]) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        there = {number: stack.enter_context(connection) for number, connection in listening().items()}
        numbers = ", ".join(map(str, there))
        if pid is not None and pid not in there:
            raise ConfigError(f"process {pid} runs no pipeline that can be asked; {numbers or 'no process'} does")
        if not there:
            raise ConfigError(
                "no pipeline of yours runs on this machine, or it is still loading; start one with `splitinfer coord`, "
                "chat or serve"
            )
        if pid is None and len(there) > 1:
            raise ConfigError(f"several pipelines run here; say which with --pid, one of {numbers}")
        return ask(there[next(iter(there)) if pid is None else pid], question)
