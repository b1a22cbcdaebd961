"""Power and heat: ``pmset -g``, ``pmset -g batt`` and ``pmset -g therm``."""

import re
from dataclasses import dataclass

LOW_POWER = 1  # of powermode; 0 is automatic, 2 high power


@dataclass(frozen=True, slots=True)
class PowerSettings:
    """The settings in use.

    sleep: minutes of idleness until the system sleeps; 0: never; ``None``: not printed.
    is_low_power: whether low power mode is on: ``lowpowermode`` or, on later Macs, ``powermode`` (alfredapp/
        low-power-mode-workflow #4, jacklandrin/OnlySwitch #168).
    is_sleep_disabled: whether sleep is turned off altogether (``pmset -a disablesleep 1``).
    """

    sleep: int | None
    is_low_power: bool | None
    is_sleep_disabled: bool


def power_settings(text: str) -> PowerSettings | None:
    """The settings in use, from ``pmset -g``; ``None``: it is some other text."""
    values = dict(re.findall(r"^ ?(\w+)[ \t]+(\d{1,9})\b", text, re.MULTILINE))
    if not {"sleep", "lowpowermode", "powermode", "SleepDisabled"} & set(values):
        return None
    mode = values.get("powermode", values.get("lowpowermode"))
    sleep = values.get("sleep")
    return PowerSettings(
        None if sleep is None else int(sleep),
        None if mode is None else int(mode) == LOW_POWER,
        values.get("SleepDisabled", "0") != "0",
    )


def battery_percent(text: str) -> int | None:
    """What is left of the battery that the machine runs on, from ``pmset -g batt``; ``None``: it has other power.

    >>> battery_percent("Now drawing from 'Battery Power'\\n -InternalBattery-0 (id=1)\\t80%; discharging; 3:10")
    80
    """
    if "'Battery Power'" not in text:
        return None
    found = re.search(r"\b(\d{1,3})%", text)
    return int(found[1]) if found else None


def speed_limit(text: str) -> int | None:
    """The percentage to which heat limits the processor, from ``pmset -g therm``; ``None``: nothing was recorded.

    Apple's own chips record nothing there, even when they are throttled (macmade/Hot PR 80, exelban/stats #749).
    """
    found = re.search(r"CPU_Speed_Limit\s*=\s*(\d{1,3})\b", text)
    return int(found[1]) if found else None
