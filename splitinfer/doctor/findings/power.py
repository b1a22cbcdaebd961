"""Sleep, low power mode, battery, heat.

A sleeping Mac answers nobody. splitinfer prevents idle sleep while it has work (``system.keep_awake``); a worker that
waits for a coordinator does not. ``pmset`` sets for all power sources with ``-a`` and for mains with ``-c`` (pmset(1)).
"""

from collections.abc import Iterator

from splitinfer.doctor.findings.finding import Finding, Seen, Severity
from splitinfer.doctor.parsing import power
from splitinfer.system.assertions import Assertion, parse_assertions

AREA = "power"
_KEEPERS = ("caffeinate", "splitinfer", "amphetamine")


def findings(seen: Seen) -> Iterator[Finding]:
    """Findings on a Mac's power; none elsewhere."""
    settings = seen.read("power", power.power_settings)
    if settings is not None and settings.sleep and not settings.is_sleep_disabled:
        yield _sleep(seen, settings.sleep)
    if settings is not None and settings.is_low_power:
        text = "low power mode is on, which slows the processor and the GPU"
        yield Finding(AREA, Severity.WARNING, text, "sudo pmset -a lowpowermode 0")
    left = seen.read("battery", power.battery_percent)
    if left is not None:
        text = f"this Mac runs on its battery ({left} %): it sleeps earlier, and may be slower"
        yield Finding(AREA, Severity.WARNING, text, "plug it in")
    limit = seen.read("thermal", power.speed_limit)
    if limit is not None and limit < 100:
        text = f"the processor is limited to {limit} % of its speed by heat"
        yield Finding(AREA, Severity.WARNING, text, "let it cool, and free its vents")


def _sleep(seen: Seen, minutes: int) -> Finding:
    text = f"this Mac sleeps after {minutes} minute{'s' if minutes > 1 else ''} without a person at it"
    held = seen.read("assertions", parse_assertions) or ()
    keepers = [each for each in held if each.prevents_idle_sleep and _is_lasting(each)]
    remedy = "sudo pmset -c sleep 0"
    if keepers:
        awake = f"{keepers[0].program} (pid {keepers[0].pid}) keeps it awake now"
        return Finding(AREA, Severity.NOTE, f"{text}; {awake}", f"for good: {remedy}")
    return Finding(AREA, Severity.WARNING, f"{text}, and then no coordinator can reach a worker here", remedy)


def _is_lasting(assertion: Assertion) -> bool:
    """Whether somebody wants the machine awake for long; macOS's own services do for seconds."""
    return any(name in f"{assertion.program} {assertion.name}".lower() for name in _KEEPERS)
