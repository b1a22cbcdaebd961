"""What ssh's own failures mean, and what to do about each. Pure.

ssh ends with 255 if it failed itself, else with the command's code (ssh(1), "EXIT STATUS"), and says why on standard
error. The words are those of OpenSSH 9.2 on Linux, seen; its sources have the same on macOS, where the system's part of
a sentence differs ("Operation timed out" where Linux has "Connection timed out"): *assumed* beyond that. They are not
translated.
"""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from splitinfer.launch.answers import plain
from splitinfer.launch.hosts import Host

OWN_FAILURE = 255
NO_SSH, TIMED_OUT = 127, 124  # what a shell and timeout(1) say; here ssh.py


@dataclass(frozen=True, slots=True)
class Trouble:
    """ssh did not carry a request. ``may_pass``: the same may work at once, because a connection broke."""

    text: str
    may_pass: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """One run of ssh: its exit code, and what came on standard output and standard error."""

    code: int
    output: str = ""
    complaints: str = ""


def trouble(ended: Ended, host: Host) -> Trouble | None:
    """What went wrong in ssh itself; ``None``: nothing did."""
    if ended.code == NO_SSH and not ended.output:
        return Trouble("this machine has no `ssh`, the program of OpenSSH")
    if ended.code == TIMED_OUT:
        return Trouble(f"{host.name} has not answered in time; what was begun there may go on: try again")
    if ended.code != OWN_FAILURE:
        return None
    for pattern, said in _KNOWN:
        if (match := re.search(pattern, ended.complaints)) is not None:
            return said(match, host, ended.complaints)
    return Trouble(f"ssh to {host.ssh} failed: {plain(_last_line(ended.complaints))}")


Say = Callable[[re.Match[str], Host, str], Trouble]


def _changed(_: re.Match[str], host: Host, complaints: str) -> Trouble:
    named = re.search(r"-R ['\"]?([\w.:\[\]%-]+)", complaints)
    forget = f"ssh-keygen -R {shlex.quote(named[1] if named else host.ssh.rpartition('@')[2])}"
    return Trouble(
        f"the ssh host key of {host.ssh} is not the one that this machine knows: it was installed anew, or another "
        f"machine answers in its place; find out which, and only if it is the first: `{forget}`, then `ssh {host.ssh}` "
        "once"
    )


def _unknown(_: re.Match[str], host: Host, _complaints: str) -> Trouble:
    return Trouble(
        f"this machine does not know the ssh host key of {host.ssh} yet, and nothing is accepted unseen: run "
        f"`ssh {host.ssh}` once, compare the fingerprint, and answer yes"
    )


def _denied(match: re.Match[str], host: Host, _: str) -> Trouble:
    return Trouble(
        f"{host.ssh} lets this user in only with a password, or not at all ({plain(match[0])}): "
        f"`ssh-copy-id {host.ssh}` installs your key there; a key with a passphrase needs `ssh-add`; another user is "
        "written USER@HOST"
    )


def _no_server(_: re.Match[str], host: Host, _complaints: str) -> Trouble:
    return Trouble(
        f"{host.ssh} is there, but lets nobody in by ssh: on a Mac turn on System Settings → General → Sharing → "
        "Remote Login"
    )


def _silent(match: re.Match[str], host: Host, _: str) -> Trouble:
    return Trouble(
        f"nothing comes back from {host.ssh} ({plain(match[0])}): it is off, asleep, in another network, or a firewall "
        "is in between; `splitinfer doctor` looks at this machine's side"
    )


def _no_name(_: re.Match[str], host: Host, _complaints: str) -> Trouble:
    return Trouble(
        f"ssh finds no address for {host.ssh}: a Mac's name is under System Settings → General → Sharing, mostly with "
        ".local at its end; an IP address works as well"
    )


def _dropped(_: re.Match[str], host: Host, _complaints: str) -> Trouble:
    return Trouble(
        f"the ssh connection to {host.ssh} broke off; a worker that runs there goes on, and the same command finds it "
        "again",
        may_pass=True,
    )


def _own_files(match: re.Match[str], host: Host, _: str) -> Trouble:
    return Trouble(f"ssh refuses this machine's own settings: {plain(match[0])}; `ssh {host.ssh}` says the same")


_KNOWN: tuple[tuple[str, Say], ...] = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED|[Hh]ost key for .* has changed", _changed),
    (r"Host key verification failed|No \S+ host key is known", _unknown),
    (r"Bad owner or permissions on .*|Bad configuration option.*|terminating, \d+ bad configuration", _own_files),
    (r"Permission denied \([^)\n]*\)|Too many authentication failures", _denied),
    (r"Could not resolve hostname", _no_name),
    (r"connect to host .*: Connection refused", _no_server),
    (
        r"connect to (?:host|address) .*: (?:Operation|Connection) timed out|No route to host|Host is down|"
        r"Network is unreachable|Connection timed out during banner exchange",
        _silent,
    ),
    (
        r"[Cc]onnection (?:to .* )?(?:closed|reset)|[Bb]roken pipe|not responding|send disconnect|kex_exchange|"
        r"mux_client|Session open refused|control socket|\A\s*\Z",  # over a kept connection: nothing (seen)
        _dropped,
    ),
)  # fmt: skip


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
