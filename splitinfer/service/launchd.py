"""Manages a LaunchAgent: its property list, and its state by launchctl.

Sources: launchd.plist(5) and launchctl(1) of macOS 15. The purpose of the keys:

    ProcessType Interactive   no limits of resources; any other agent is throttled: efficiency cores, slow disk
    KeepAlive SuccessfulExit  false: started again after a crash or exit code 1 (a device that failed, a port in use),
                              not after exit code 0, which follows SIGTERM: somebody stopped it.
    ThrottleInterval          seconds from one start to the next, at least; 10 is launchd's own value
    ExitTimeOut               seconds from SIGTERM to SIGKILL
    LimitLoadToSessionType    not given, so Aqua: the agent runs while its user is logged in on the screen

``launchctl print`` is "NOT API in any sense at all" (launchctl(1)): every field that is read here may be missing. Lines
indented by one tab belong to the service, deeper ones to its parts, which have states of their own.
"""

import plistlib
import re
from collections.abc import Mapping
from xml.parsers.expat import ExpatError

from splitinfer.errors import ConfigError
from splitinfer.service.definition import LABEL, NAME, STOP_SECONDS, Definition, ServicePlace, State
from splitinfer.system.command import Done, run

_THROTTLE = 10  # seconds
_BUSY = (5, 37)  # of `launchctl bootstrap` within about 5 s of a `bootout`: headroomlabs-ai/headroom#1289
_POLL = 0.5  # seconds
_SETTLING = 15.0  # seconds for which launchd may refuse an agent after the one before: the same issue
_LINES = 8  # of the log

_FIELD = re.compile(r"^\t([a-z][a-z ]*?) = (.+)$", re.MULTILINE)


def state(printed: str) -> State:
    """Return the state of a loaded service, from the output of ``launchctl print DOMAIN/LABEL``.

    The state ``xpcproxy`` means launchd's own process, which is about to become the service and has its pid. "last
    terminating signal" replaces the exit code (seen on macOS 26: maoyadongsh/siq-agent-security#66).
    """
    fields = {name: value.strip() for name, value in reversed(_FIELD.findall(printed))}  # the first of a name counts
    runs = fields.get("state", "running") in ("running", "xpcproxy")
    return State(
        is_loaded=True,
        pid=_number(fields.get("pid")) if runs else None,
        starts=_number(fields.get("runs")),
        last_exit=_last_exit(fields),
    )


def _last_exit(fields: Mapping[str, str]) -> str | None:
    signal = fields.get("last terminating signal")
    if signal is not None:
        return f"signal {signal.rpartition(':')[2].strip()}"
    code = fields.get("last exit code", "")
    if code.startswith("78"):
        return "exit code 78: the program could not be started"
    return f"exit code {code.partition(':')[0]}" if code[:1].isdigit() else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


class Launchd:
    """Keeps one service running, as an agent of the user's screen session. See ``actions.Manager``."""

    def __init__(self, place: ServicePlace) -> None:
        self._place = place
        self._domain = f"gui/{place.user}"
        self._target = f"{self._domain}/{LABEL}"
        self._log = place.home / "Library" / "Logs" / "splitinfer" / f"{NAME}.log"
        self.file = place.home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        self.log = str(self._log)

    def check(self) -> None:
        done = _launchctl("print", self._domain)
        if done.code != 0:  # 112 and 125: nobody is logged in
            raise ConfigError(
                f"launchd has no session for you in which a {NAME} could run ({done.why}): log in on "
                "this Mac's screen, or let it log you in by itself (System Settings > Users & Groups); then install it"
            )

    def text(self, definition: Definition) -> bytes:
        environment = {"EnvironmentVariables": dict(definition.environment)} if definition.environment else {}
        described = {
            "Label": LABEL,
            "ProgramArguments": list(definition.command),
            **environment,
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _THROTTLE,
            "ExitTimeOut": STOP_SECONDS,
            "ProcessType": "Interactive",
            "StandardOutPath": self.log,
            "StandardErrorPath": self.log,
        }
        return plistlib.dumps(described, sort_keys=False)

    def read(self, text: bytes) -> Definition | None:
        try:
            found = plistlib.loads(text)
            environment = {str(name): str(value) for name, value in found.get("EnvironmentVariables", {}).items()}
            return Definition(tuple(map(str, found.get("ProgramArguments", ()))), environment)
        except (ValueError, TypeError, AttributeError, ExpatError):
            return None

    def start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self.stop()
        _launchctl("enable", self._target)  # somebody may have disabled it; bootstrap would then report error 5
        for _ in range(int(_SETTLING / _POLL)):
            done = _launchctl("bootstrap", self._domain, str(self.file))
            if done.code not in _BUSY:
                break
            self._place.sleep(_POLL)
        if done.code != 0:
            why = done.why.replace("Try re-running the command as root for richer errors.", "").strip()
            raise ConfigError(
                f"launchd did not take {self.file} ({why}); `plutil -lint` and "
                "`log show --last 2m --predicate 'process == \"launchd\"'` say more"
            )
        _launchctl("kickstart", self._target)  # no harm if RunAtLoad has done it; openbase-community/openbase#15

    def stop(self) -> None:
        _launchctl("bootout", self._target)
        for _ in range(int((STOP_SECONDS + _SETTLING) / _POLL)):  # bootout returns before it is gone
            if not self.state().is_loaded:
                return
            self._place.sleep(_POLL)
        raise ConfigError(f"launchd has not let go of {self._target}; `launchctl print {self._target}` says why")

    def forget(self) -> None:
        pass

    def state(self) -> State:
        done = _launchctl("print", self._target)
        return state(done.output) if done.code == 0 else State(is_loaded=False)

    def last_lines(self) -> list[str]:
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - 2**14))
                return file.read().decode(errors="replace").splitlines()[-_LINES:]
        except OSError:
            return []

    def advice(self) -> list[str]:
        return [
            "macOS 15 and newer ask on this Mac's screen whether it may find devices on local networks: allow it, or "
            "others reach it and it reaches nobody: \"No route to host\" (System Settings > Privacy & "
            "Security > Local Network; an agent is asked, what runs in Terminal or over ssh is not: TN3179)",
            "it runs while you are logged in on the screen: let this Mac log you in by itself after a restart",
        ]  # fmt: skip


def _launchctl(*words: str) -> Done:
    return run(("launchctl", *words))
