"""What a person reads of `up`, `down` and `status`: short lines. Pure."""

from collections.abc import Sequence

from splitinfer.launch.answers import Found, How, Seen, Stopped, plain
from splitinfer.launch.hosts import Host
from splitinfer.launch.steps import Failed, Looking, Starting, State, Up

_HOW = {How.UP: "by `up`", How.SERVICE: "as a service", How.HAND: "by hand"}


def line_of(state: State) -> str | None:
    """The line about a host that has come to a state; ``None``: there is nothing new to say."""
    match state:
        case Starting(tries=1):
            return f"{state.host.name}: splitinfer {state.seen.versions.splitinfer} is there, {memory(state.seen)}"
        case Starting() | Looking():
            return f"{state.host.name}: the connection broke off; once more"
        case Up():
            return f"{state.host.name}: {_worker(state)}"
        case Failed():
            return state.text


def _worker(up: Up) -> str:
    worker = up.started.worker
    what = "worker started" if up.started.is_new else f"a worker is there, {started(worker)}"
    log = f"; log: {plain(up.started.log)}" if up.started.is_new and up.started.log else ""
    return f"{what}, port {worker.port}; each machine has the other's key{log}"


def started(worker: Found) -> str:
    """What started a worker, in words."""
    by = f" of {plain(worker.by, 60)}" if worker.by and not worker.is_own else ""
    return f"started {_HOW[worker.how]}{by}"


def memory(seen: Seen) -> str:
    return f"{seen.free / 1e9:.1f} of {seen.total / 1e9:.1f} GB free"


def down_lines(host: Host, stopped: Stopped) -> list[str]:
    """What `down` did on a host."""
    lines = [f"{host.name}: the worker at port {each.port} is stopped" for each in stopped.stopped]
    for each in stopped.left:
        lines.append(f"{host.name}: a worker at port {each.port}, {started(each)}, still runs: it is not of this `up`")
    return lines or [f"{host.name}: nothing runs that `up` from here has started"]


COLUMNS = ("host", "version", "free memory", "worker", "started", "holds", "serves")


def status_rows(host: Host, seen: Seen) -> list[tuple[str, ...]]:
    """The rows of `status` about a host that answered, one for each worker; their columns are ``COLUMNS``."""
    head = (host.name, plain(seen.versions.splitinfer, 20), f"{seen.free / 1e9:.1f} of {seen.total / 1e9:.1f} GB")
    rows = [_row(each) for each in seen.workers]
    rows += [(f"port {each.port}", f"by {plain(each.user, 40)}", "", "") for each in seen.theirs]
    rows = rows or [("none runs", "", "", "")]
    return [(*(head if i == 0 else ("", "", "")), *row) for i, row in enumerate(rows)]


def _row(worker: Found) -> tuple[str, str, str, str]:
    serves = ", ".join(plain(peer, 60) for peer in worker.peers) or "nobody"
    since = f"{started(worker)}, {duration(worker.seconds)} ago"
    return (f"port {worker.port}", since.removeprefix("started "), f"{worker.memory / 1e9:.2f} GB", serves)


def duration(seconds: float) -> str:
    """
    >>> duration(59), duration(3600), duration(200000)
    ('59 s', '1 h', '2 days')
    """
    for size, unit in ((86400 * 2, "days"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / (86400 if unit == 'days' else size):.0f} {unit}"
    return f"{seconds:.0f} s"


def problems(hosts: Sequence[str]) -> str:
    """The sentence in which a command ends whose hosts did not all come up."""
    return f"not all hosts are up ({', '.join(hosts)}); the others stay as they are, and the same command goes on there"
