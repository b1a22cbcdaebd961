"""Reads what the system's commands print: sw_vers, pmset, socketfilterfw, system_profiler, nvidia-smi.

Nothing here raises: what cannot be read is ``None``, or is left out.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


def version(text: str) -> tuple[int, ...] | None:
    """Return the first version number in the output of ``sw_vers``.

    >>> version("26.2.1"), version("ProductVersion:  15.7"), version("none")
    ((26, 2, 1), (15, 7), None)
    """
    found = re.search(r"\b\d{1,4}(?:\.\d{1,4}){1,3}\b", text)
    return tuple(int(part) for part in found[0].split(".")) if found else None


_DEPTH = 20  # devices behind devices, at most


@dataclass(frozen=True, slots=True)
class Port:
    """A Thunderbolt port. ``gigabits``: of the link in a second, or the most possible with nothing connected; ``mac``:
    the name of the Mac at the other end of its cable; ``model``: the machine's own, such as "Mac Studio"."""

    receptacle: str
    gigabits: float | None
    is_connected: bool
    mac: str | None
    model: str = ""


def rdma_is_enabled(text: str) -> bool | None:
    """Return whether ``rdma_ctl status`` reports RDMA as enabled."""
    words = set(re.findall(r"[a-z]+", text.lower()))
    if {"enabled", "disabled"} <= words or "not" in words:
        return None
    return True if "enabled" in words else False if "disabled" in words else None


def thunderbolt_ports(text: str) -> tuple[Port, ...] | None:
    """Return this machine's ports, from ``system_profiler SPThunderboltDataType -json``; ``None``: it is some other
    text."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return None
    buses = whole.get("SPThunderboltDataType") if isinstance(whole, dict) else None
    if not isinstance(buses, list):
        return None
    ports = [port for bus in buses if isinstance(bus, dict) for port in _ports_of(bus)]
    return tuple(sorted(ports, key=lambda port: port.receptacle))


def _ports_of(bus: Mapping[str, Any]) -> Iterator[Port]:
    for name, tag in bus.items():
        if re.fullmatch(r"receptacle_\d+_tag", str(name)) and isinstance(tag, dict):
            is_connected = _text(tag, "receptacle_status_key") == "receptacle_connected"
            receptacle = _text(tag, "receptacle_id_key") or "?"
            mac = next(_macs_of(bus, _DEPTH), None) if is_connected else None
            yield Port(
                receptacle, _gigabits(_text(tag, "current_speed_key")), is_connected, mac, _text(bus, "device_name_key")
            )


def _macs_of(node: Mapping[str, Any], depth: int) -> Iterator[str]:
    """Yield the names of connected hosts: unlike devices, they have a domain of their own."""
    items = node.get("_items")
    for item in items if isinstance(items, list) and depth else []:
        if isinstance(item, dict):
            if _text(item, "domain_uuid_key"):
                yield _text(item, "_name") or "another host"
            yield from _macs_of(item, depth - 1)


def _gigabits(text: str) -> float | None:
    """Return the Gb/s that a text of macOS names.

    >>> _gigabits("Up to 120 Gb/s"), _gigabits("40 Gb/s"), _gigabits("")
    (120.0, 40.0, None)
    """
    found = re.search(r"(\d{1,5}(?:\.\d{1,3})?) Gb/s", text)
    return float(found[1]) if found else None


def _text(mapping: Mapping[str, Any], key: str) -> str:
    value = mapping.get(key)
    return value if isinstance(value, str) else ""


LOW_POWER = 1  # of powermode; 0 is automatic, 2 high power


@dataclass(frozen=True, slots=True)
class PowerSettings:
    """The settings in use.

    sleep: minutes of idleness until the system sleeps; 0: never; ``None``: not printed.
    is_low_power: whether low power mode is on: ``lowpowermode`` or, on later Macs, ``powermode`` (alfredapp/
        low-power-mode-workflow #4, jacklandrin/OnlySwitch #168).
    is_sleep_disabled: whether sleep is turned off altogether (``pmset -a disablesleep 1``).
    display_sleep: minutes until the display sleeps, like ``sleep``.
    """

    sleep: int | None
    is_low_power: bool | None
    is_sleep_disabled: bool
    display_sleep: int | None


def power_settings(text: str) -> PowerSettings | None:
    """Return the settings in use, from ``pmset -g``; ``None``: it is some other text."""
    values = dict(re.findall(r"^ ?(\w+)[ \t]+(\d{1,9})\b", text, re.MULTILINE))
    if not {"sleep", "lowpowermode", "powermode", "SleepDisabled"} & set(values):
        return None
    mode = values.get("powermode", values.get("lowpowermode"))
    return PowerSettings(
        _number(values.get("sleep", "")),
        None if mode is None else int(mode) == LOW_POWER,
        values.get("SleepDisabled", "0") != "0",
        _number(values.get("displaysleep", "")),
    )


def firewall_state(text: str) -> int | None:
    """Return 0: off, 1: on, 2: on, and all incoming connections are blocked; from ``--getglobalstate``.

    >>> firewall_state("Firewall is blocking all non-essential incoming connections. (State = 2)")
    2
    """
    found = re.search(r"\(State = (\d)\)", text)
    return int(found[1]) if found else None


def listed_apps(text: str) -> dict[str, bool] | None:
    """Return whether each program that the firewall knows may receive connections, by its path; from ``--listapps``.

    ``None``: there is no list, as where only an administrator may see it.
    """
    if "number of apps" not in text.lower():
        return None
    form = r"^\s*\d{1,6}\s*:\s*(/[^\n]*?)\s*\n\s*\((Allow|Block) incoming connections\)"
    return {path: word == "Allow" for path, word in re.findall(form, text, re.MULTILINE | re.IGNORECASE)}


NVIDIA_FIELDS = ("name", "memory.total", "memory.used")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU; memory in MiB."""

    name: str
    memory: int | None
    used: int | None


def gpus(text: str) -> list[Gpu]:
    """Return the GPUs, from a query of ``NVIDIA_FIELDS``; a value that nvidia-smi does not know is "[N/A]".

    >>> gpus("NVIDIA H200, 143771, 512")
    [Gpu(name='NVIDIA H200', memory=143771, used=512)]
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [Gpu(row[0], _number(row[1]), _number(row[2])) for row in rows if len(row) == len(NVIDIA_FIELDS)]


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else None
