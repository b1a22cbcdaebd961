"""Manages a user unit of systemd: its text, and its state by systemctl.

Sources: systemd.service(5), systemd.unit(5), systemd.exec(5), systemd.kill(5), systemd.syntax(7), systemctl(1) of 252.

    ExecStart=:...            ":" keeps systemd from replacing $NAME in the words; %, which stands for specifiers, is
                              doubled; words are quoted, with C escapes
    Restart=on-failure        after a crash or exit code 1, not after SIGTERM, and never after exit code 2: a wrong
                              option stays wrong. SIGTERM ends some commands with 143.
    StartLimit...             60 starts in ten minutes: two minutes for an address that is not up yet, as a user unit
                              cannot wait for network-online.target
    KillMode=mixed            SIGTERM goes to the main process, which ends its children; SIGKILL to all that remain
    Type=exec                 a program that cannot be started fails the start, instead of the service later

The unit uses the settings of systemd.exec's hardening that need no mount namespace, except MemoryDenyWriteExecute,
because GPU drivers and MLX compile code.
"""

import configparser
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template

from splitinfer.errors import ConfigError
from splitinfer.service.definition import NAME, STOP_SECONDS, UNIT, Definition, ServicePlace, State
from splitinfer.system.command import Done, run

_PROPERTIES = ("LoadState", "ActiveState", "MainPID", "NRestarts", "Result", "ExecMainCode", "ExecMainStatus")
_EXITED, _KILLED, _DUMPED = "1", "2", "3"  # waitid(2): si_code of SIGCHLD
_LINES = 8  # of the journal

_UNIT = Template("""\
[Unit]
Description=splitinfer $name
StartLimitIntervalSec=600
StartLimitBurst=60

[Service]
Type=exec
ExecStart=:$command
Environment=$environment
Restart=on-failure
RestartSec=2
RestartPreventExitStatus=2
SuccessExitStatus=143
KillMode=mixed
TimeoutStopSec=$stop_seconds
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native

[Install]
WantedBy=default.target
""")

_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r", "%": "%%"}
_REFUSED = re.compile(r"""["'\\]""")  # "Executable name contains special characters"


def _quoted(words: Iterable[str]) -> str:
    """Return the words of a command line, or assignments, quoted for a unit file."""
    escaped = ("".join(_ESCAPES.get(letter, letter) for letter in word) for word in words)
    return " ".join(f'"{word}"' for word in escaped)


def _words(line: str) -> list[str]:
    return [word.replace("%%", "%") for word in shlex.split(line)]


def state(shown: str) -> State:
    """Return the state in the output of ``systemctl --user show UNIT --property=...``, with a line per property."""
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
    return f"signal {status}" if how in (_KILLED, _DUMPED) else None


class Systemd:
    """Keeps one service running, as a unit of the user's own systemd. See ``actions.Manager``."""

    def __init__(self, place: ServicePlace) -> None:
        self._place = place
        configs = place.environment.get("XDG_CONFIG_HOME")  # systemd.unit(5), "User unit search path"
        units = (Path(configs) if configs else place.home / ".config") / "systemd" / "user"
        self.file = units / UNIT
        self.log = f"journalctl --user-unit={UNIT}"

    def check(self) -> None:
        done = _systemctl("show-environment")
        if done.code != 0:  # a container, or a shell without a session
            raise ConfigError(
                f"no systemd runs for this user here ({done.why}), so nothing can keep a {NAME} running: in a "
                f"container let its own manager start `splitinfer {NAME}`; after `su`, log in instead"
            )

    def text(self, definition: Definition) -> bytes:
        if _REFUSED.search(definition.command[0]):
            raise ConfigError(
                f"systemd starts no program whose path has quotes or backslashes: {definition.command[0]}"
            )
        variables = (f"{name}={value}" for name, value in definition.environment.items())
        return _UNIT.substitute(
            name=NAME,
            command=_quoted(definition.command),
            environment=_quoted(variables),
            stop_seconds=STOP_SECONDS,
        ).encode()

    def read(self, text: bytes) -> Definition | None:
        """Return the definition in a unit's text, or None if it is not one. Line breaks and tabs stay escaped."""
        parser = configparser.RawConfigParser(delimiters=("=",), strict=False)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        try:
            parser.read_string(text.decode())
            settings = parser["Service"]
            command = _words(settings["ExecStart"].removeprefix(":"))
            assignments = _words(settings.get("Environment", ""))
        except (ValueError, KeyError, configparser.Error):
            return None
        return Definition(tuple(command), dict(each.split("=", 1) for each in assignments if "=" in each))

    def start(self) -> None:
        _systemctl("reset-failed", UNIT)  # it may have been started too often with its earlier options
        for words in (("daemon-reload",), ("enable", UNIT), ("restart", UNIT)):
            done = _systemctl(*words)
            if done.code != 0:
                raise self._refusal("start", done)

    def stop(self) -> None:
        done = _systemctl("disable", "--now", UNIT)
        if done.code != 0 and self.state().is_running:
            raise self._refusal("stop", done)

    def forget(self) -> None:
        _systemctl("daemon-reload")
        _systemctl("reset-failed", UNIT)

    def state(self) -> State:
        done = _systemctl("show", UNIT, f"--property={','.join(_PROPERTIES)}")
        return state(done.output) if done.code == 0 else State(is_loaded=False)

    def last_lines(self) -> list[str]:
        unit, lines = f"--user-unit={UNIT}", f"--lines={_LINES}"
        done = run(("journalctl", unit, lines, "--output=short-iso", "--no-pager", "--quiet"))
        why = [f"({done.why})"] if done.complaint else []  # the journal is missing, or this user may not read it
        return done.output.splitlines() or why

    def advice(self) -> list[str]:
        name = self._place.environment.get("USER") or str(self._place.user)
        done = run(("loginctl", "show-user", name, "--property=Linger", "--value"))
        if done.output.strip() == "yes":
            return []
        return [f"it runs while you are logged in; to keep it running always: loginctl enable-linger {name}"]

    def _refusal(self, verb: str, done: Done) -> ConfigError:
        return ConfigError(
            f"systemd did not {verb} {self.file} ({done.why}); "
            f"`systemctl --user status {shlex.quote(self.file.name)}` says more"
        )


def _systemctl(*words: str) -> Done:
    return run(("systemctl", "--user", *words))
