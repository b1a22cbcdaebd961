"""Finds out how this process was started, because macOS's permissions depend on it.

Local network privacy (Apple, TN3179) allows daemons of launchd, programs running as root and command-line tools "run
from Terminal or over SSH"; agents of launchd and programs in another program's terminal need the user's permission. A
program whose Terminal was closed is reported to lose the right (The Eclectic Light Company, "How local network privacy
could affect you", 2026).

The environment shows it: launchd sets XPC_SERVICE_NAME to a job's label; a shell in a terminal has "0" there, an
application "application.…" (seen, not documented). Terminals set TERM_PROGRAM, and sshd SSH_CONNECTION.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from splitinfer.system.apple import is_macos
from splitinfer.system.command import run

_TERMINALS = {"vscode": "Visual Studio Code", "WarpTerminal": "Warp", "ghostty": "Ghostty"}
_SECONDS = 2.0


class Start(StrEnum):
    """The kind of program that started a process."""

    ROOT = "root"  # in any way: it runs as root
    DAEMON = "daemon"
    AGENT = "agent"
    SSH = "ssh"
    TERMINAL = "Terminal"
    PROGRAM = "program"  # another terminal, or an editor
    DETACHED = "detached"  # by a terminal that has been closed since
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ProcessOrigin:
    """How a process was started. ``name``: the label of launchd's job, or the program's name."""

    start: Start
    name: str = ""

    @property
    def may_use_local_network(self) -> bool:
        """Whether macOS lets it reach the local network without asking, by TN3179."""
        return self.start in (Start.ROOT, Start.DAEMON, Start.SSH, Start.TERMINAL)

    def __str__(self) -> str:
        return f"{self.start} {self.name}".strip() if self.start is not Start.PROGRAM else self.name


def origin_of(environment: Mapping[str, str], *, parent: int, user: int, session: str) -> ProcessOrigin:
    """Return the origin of a process on macOS.

    Args:
        environment: its environment.
        parent: its parent's process id; 1 is launchd.
        user: its user id.
        session: the output of ``launchctl managername``, or "".

    >>> origin_of({"TERM_PROGRAM": "iTerm.app", "XPC_SERVICE_NAME": "0"}, parent=7, user=501, session="Aqua")
    ProcessOrigin(start=<Start.PROGRAM: 'program'>, name='iTerm')
    """
    label = environment.get("XPC_SERVICE_NAME", "0")
    program = environment.get("TERM_PROGRAM", "")
    if user == 0:
        return ProcessOrigin(Start.ROOT)
    if label not in ("", "0") and not label.startswith("application."):
        return ProcessOrigin(Start.DAEMON if session == "System" else Start.AGENT, label)
    if environment.get("SSH_CONNECTION"):
        return ProcessOrigin(Start.SSH)
    if not program:
        return ProcessOrigin(Start.UNKNOWN)
    if program == "Apple_Terminal":
        return ProcessOrigin(Start.DETACHED if parent == 1 else Start.TERMINAL)
    return ProcessOrigin(Start.PROGRAM, _TERMINALS.get(program, program.removesuffix(".app")))


@cache
def this_process() -> ProcessOrigin:
    """Return how this process was started. Unknown on systems other than macOS, where nothing depends on it."""
    if not is_macos():
        return ProcessOrigin(Start.UNKNOWN)
    session = run(("/bin/launchctl", "managername"), _SECONDS).output.strip()
    return origin_of(os.environ, parent=os.getppid(), user=os.geteuid(), session=session)
