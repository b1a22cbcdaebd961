"""Runs OpenSSH's `ssh`: runs `splitinfer worker` on a machine, and asks ssh for a host's address.

`ssh HOST COMMAND` runs the user's shell, of any kind, not as a login shell: PATH lacks the additions of ~/.zprofile
(sshd(8), "Login process"; 0xSero/litter #1). So the command is only ``/bin/sh -s``, and the script on its standard
input runs the first program that it finds: at the same path as here, on PATH, in the folders of uv, pipx and pip, or on
a login shell's PATH. Options (ssh_config(5), OpenSSH 9.2):

    BatchMode=yes                   it asks nothing: no password, no passphrase, no question about a host key
    StrictHostKeyChecking=yes       an unknown host key is refused, a changed one too, whatever ~/.ssh/config says
    ConnectTimeout, ServerAlive*    a machine that is gone is noticed in 10 to 15 s
    ControlMaster=auto, ...Persist  a second request to a machine needs no second login; ``close`` ends the connection
    ClearAllForwardings, -a, -x     nothing of this machine is lent to the other
    RemoteCommand=none, -T          ignores a command that ~/.ssh/config would run instead

The control socket's path is short: macOS allows 104 bytes, and ssh takes 17 of them, $TMPDIR some 50.
"""

import contextlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from splitinfer import cleanup
from splitinfer.launch.hosts import Host
from splitinfer.system.command import TIMED_OUT, Done, run

CONNECT_SECONDS = 10
ANSWER_SECONDS = 240.0  # for one request: a worker may take two minutes to come up
_RESOLVE_SECONDS = 15.0

OWN_FAILURE, NOT_FOUND, WRONG_OPTION = 255, 127, 2
"""Exit codes: ssh itself failed; splitinfer was not found; it does not know an option, so it is another version."""

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


class Ssh:
    """Keeps connections to machines. ``program``: the `ssh` to run. Several threads may use it; ``close`` ends them."""

    def __init__(self, program: Sequence[str] = ("ssh",)) -> None:
        self._program = tuple(program)
        self._stack = contextlib.ExitStack()
        self._folder = Path(self._stack.enter_context(cleanup.temporary_folder("splitinfer-", "/tmp")))
        self._used: set[str] = set()

    def run(self, host: Host, script: str, seconds: float = ANSWER_SECONDS) -> Done:
        """Run a script of /bin/sh on a machine for at most ``seconds``."""
        self._used.add(host.ssh)
        return self._run((*self._command(), "-o", "ControlPersist=60", "--", host.ssh, "/bin/sh -s"), script, seconds)

    def hostname(self, host: Host) -> str:
        """Return the name or address that ssh connects to. It differs from ``host.ssh`` if that is an alias in
        ~/.ssh/config."""
        ended = self._run((*self._program, "-G", "--", host.ssh), "", _RESOLVE_SECONDS)
        match = _HOSTNAME.search(ended.output)
        return match[1] if match and ended.code == 0 else host.ssh.rpartition("@")[2]

    def close(self) -> None:
        """End the kept connections. The programs started over them go on."""
        for host in self._used:
            self._run((*self._command(), "-O", "exit", "--", host), "", _RESOLVE_SECONDS)
        self._used = set()
        self._stack.close()

    def _command(self) -> tuple[str, ...]:
        socket = f"ControlPath={self._folder}/%C"
        return (*self._program, *OPTIONS, "-o", "ControlMaster=auto", "-o", socket)

    def _run(self, command: Sequence[str], text: str, seconds: float) -> Done:
        done = run(command, seconds, text=text, group=False)  # the kept connection may be in its group
        if done.code == TIMED_OUT:
            return Done(OWN_FAILURE, "", f"no answer for {seconds:.0f} s; what was begun there may go on")
        return done if 0 <= done.code <= OWN_FAILURE else replace(done, code=OWN_FAILURE)


# ----- the script that runs there ------------------------------------------------------------------

_PLACES = (
    '"$(command -v splitinfer)"',
    '"$HOME"/.local/bin/splitinfer',  # links of uv and pipx; pip --user on Linux
    '"$HOME"/.local/share/uv/tools/splitinfer/bin/splitinfer',  # their environments, if no link was made
    '"$HOME"/.local/share/pipx/venvs/splitinfer/bin/splitinfer',
    '"$HOME"/.local/pipx/venvs/splitinfer/bin/splitinfer',
    '"$HOME"/Library/Python/*/bin/splitinfer',  # pip --user on macOS
    "/opt/homebrew/bin/splitinfer",
    "/usr/local/bin/splitinfer",
)

_SCRIPT = """\
try() {{ [ -f "$1" ] && [ -x "$1" ] && exec "$1" worker {words} </dev/null; }}
for program in {places}; do try "$program"; done
try "$("${{SHELL:-/bin/sh}}" -lc 'command -v splitinfer' </dev/null 2>/dev/null | tail -n 1)"
exit {not_found}
"""


def script(words: Sequence[str], here: str | None = None, home: str = "/") -> str:
    """Return the script of /bin/sh that runs `splitinfer worker` with these words.

    ``here``: the path of this machine's own command. ``home``: its user's folder. The script first tries the same
    place there.
    """
    places = _PLACES if here is None else (_same_place(here, home), *_PLACES)
    return _SCRIPT.format(words=shlex.join(words), places=" ".join(places), not_found=NOT_FOUND)


def _same_place(path: str, home: str) -> str:
    """Return the counterpart of ``path`` in another user's folder, as a word for a shell."""
    inside = PurePosixPath(path)
    if home == "/" or not inside.is_relative_to(home):
        return shlex.quote(path)
    return '"$HOME"/' + shlex.quote(str(inside.relative_to(home)))
