"""A user unit of systemd: its text, and what systemctl says of it. Pure.

Sources: systemd.service(5), systemd.unit(5), systemd.exec(5), systemd.kill(5), systemd.syntax(7), systemctl(1) of 252.

    ExecStart=:...            ":" keeps systemd from replacing $NAME in the words; %, which stands for specifiers, is
                              doubled; words are quoted, with C escapes
    Restart=on-failure        after a crash or exit code 1, not after SIGTERM, and never after exit code 2: a wrong
                              option stays wrong. SIGTERM ends some commands with 143.
    StartLimit...             60 starts in ten minutes: two minutes for an address that is not up yet, then it stays
                              down, and `splitinfer service status` says so
    KillMode=mixed            SIGTERM goes to the main process, which ends its own; SIGKILL to what is left
    Type=exec                 a program that cannot be started fails the start, instead of the service later

A user unit cannot wait for the system's network-online.target. Of systemd.exec's hardening those settings are used that
need no mount namespace, which an unprivileged user's manager may not be able to make; MemoryDenyWriteExecute is not
among them, because GPU drivers and MLX compile code.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from splitinfer.errors import ConfigError
from splitinfer.service.definition import Definition, Installed, Service, State

PROPERTIES = ("LoadState", "ActiveState", "MainPID", "NRestarts", "Result", "ExecMainCode", "ExecMainStatus")
_EXITED, _KILLED, _DUMPED = "1", "2", "3"  # waitid(2): si_code of SIGCHLD

_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_REFUSED = re.compile(r"""["'\\]""")  # "Executable name contains special characters"
_PLAIN = {escaped: plain for plain, escaped in _ESCAPES.items()}


def quoted(word: str) -> str:
    """A word of a command line, or an assignment, as a unit file has it."""
    escaped = "".join(_ESCAPES.get(letter, letter) for letter in word)
    return '"' + escaped.replace("%", "%%") + '"'


def _unquoted(text: str) -> str:
    return re.sub(r"\\.", lambda match: _PLAIN.get(match[0], match[0]), text.replace("%%", "%"))


def unit(definition: Definition) -> bytes:
    """The text of the unit file. Raises ConfigError: systemd starts no program at such a path."""
    if _REFUSED.search(definition.command[0]):
        raise ConfigError(f"systemd starts no program whose path has quotes or backslashes: {definition.command[0]}")
    service = definition.service
    variables = (f"{name}={value}" for name, value in definition.environment.items())
    environment = "".join(f"Environment={quoted(each)}\n" for each in variables)
    return f"""\
[Unit]
Description=splitinfer {service.name}
StartLimitIntervalSec=600
StartLimitBurst=60

[Service]
Type=exec
ExecStart=:{" ".join(map(quoted, definition.command))}
{environment}Restart=on-failure
RestartSec=2
RestartPreventExitStatus=2
SuccessExitStatus=143
KillMode=mixed
TimeoutStopSec={service.stop_seconds}
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native

[Install]
WantedBy=default.target
""".encode()


def installed(text: bytes) -> Installed | None:
    """What a unit file describes; ``None`` if it is none."""
    try:
        settings = list(_settings(text.decode()))
    except UnicodeDecodeError:
        return None
    commands = [value for name, value in settings if name == "ExecStart"]
    if len(commands) != 1:
        return None
    assignments = [word for name, value in settings if name == "Environment" for word in _words(value)]
    environment = dict(each.split("=", 1) for each in assignments if "=" in each)
    other = {name: value for name, value in settings if name not in ("ExecStart", "Environment")}
    return Installed(tuple(_words(commands[0].removeprefix(":"))), environment, other)


def _settings(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith(("#", ";")):
            yield name.strip(), value.strip()


def _words(line: str) -> list[str]:
    """The words of a line; a file written by hand has them without quotes."""
    found = _WORD.findall(line)
    return [_unquoted(word) for word in found] if found else line.split()


def state(shown: str) -> State:
    """What ``systemctl --user show UNIT --property=...`` says, a line for each of ``PROPERTIES``."""
    values = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    pid = values.get("MainPID", "0")
    restarts = values.get("NRestarts", "")
    return State(
        is_loaded=values.get("LoadState") == "loaded",
        pid=int(pid) if pid.isdigit() and pid != "0" else None,
        starts=int(restarts) + 1 if restarts.isdigit() else None,
        last_exit=_last_exit(values),
    )


def _last_exit(values: Mapping[str, str]) -> str | None:
    if values.get("Result") == "start-limit-hit":
        return "it ended too often, and is not started any more"
    how, status = values.get("ExecMainCode"), values.get("ExecMainStatus")
    if how == _EXITED:
        return f"exit code {status}"
    if how in (_KILLED, _DUMPED):
        return f"signal {status}"
    return None


def no_instance(service: Service, why: str) -> str:
    """The sentence where no systemd serves this user: a container, or a shell without a session."""
    return (
        f"no systemd runs for this user here ({' '.join(why.split())[:200]}), so nothing can keep a {service.name} "
        f"running: in a container let its own manager start `splitinfer {service.name}`; after `su`, log in instead"
    )


def refusal(verb: str, complaint: str, file: Path) -> str:
    """The sentence about a unit that systemd did not start or stop."""
    return (
        f"systemd did not {verb} {file} ({' '.join(complaint.split())[:200]}); "
        f"`systemctl --user status {shlex.quote(file.name)}` says more"
    )
