"""Runs OpenSSH's `ssh`: scripts on a machine, and where ssh would go. Says what its failures mean.

Options (ssh_config(5), OpenSSH 9.2):

    BatchMode=yes                   it asks nothing: no password, no passphrase, no question about a host key
    StrictHostKeyChecking=yes       an unknown host key is refused, a changed one too, whatever ~/.ssh/config says
    ConnectTimeout, ServerAlive*    a machine that is gone is noticed in 10 to 15 s
    ControlMaster=auto, ...Persist  the second request of a machine needs no second login; it ends with ``close``
    ClearAllForwardings, -a, -x     nothing of this machine is lent to the other
    RemoteCommand=none, -T          what ~/.ssh/config would run there instead

The control socket lies in a folder that only this user can enter, with a short path: a socket's name has 104 bytes on
macOS (sys/un.h), ssh adds 17, and $TMPDIR has about 50 there. Output goes to files: the connection that stays in the
background may keep what was its standard error open, and a pipe would be waited for.

ssh ends with 255 if it failed itself, else with the command's code (ssh(1), "EXIT STATUS"), and says why on standard
error. The words are those of OpenSSH 9.2 on Linux, seen; its sources have the same on macOS, where the system's part of
a sentence differs ("Operation timed out" where Linux has "Connection timed out"): *assumed* beyond that. They are not
translated.
"""

import contextlib
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from splitinfer import cleanup
from splitinfer.launch.answers import last_line, plain
from splitinfer.launch.hosts import Host

CONNECT_SECONDS = 10
ANSWER_SECONDS = 240.0  # for one request: a worker may take two minutes to come up
_MOST_BYTES = 2**20  # of an answer
_RESOLVE_SECONDS = 15.0

OWN_FAILURE = 255
NO_SSH, TIMED_OUT = 127, 124  # what a shell and timeout(1) say; here this module

_HOSTNAME = re.compile(r"^hostname (\S+)$", re.MULTILINE)

OPTIONS = (
    "-T", "-a", "-x",
    "-o", "BatchMode=yes",
    "-o", "StrictHostKeyChecking=yes",
    "-o", f"ConnectTimeout={CONNECT_SECONDS}",
    "-o", "ServerAliveInterval=5",
    "-o", "ServerAliveCountMax=3",
    "-o", "ClearAllForwardings=yes",
    "-o", "PermitLocalCommand=no",
    "-o", "RemoteCommand=none",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ended:
    """One run of ssh: its exit code, and what came on standard output and standard error."""

    code: int
    output: str = ""
    complaints: str = ""


class Ssh:
    """Connections to machines. ``program``: the `ssh` to run. May be used from several threads; ``close`` ends them."""

    def __init__(self, program: Sequence[str] = ("ssh",)) -> None:
        self._program = tuple(program)
        self._stack = contextlib.ExitStack()
        self._folder = Path(self._stack.enter_context(cleanup.temporary_folder("splitinfer-", "/tmp")))
        self._used: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def run(self, host: Host, script: str, seconds: float = ANSWER_SECONDS) -> Ended:
        """Run a script of /bin/sh on a machine, at most for ``seconds``."""
        self._used.add(host.ssh)
        return self._run((*self._command(), "-o", "ControlPersist=60", "--", host.ssh, "/bin/sh -s"), script, seconds)

    def hostname(self, host: Host) -> str:
        """The name or address that ssh connects to: another one than ``host.ssh`` where ~/.ssh/config has an alias."""
        ended = self._run((*self._program, "-G", "--", host.ssh), "", _RESOLVE_SECONDS)
        match = _HOSTNAME.search(ended.output)
        return match[1] if match and ended.code == 0 else host.ssh.rpartition("@")[2]

    def close(self) -> None:
        """End the connections that are kept. What they started goes on."""
        for host in self._used:
            self._run((*self._command(), "-O", "exit", "--", host), "", _RESOLVE_SECONDS)
        self._used = set()
        self._stack.close()

    def _command(self) -> tuple[str, ...]:
        socket = f"ControlPath={self._folder}/%C"
        return (*self._program, *OPTIONS, "-o", "ControlMaster=auto", "-o", socket)

    def _run(self, command: Sequence[str], text: str, seconds: float) -> Ended:
        with contextlib.ExitStack() as stack:
            given, said, complained = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            given.write(text.encode())
            given.seek(0)
            try:
                child = cleanup.start(command, stdin=given, stdout=said, stderr=complained)
            except OSError as error:
                return Ended(NO_SSH if isinstance(error, FileNotFoundError) else OWN_FAILURE, "", str(error))
            try:
                code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                code = TIMED_OUT
            return Ended(code if code >= 0 else OWN_FAILURE, _content(said), _content(complained))


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_BYTES).decode(errors="replace")


# ----- what went wrong -----------------------------------------------------------------------------


class HostFailed(Exception):
    """Nothing more is done about a host; the text is for people. ``may_pass``: the same may work at once, because a
    connection broke."""

    def __init__(self, text: str, *, may_pass: bool = False) -> None:
        super().__init__(text)
        self.may_pass = may_pass


_CHANGED = (
    "the ssh host key of {host} is not the one that this machine knows: it was installed anew, or another machine "
    "answers in its place; find out which, and only if it was installed anew: `ssh-keygen -R {forget}`, then "
    "`ssh {host}` once"
)
_UNKNOWN = (
    "this machine does not know the ssh host key of {host} yet, and accepts none unseen: run `ssh {host}` once, "
    "compare the fingerprint, and answer yes"
)
_DENIED = (
    "{host} lets this user in only with a password, or not at all ({why}): `ssh-copy-id {host}` installs your key "
    "there; a key with a passphrase needs `ssh-add`; another user is written USER@HOST"
)
_NO_SERVER = (
    "{host} is there, but lets nobody in by ssh: on a Mac turn on System Settings → General → Sharing → Remote Login"
)
_SILENT = (
    "nothing comes back from {host} ({why}): it is off, asleep, in another network, or behind a firewall; `splitinfer "
    "doctor` looks at this machine's side"
)
_NO_NAME = (
    "ssh finds no address for {host}: a Mac's name is under System Settings → General → Sharing, mostly with .local at "
    "its end; an IP address works as well"
)
_DROPPED = (
    "the ssh connection to {host} broke off; a worker that runs there goes on, and the same command finds it again"
)
_OWN_FILES = "ssh refuses this machine's own settings: {why}; `ssh {host}` says the same"

_KNOWN: tuple[tuple[str, str], ...] = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED|[Hh]ost key for .* has changed", _CHANGED),
    (r"Host key verification failed|No \S+ host key is known", _UNKNOWN),
    (r"Bad owner or permissions on .*|Bad configuration option.*|terminating, \d+ bad configuration", _OWN_FILES),
    (r"Permission denied \([^)\n]*\)|Too many authentication failures", _DENIED),
    (r"Could not resolve hostname", _NO_NAME),
    (r"connect to host .*: Connection refused", _NO_SERVER),
    (
        r"connect to (?:host|address) .*: (?:Operation|Connection) timed out|No route to host|Host is down|"
        r"Network is unreachable|Connection timed out during banner exchange",
        _SILENT,
    ),
    (
        r"[Cc]onnection (?:to .* )?(?:closed|reset)|[Bb]roken pipe|not responding|send disconnect|kex_exchange|"
        r"mux_client|Session open refused|control socket|\A\s*\Z",  # over a kept connection: nothing (seen)
        _DROPPED,
    ),
)  # fmt: skip


def trouble(ended: Ended, host: Host) -> HostFailed | None:
    """What went wrong in ssh itself; ``None``: nothing did."""
    if ended.code == NO_SSH and not ended.output:
        return HostFailed("this machine has no `ssh`, the program of OpenSSH")
    if ended.code == TIMED_OUT:
        return HostFailed(f"{host.name} has not answered in time; what was begun there may go on: try again")
    if ended.code != OWN_FAILURE:
        return None
    for pattern, said in _KNOWN:
        if (match := re.search(pattern, ended.complaints)) is not None:
            named = re.search(r"-R ['\"]?([\w.:\[\]%-]+)", ended.complaints)
            forget = shlex.quote(named[1] if named else host.ssh.rpartition("@")[2])
            text = said.format(host=host.ssh, why=plain(match[0]), forget=forget)
            return HostFailed(text, may_pass=said is _DROPPED)

    return HostFailed(f"ssh to {host.ssh} failed: {plain(last_line(ended.complaints))}")
