"""Who keeps this Mac from sleeping, from the output of ``pmset -g assertions`` (pmset(1)). Pure.

pid 366(Google Chrome): [0x0000130a00058310] 00:00:19 NoDisplaySleepAssertion named: "Video Wake Lock"
"""

import re
from dataclasses import dataclass

COMMAND = ("pmset", "-g", "assertions")

# Types of IOPMLib.h that hold off idle sleep of the system; the second is the older name of the first.
_IDLE = ("PreventUserIdleSystemSleep", "NoIdleSleepAssertion", "PreventSystemSleep")
_LINE = re.compile(r'^\s*pid (\d+)\((.*?)\): \[\w+\] [\d:]+ (\w+) named: "(.*)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Assertion:
    """One process's power assertion. ``kind``: its type; ``name``: what the process calls it."""

    pid: int
    program: str
    kind: str
    name: str

    @property
    def prevents_idle_sleep(self) -> bool:
        """Whether the machine stays awake for it (not only the display)."""
        return self.kind in _IDLE


def parse_assertions(text: str) -> tuple[Assertion, ...]:
    """The assertions of all processes, in the order of the output; those of the kernel are left out."""
    return tuple(Assertion(int(pid), program, kind, name) for pid, program, kind, name in _LINE.findall(text))
