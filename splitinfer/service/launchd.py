"""A LaunchAgent: its property list, and what launchctl says of it. Pure.

Sources: launchd.plist(5) and launchctl(1) of macOS 15. What the keys are for:

    ProcessType Interactive   "Interactive jobs run with the same resource limitations as apps, that is to say, none."
                              Any other agent is throttled: efficiency cores, slow disk, coalesced timers.
    KeepAlive SuccessfulExit  false: started again after a crash or exit code 1 (a device that failed, a port in use),
                              not after exit code 0, which is what SIGTERM gives: somebody stopped it.
    ThrottleInterval          seconds from one start to the next, at least. 10 is launchd's own value: a worker that has
                              run for longer is back at once, one that cannot start tries six times a minute.
    ExitTimeOut               seconds from SIGTERM to SIGKILL.
    LimitLoadToSessionType    not given, so Aqua: the agent runs while its user is logged in on the screen.

``launchctl print`` is "NOT API in any sense at all" (launchctl(1)): everything that is read here may be missing. Lines
of one tab belong to the service, deeper ones to its parts, which have states of their own.
"""

import plistlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError

from splitinfer.service.definition import Definition, Installed, Service, State

THROTTLE = 10  # seconds
NOT_THERE = 113  # of `launchctl print` and `bootout`: "Could not find service"
_BUSY = (5, 37)  # of `launchctl bootstrap` within about 5 s of a `bootout`: headroomlabs-ai/headroom#1289

_FIELD = re.compile(r"^\t([a-z][a-z ]*?) = (.+)$", re.MULTILINE)
_DESCRIBED = ("Label", "ProgramArguments", "EnvironmentVariables")


def plist(definition: Definition, log: Path) -> bytes:
    """The text of the agent's property list. ``log``: the file that its output is appended to."""
    described: dict[str, Any] = {
        "Label": definition.service.label,
        "ProgramArguments": list(definition.command),
        "EnvironmentVariables": dict(definition.environment),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": THROTTLE,
        "ExitTimeOut": definition.service.stop_seconds,
        "ProcessType": "Interactive",
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
    }
    if not definition.environment:
        del described["EnvironmentVariables"]
    return plistlib.dumps(described, sort_keys=False)


def installed(text: bytes) -> Installed | None:
    """What a property list describes; ``None`` if it is none."""
    try:
        found = plistlib.loads(text)
        command, environment = found.get("ProgramArguments", ()), found.get("EnvironmentVariables", {})
        other = {str(key): str(value) for key, value in found.items() if key not in _DESCRIBED}
        return Installed(tuple(map(str, command)), {str(k): str(v) for k, v in environment.items()}, other)
    except (ValueError, TypeError, AttributeError, ExpatError):
        return None


def state(printed: str) -> State:
    """What ``launchctl print DOMAIN/LABEL`` says of a service that is loaded.

    ``xpcproxy`` as its state is launchd's own process on the way to becoming the service; the pid is the service's.
    "last terminating signal" takes the place of an exit code (seen on macOS 26: maoyadongsh/siq-agent-security#66).
    """
    fields: dict[str, str] = {}
    for name, value in _FIELD.findall(printed):
        fields.setdefault(name, value.strip())
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


def is_busy(code: int) -> bool:
    """Whether ``launchctl bootstrap`` may succeed a moment later: the agent before is not quite gone."""
    return code in _BUSY


def no_session(service: Service, why: str) -> str:
    """The sentence where the user's GUI domain does not exist: nobody is logged in (codes 112 and 125)."""
    return (
        f"launchd has no session for you in which a {service.name} could run ({why}): log in on this Mac's screen, or "
        f"let it log you in by itself (System Settings > Users & Groups), and install it then"
    )


def refusal(code: int, complaint: str, file: Path) -> str:
    """The sentence about a ``launchctl bootstrap`` that failed; error 5 may also be about the file."""
    return (
        f"launchd did not take {file} ({_one_line(complaint) or f'exit code {code}'}); `plutil -lint` and "
        f"`log show --last 2m --predicate 'process == \"launchd\"'` say more"
    )


def _one_line(text: str) -> str:
    return " ".join(text.replace("Try re-running the command as root for richer errors.", "").split())[:200]
