"""What is done about each host, one step after the other, all hosts at the same time.

    up      look: is splitinfer there, in the same version?  ──▶  start: a worker runs there, and admits this machine
    down    stop the workers that `up` from here has started
    status  look

Whatever stands in the way of a step ends that host's steps with one sentence. A connection that broke is tried once
more at the same step: looking and starting may be repeated.
"""

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from splitinfer.launch.answers import (
    Answer,
    Do,
    Found,
    OtherVersion,
    Refusal,
    Request,
    Seen,
    Started,
    Stopped,
    last_line,
    marked,
    plain,
    understand,
)
from splitinfer.launch.hosts import Host
from splitinfer.launch.own import Own, install_line
from splitinfer.launch.script import script
from splitinfer.launch.ssh import Ended, HostFailed, trouble
from splitinfer.wire.messages import Versions

_Of = TypeVar("_Of")

Run = Callable[[Host, str], Ended]
"""Runs a script on a machine."""

Say = Callable[[str, str], None]
"""Shows a line with its mark, "✓", "!" or "✗"; called from the threads of the hosts."""

COLUMNS = ("host", "version", "free memory", "worker", "started", "holds", "serves")


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps, as this machine asks for them."""

    own: Own
    run: Run
    say: Say

    def up(self, hosts: Sequence[Host]) -> list[Started | None]:
        """Have a worker wait on each host; ``None``: what stands in the way was said."""
        return self._each(hosts, self._up)

    def down(self, hosts: Sequence[Host]) -> list[Stopped | None]:
        """Stop the workers of `up` on each host."""
        return self._each(hosts, self._down)

    def status(self, hosts: Sequence[Host]) -> list[Seen | None]:
        """Look at each host."""
        return self._each(hosts, lambda host: self._ask(host, Do.LOOK, Seen))

    def _up(self, host: Host) -> Started:
        seen = self._ask(host, Do.LOOK, Seen)
        version, memory = plain(seen.versions.splitinfer, 20), _memory(seen)
        self.say("✓", f"{host.name}: splitinfer {version} is there, {memory} free")
        started = self._ask(host, Do.START, Started, seen.program)
        what = "worker started" if started.is_new else f"a worker is there, started {_how(started.worker)}"
        log = f"; log: {plain(started.log)}" if started.is_new and started.log else ""
        self.say("✓", f"{host.name}: {what}, port {started.worker.port}; each machine has the other's key{log}")
        return started

    def _down(self, host: Host) -> Stopped:
        done = self._ask(host, Do.STOP, Stopped)
        for each in done.stopped:
            self.say("✓", f"{host.name}: the worker at port {each.port} is stopped")
        for each in done.left:
            started = f"a worker at port {each.port}, started {_how(each)},"
            self.say("✓", f"{host.name}: {started} still runs: this `up` did not start it")
        if not done.stopped and not done.left:
            self.say("✓", f"{host.name}: no worker runs that `up` from here has started")
        return done

    def _each(self, hosts: Sequence[Host], step: Callable[[Host], _Of]) -> list[_Of | None]:
        def careful(host: Host) -> _Of | None:
            try:
                return step(host)
            except HostFailed as error:
                self.say("✗", str(error))
                return None

        with ThreadPoolExecutor(max(1, len(hosts)), "host") as pool:
            return list(pool.map(careful, hosts))

    def _ask(self, host: Host, do: Do, kind: type[_Of], program: Sequence[str] = ()) -> _Of:
        """Ask a host, and its answer. Raises HostFailed: it is another one than ``kind``, or there is none."""
        request = Request(do, self.own.versions, self.own.key, self.own.name, host.port, host.name)
        try:
            answer = self._hear(host, request, program)
        except HostFailed as error:
            if not error.may_pass or do is Do.STOP:
                raise
            self.say("!", f"{host.name}: the connection broke off; once more")
            answer = self._hear(host, request, program)
        if isinstance(answer, kind):
            return answer
        raise HostFailed(refused(answer, host, self.own))

    def _hear(self, host: Host, request: Request, program: Sequence[str]) -> Answer:
        mark = f"@splitinfer-{secrets.token_hex(8)}"
        ended = self.run(host, script(mark, request.encode(), program, self.own.program, str(Path.home())))
        answer = understand(ended.output, mark)
        if answer is None:
            raise trouble(ended, host) or HostFailed(unanswered(ended, mark, host, self.own))
        return answer


# ----- what stands in the way ----------------------------------------------------------------------


def refused(answer: Answer, host: Host, own: Own) -> str:
    """Why a host has answered something else than was asked for, and what to do."""
    match answer:
        case Refusal():
            free = host.port + 1 if host.port < 65535 else host.port - 1
            return plain(answer.text, 600) + (f": {host.name}={host.ssh}:{free}" if answer.other_port else "")
        case OtherVersion():
            theirs, here = _words(answer.versions), _words(own.versions)
            return f"{host.name} has {theirs}, and this machine {here}; {_install(host, own)}"
        case _:
            return _strange(host)


def unanswered(ended: Ended, mark: str, host: Host, own: Own) -> str:
    """Why a script that ran on a host has brought no answer, and what to do."""
    lines = marked(ended.output, mark)
    failed = next((line.removeprefix("failed ") for line in lines if line.startswith("failed ")), None)
    if failed is not None:
        why = plain(last_line(ended.complaints))
        return f"{plain(failed)} on {host.name} does not run{f': {why}' if why else ''}; {_install(host, own)}"
    if "none" in lines:
        return f"splitinfer is not installed on {host.name}, or not where it was looked for; {_install(host, own)}"
    return _strange(host)


def _strange(host: Host) -> str:
    return (
        f"{host.name} lets this user in, but runs no commands as it should; `ssh {host.ssh} echo hello` shows what it "
        "does instead"
    )


def _install(host: Host, own: Own) -> str:
    return f"to install the same there: {install_line(host.ssh, own.versions, own.origin)}"


def problems(hosts: Sequence[str]) -> str:
    """The sentence in which `up` ends if not all hosts came up."""
    others = "the other hosts are unchanged. Fix it and run the same command again."
    return f"{' and '.join(hosts)} did not start; {others}"


def _words(v: Versions) -> str:
    return plain(f"splitinfer {v.splitinfer} (protocol {v.protocol}, mlx {v.mlx}, mlx-lm {v.mlx_lm})", 120)


# ----- what is there -------------------------------------------------------------------------------


def status_rows(host: Host, seen: Seen) -> list[tuple[str, ...]]:
    """The rows of `status` about a host, one for each worker; their columns are ``COLUMNS``."""
    head = (host.name, plain(seen.versions.splitinfer, 20), _memory(seen))
    rows = [_row(each) for each in seen.workers]
    rows += [(f"port {port}", f"by {plain(user, 40)}", "", "") for port, user in seen.theirs.items()]
    rows = rows or [("none runs", "", "", "")]
    return [(*(head if i == 0 else ("", "", "")), *row) for i, row in enumerate(rows)]


def _row(worker: Found) -> tuple[str, str, str, str]:
    serves = ", ".join(plain(peer, 60) for peer in worker.peers) or "nobody"
    since = f"{_how(worker)}, {duration(worker.seconds)} ago"
    return (f"port {worker.port}", since, f"{worker.memory / 1e9:.2f} GB", serves)


def _how(worker: Found) -> str:
    """What started a worker, in words."""
    return worker.how.value + (f" of {plain(worker.by, 60)}" if worker.by and not worker.is_own else "")


def _memory(seen: Seen) -> str:
    return f"{seen.free / 1e9:.1f} of {seen.total / 1e9:.1f} GB"


def duration(seconds: float) -> str:
    """
    >>> duration(59), duration(3600), duration(200000)
    ('59 s', '1 h', '2 days')
    """
    for size, least, unit in ((86400, 2 * 86400, "days"), (3600, 3600, "h"), (60, 60, "min")):
        if seconds >= least:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
