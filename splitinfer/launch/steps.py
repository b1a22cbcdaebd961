"""Carries out the steps for each host, one after the other, all hosts at the same time.

    up      show: is splitinfer there, in the same version?  ──▶  start: a worker runs there, and admits this machine
    down    stop the workers that `up` from here has started
    status  show

If a step fails, that host's steps end with the message of ssh or of the program there. If ssh fails in the second step,
the connection broke: the step is tried once more and continues.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from splitinfer.common.plain_text import duration, plain
from splitinfer.errors import ConfigError
from splitinfer.keyring import same_key
from splitinfer.launch.answer import FoundWorker, OtherVersion, WorkersAnswer, last_line, understand
from splitinfer.launch.hosts import Host
from splitinfer.launch.own import Own, install_line
from splitinfer.launch.ssh import NOT_FOUND, OWN_FAILURE, WRONG_OPTION, script
from splitinfer.system.command import Done
from splitinfer.wire.messages import Versions

RunScript = Callable[[Host, str], Done]
"""Runs a script on a machine."""

Say = Callable[[str, str], None]
"""Shows a line with its mark, "✓", "!" or "✗"; called from the threads of the hosts."""

COLUMNS = ("host", "version", "free memory", "worker", "started", "holds", "serves")

_MOST_LINES = 20  # of ssh's message: enough for its whole warning of a changed host key


class HostFailed(Exception):
    """A host's steps have ended with an error; the text is for people."""


class SshFailed(HostFailed):
    """ssh itself failed."""


@dataclass(frozen=True, slots=True)
class LaunchSteps:
    """The steps of `up`, `down` and `status`, run from this machine."""

    own: Own
    run: RunScript
    say: Say

    def up(self, hosts: Sequence[Host]) -> list[WorkersAnswer | None]:
        """Make a worker wait on each host. Return each host's answer, or None if it failed and the reason was shown."""
        return self._each(hosts, self._up)

    def down(self, hosts: Sequence[Host]) -> list[WorkersAnswer | None]:
        """Stop the workers of `up` on each host."""
        return self._each(hosts, self._down)

    def status(self, hosts: Sequence[Host]) -> list[WorkersAnswer | None]:
        """Ask each host for its workers."""
        return self._each(hosts, lambda host: self._ask(host, "--show"))

    def _up(self, host: Host) -> WorkersAnswer:
        seen = self._ask(host, "--show")
        if seen.key == self.own.key:
            raise HostFailed(f"{host.name}: unless it is this machine, it {same_key()}")
        version, memory = plain(seen.versions.splitinfer, 20), _memory(seen)
        self.say("✓", f"{host.name}: splitinfer {version} is there, {memory} free")
        started = self._started(host)
        worker = next((each for each in started.workers if each.port == host.port), None)
        if worker is None:
            raise HostFailed(f"{host.name}: the worker at port {host.port} has ended already")
        what = "worker started" if started.is_new else f"a worker is there, started {worker.started(self.own.key)}"
        log = f"; log: {plain(worker.log)}" if started.is_new and worker.log else ""
        self.say("✓", f"{host.name}: {what}, port {host.port}; each machine has the other's key{log}")
        return started

    def _started(self, host: Host) -> WorkersAnswer:
        words = ("--detach", "--host", "0.0.0.0", "--port", str(host.port), "--name", host.name)
        try:
            return self._ask(host, *words, self._by)
        except SshFailed:
            self.say("!", f"{host.name}: the connection broke off; trying once more")
            return self._ask(host, *words, self._by)

    @property
    def _by(self) -> str:
        return f"--by={self.own.key}:{self.own.name}"

    def _down(self, host: Host) -> WorkersAnswer:
        done = self._ask(host, "--stop", self._by)
        for each in done.stopped:
            self.say("✓", f"{host.name}: the worker at port {each.port} is stopped")
        for each in done.workers:
            started = f"a worker at port {each.port}, started {each.started(self.own.key)},"
            self.say("✓", f"{host.name}: {started} still runs: this `up` did not start it")
        if not done.stopped and not done.workers:
            self.say("✓", f"{host.name}: no worker runs that `up` from here has started")
        return done

    def _each(self, hosts: Sequence[Host], step: Callable[[Host], WorkersAnswer]) -> list[WorkersAnswer | None]:
        def careful(host: Host) -> WorkersAnswer | None:
            try:
                return step(host)
            except HostFailed as error:
                self.say("✗", str(error))
                return None

        with ThreadPoolExecutor(max(1, len(hosts)), "host") as pool:
            return list(pool.map(careful, hosts))

    def _ask(self, host: Host, *words: str) -> WorkersAnswer:
        """Run `splitinfer worker` with these words on a host, and return its answer. Raises HostFailed."""
        ended = self.run(host, script((*words, "--json"), self.own.program, str(Path.home())))
        said = plain(last_line(ended.complaint).removeprefix("splitinfer: "), 600)
        if ended.code == 0:
            return self._understood(host, ended)
        if ended.code == OWN_FAILURE:
            needed = f"`ssh {host.ssh}` must work without a question"
            raise SshFailed(f"{host.name}: ssh failed; {needed}. It said:{_lines(ended)}")
        if ended.code == NOT_FOUND:
            raise HostFailed(f"{host.name}: splitinfer was not found there; {self._install(host)}")
        if ended.code == WRONG_OPTION:
            raise HostFailed(f"{host.name} has another version of splitinfer ({said}); {self._install(host)}")
        cure = f"; {self._install(host)}" if "--show" in words else ""  # it cannot do even that
        raise HostFailed(f"{host.name}: {said or f'splitinfer ended with {ended.code}'}{cure}")

    def _understood(self, host: Host, ended: Done) -> WorkersAnswer:
        try:
            return understand(ended.output, self.own.versions)
        except OtherVersion as error:
            theirs, here = _words(error.versions), _words(self.own.versions)
            raise HostFailed(f"{host.name} has {theirs}, and this machine {here}; {self._install(host)}") from None
        except ValueError:
            raise HostFailed(
                f"{host.name} lets this user in, but runs no commands as it should; `ssh {host.ssh} echo hello` shows "
                "what it does instead"
            ) from None

    def _install(self, host: Host) -> str:
        line = install_line(host.ssh, self.own.versions, self.own.origin)
        return f"this command installs the same there:\n\n    {line}\n"

    # ----- the table of `status` -------------------------------------------------------------------

    def rows(self, host: Host, seen: WorkersAnswer) -> list[tuple[str, ...]]:
        """Return the rows of `status` about a host, one for each worker; their columns are ``COLUMNS``."""
        head = (host.name, plain(seen.versions.splitinfer, 20), _memory(seen))
        rows = [self._row(each) for each in seen.workers] or [("none runs", "", "", "")]
        return [(*(head if i == 0 else ("", "", "")), *row) for i, row in enumerate(rows)]

    def _row(self, worker: FoundWorker) -> tuple[str, str, str, str]:
        serves = ", ".join(plain(peer, 60) for peer in worker.peers) or "nobody"
        since = f"{worker.started(self.own.key)}, {duration(worker.seconds)} ago"
        return (f"port {worker.port}", since, f"{worker.memory / 1e9:.2f} GB", serves)


def check_distinct(started: Sequence[tuple[Host, WorkersAnswer]]) -> None:
    """Raise ConfigError if one worker has two names."""
    names = dict[tuple[str | None, int], str]()
    for host, answer in started:
        other = names.setdefault((answer.key, host.port), host.name)
        if other != host.name:
            raise ConfigError(
                f"{other} and {host.name} have the same key: they are one machine, which you need to name once, or the "
                "file `key` was copied from one to the other"
            )


def problems(hosts: Sequence[str], *, others: bool) -> str:
    """Return the last sentence of an `up` after ``hosts`` did not come up. ``others``: whether other hosts did."""
    unchanged = "; the other hosts are unchanged" if others else ""
    return f"{' and '.join(hosts)} did not start{unchanged}. Fix it and run the same command again."


def _lines(ended: Done) -> str:
    """Return ssh's message, each line on a line of its own."""
    lines = [plain(line) for line in ended.complaint.splitlines() if line.strip()][-_MOST_LINES:]
    return "".join(f"\n  {line}" for line in lines or ["(it said nothing)"])


def _words(v: Versions) -> str:
    return plain(f"splitinfer {v.splitinfer} (protocol {v.protocol}, mlx {v.mlx}, mlx-lm {v.mlx_lm})", 120)


def _memory(seen: WorkersAnswer) -> str:
    return f"{seen.free / 1e9:.1f} of {seen.total / 1e9:.1f} GB"
