"""Thunderbolt and RDMA: ``system_profiler SPThunderboltDataType -json`` and ``rdma_ctl status``."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_DEPTH = 20  # devices behind devices, at most


@dataclass(frozen=True, slots=True)
class Port:
    """A Thunderbolt port. ``gigabits``: of the link in a second, or the most possible with nothing connected; ``mac``:
    the name of the Mac at the other end of its cable."""

    receptacle: str
    gigabits: float | None
    is_connected: bool
    mac: str | None


def rdma_is_enabled(text: str) -> bool | None:
    """Whether ``rdma_ctl status`` reports RDMA as enabled."""
    words = set(re.findall(r"[a-z]+", text.lower()))
    if {"enabled", "disabled"} <= words or "not" in words:
        return None
    return True if "enabled" in words else False if "disabled" in words else None


def thunderbolt_ports(text: str) -> tuple[Port, ...] | None:
    """This machine's ports, from ``system_profiler SPThunderboltDataType -json``; ``None``: it is some other text."""
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
            yield Port(receptacle, _gigabits(_text(tag, "current_speed_key")), is_connected, mac)


def _macs_of(node: Mapping[str, Any], depth: int) -> Iterator[str]:
    """The names of connected hosts: unlike devices, they have a domain of their own."""
    items = node.get("_items")
    for item in items if isinstance(items, list) and depth else []:
        if isinstance(item, dict):
            if _text(item, "domain_uuid_key"):
                yield _text(item, "_name") or "another host"
            yield from _macs_of(item, depth - 1)


def _gigabits(text: str) -> float | None:
    """
    >>> _gigabits("Up to 120 Gb/s"), _gigabits("40 Gb/s"), _gigabits("")
    (120.0, 40.0, None)
    """
    found = re.search(r"(\d{1,5}(?:\.\d{1,3})?) Gb/s", text)
    return float(found[1]) if found else None


def _text(mapping: Mapping[str, Any], key: str) -> str:
    value = mapping.get(key)
    return value if isinstance(value, str) else ""
