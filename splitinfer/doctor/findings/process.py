"""How workers are scheduled here, and what else of splitinfer runs.

launchd applies resource limits to a job by its ProcessType: none to interactive ones, light ones to standard ones and
to those that name none, which throttle processor and disk (launchd.plist(5)). Background ones run on efficiency cores,
and their GPU work was seen to be eight times slower (dryvist/nix-ai PR 916); standard ones get priority 20 instead of
31 (traycerai/traycer PR 705).
"""

import shlex
from collections.abc import Iterator

from splitinfer.doctor.findings.finding import Finding, Seen, Severity
from splitinfer.doctor.parsing.launchd import Job, job

AREA = "process"
LABEL = "io.splitinfer.worker"


def findings(seen: Seen) -> Iterator[Finding]:
    """Findings on the service and on other processes."""
    for name in ("agent", "daemon"):
        found = seen.read(name, job)
        if found is not None:
            yield from _job(found, is_daemon=name == "daemon")
    yield from _processes(seen)


def _job(found: Job, *, is_daemon: bool) -> Iterator[Finding]:
    slow = {"background": "in the background: on efficiency cores, and with a GPU several times slower"}
    lightly = "with light limits on processor and disk"
    if found.spawn_type and found.spawn_type != "interactive":
        text = f"launchd runs {found.label} {slow.get(found.spawn_type, lightly)} ({found.spawn_type})"
        yield Finding(AREA, Severity.WARNING, text, _interactive(found, is_daemon=is_daemon))
    if found.state and found.state != "running" and found.last_exit not in ("", "0"):
        target = f"system/{found.label}" if is_daemon else f"gui/$(id -u)/{found.label}"
        text = f"{found.label} does not run; it ended with {found.last_exit} last"
        yield Finding(AREA, Severity.PROBLEM, text, f"look at its log, then: launchctl kickstart -k {target}")


def _interactive(found: Job, *, is_daemon: bool) -> str:
    if not found.path.startswith("/"):
        return "let its property list have ProcessType Interactive, and load it again"
    path, domain, sudo = shlex.quote(found.path), "gui/$(id -u)", ""
    if is_daemon:
        domain, sudo = "system", "sudo "
    return (
        f"{sudo}plutil -replace ProcessType -string Interactive {path} && "
        f"{sudo}launchctl bootout {domain}/{found.label} ; {sudo}launchctl bootstrap {domain} {path}"
    )


def _processes(seen: Seen) -> Iterator[Finding]:
    slowed = [each for each in seen.processes if each.nice > 0]
    for each in slowed:
        text = f"splitinfer {each.command} (pid {each.pid}) runs with nice {each.nice}, behind other programs"
        yield Finding(AREA, Severity.WARNING, text, f"sudo renice -n 0 -p {each.pid}")
    if len(seen.processes) > 1:
        names = ", ".join(f"{each.command} (pid {each.pid})" for each in seen.processes)
        text = f"{len(seen.processes)} processes of splitinfer share this machine's memory and GPU: {names}"
        yield Finding(AREA, Severity.NOTE, text, "end those that you do not need: kill PID")
