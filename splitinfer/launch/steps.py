"""What is done about one host, one step after the other. Pure.

    Looking ──Seen──▶ Starting ──Started──▶ Up
       │                 │
       └── anything else ┴──▶ Failed, with one sentence

A connection that broke is tried once more at the same step: both steps may be repeated. ``request`` says what a state
asks of the machine, and ``advance`` what follows from what it answers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from splitinfer.launch.answers import (
    Broken,
    Do,
    Heard,
    NotInstalled,
    OtherVersion,
    Refusal,
    Request,
    Seen,
    Started,
    Stopped,
    Why,
    plain,
)
from splitinfer.launch.hosts import Host
from splitinfer.launch.install import Origin, install_line
from splitinfer.launch.ssh_errors import Trouble
from splitinfer.wire.messages import Versions

MOST_TRIES = 2


@dataclass(frozen=True, slots=True)
class Own:
    """This machine: its public key, its name, its versions, and where its installation came from."""

    key: str
    name: str
    versions: Versions
    origin: Origin = field(default_factory=Origin)


@dataclass(frozen=True, slots=True)
class Looking:
    """Is splitinfer there, in the same version?"""

    host: Host
    tries: int = 1


@dataclass(frozen=True, slots=True)
class Starting:
    """It is; now a worker is to run there, and to admit this machine."""

    host: Host
    seen: Seen
    tries: int = 1


@dataclass(frozen=True, slots=True)
class Up:
    """A worker waits there."""

    host: Host
    seen: Seen
    started: Started


@dataclass(frozen=True, slots=True)
class Failed:
    """Nothing more is done about this host; ``text`` is for people."""

    host: Host
    text: str


State = Looking | Starting | Up | Failed


def request(state: Looking | Starting, own: Own) -> Request:
    """What a state asks of its machine."""
    do = Do.LOOK if isinstance(state, Looking) else Do.START
    return request_to(do, state.host, own)


def request_to(do: Do, host: Host, own: Own) -> Request:
    """A request to a host."""
    return Request(do, own.versions, own.key, own.name, host.port, host.name)


def advance(state: Looking | Starting, heard: Heard | Trouble | None, own: Own) -> State:
    """The state after what was heard; ``None``: the machine answered nothing that could be understood."""
    if isinstance(heard, Trouble) and heard.may_pass and state.tries < MOST_TRIES:
        return replace(state, tries=state.tries + 1)
    match state, heard:
        case Looking(), Seen():
            return Starting(state.host, heard)
        case Starting(), Started():
            return Up(state.host, state.seen, heard)
    return Failed(state.host, sentence(heard, state.host, own))


# ----- sentences -----------------------------------------------------------------------------------


def sentence(heard: Heard | Trouble | None, host: Host, own: Own) -> str:
    """What is wrong with a host, and what to do."""
    match heard:
        case Trouble():
            return heard.text
        case Refusal():
            return _REFUSALS[heard.why](host, plain(heard.detail))
        case NotInstalled():
            return f"splitinfer is not installed on {host.name}, or not where it was looked for; {_install(host, own)}"
        case OtherVersion():
            theirs = "an older or newer version" if heard.versions is None else _words(heard.versions)
            where = f" ({heard.program})" if heard.program else ""
            return f"{host.name} has {theirs}{where}, and this machine {_words(own.versions)}; {_install(host, own)}"
        case Broken():
            said = f": {heard.detail}" if heard.detail else ""
            return f"{heard.program} on {host.name} does not run{said}"
        case None | Seen() | Started() | Stopped():
            return (
                f"{host.name} lets this user in, but runs no commands as it should; `ssh {host.ssh} echo hello` shows "
                "what it does instead"
            )


def _install(host: Host, own: Own) -> str:
    return f"to install the same there: {install_line(host.ssh, own.versions, own.origin)}"


def _words(versions: Versions) -> str:
    v = versions
    return f"splitinfer {v.splitinfer} (protocol {v.protocol}, mlx {v.mlx}, mlx-lm {v.mlx_lm})"


def _other_port(host: Host) -> str:
    free = host.port + 1 if host.port < 65535 else host.port - 1
    return f"{host.name}={host.ssh}:{free}"


_REFUSALS: dict[Why, Callable[[Host, str], str]] = {
    Why.TAKEN: lambda host, detail: (
        f"port {host.port} of {host.name} is in use by {detail or 'another program'}; take another: {_other_port(host)}"
    ),
    Why.OTHER_USER: lambda host, detail: (
        f"port {host.port} of {host.name} belongs to a worker of {detail}, another user of that machine; it was left "
        f"alone; start one of your own beside it, if there is memory for both: {_other_port(host)}"
    ),
    Why.LOOPBACK: lambda host, _: (
        f"the worker on {host.name} at port {host.port} listens to that machine only; start it with --host 0.0.0.0, "
        f"or end it, or take another port: {_other_port(host)}"
    ),
    Why.INSECURE: lambda host, _: (
        f"the worker on {host.name} at port {host.port} was started with --insecure, so it cannot be told from another "
        f"one; end it, or take another port: {_other_port(host)}"
    ),
    Why.OLD: lambda host, _: (
        f"the worker on {host.name} at port {host.port} was started before this version was installed; whoever started "
        "it must start it anew"
    ),
    Why.ENDED: lambda host, detail: f"the worker on {host.name} was started and ended at once: {detail}",
    Why.ERROR: lambda host, detail: f"{host.name}: {detail}",
}
