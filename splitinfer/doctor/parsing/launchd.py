"""A job of launchd: ``launchctl print gui/UID/LABEL`` and ``launchctl print system/LABEL``.

launchctl(1) says that its output is for people, and no interface; what is not found is ``None``.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """A job that launchd knows.

    path: of its property list. state: "running", "not running", "spawn scheduled" ...
    spawn_type: "interactive", "daemon" (its ProcessType is standard, or not given), "adaptive" or "background".
    last_exit: its exit code, or the signal, the last time it ended; "" if it never did.
    """

    label: str
    path: str
    state: str
    spawn_type: str
    pid: int | None
    last_exit: str


def job(text: str) -> Job | None:
    """The job that ``launchctl print`` describes; ``None``: there is none."""
    head = re.match(r"\s*(?:gui|user|system|login)(?:/\d+)?/([\w.-]+) = \{", text)
    if head is None:
        return None
    found = dict(re.findall(r"^\t(\w[\w ]*) = ([^\n{]+?)[ \t]*$", text, re.MULTILINE))
    pid = found.get("pid", "")
    spawn_type = re.match(r"[a-z]+", found.get("spawn type", ""))
    last_exit = found.get("last exit code", "")
    return Job(
        label=head[1],
        path=found.get("path", ""),
        state=found.get("state", ""),
        spawn_type=spawn_type[0] if spawn_type else "",
        pid=int(pid) if re.fullmatch(r"[0-9]{1,9}", pid) else None,
        last_exit="" if last_exit.startswith("(") else last_exit,
    )
