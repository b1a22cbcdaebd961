"""Interfaces, as ``ifconfig`` and ``networksetup -listallhardwareports`` print them. Pure."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface; ``members`` are the interfaces of a bridge."""

    is_up: bool
    ipv4: tuple[str, ...] = ()
    members: tuple[str, ...] = ()


def interfaces(text: str) -> dict[str, Interface]:
    """The interfaces that ``ifconfig`` lists, by name."""
    found: dict[str, Interface] = {}
    for block in _blocks(text):
        head = re.match(r"(\w+): flags=[0-9a-f]+<([^>\n]*)>", block)
        if head:
            ipv4 = re.findall(r"^\s+inet (\d+(?:\.\d+){3})\b", block, re.MULTILINE)
            members = re.findall(r"^\s+member: (\w+)\b", block, re.MULTILINE)
            found[head[1]] = Interface("UP" in head[2].split(","), tuple(ipv4), tuple(members))
    return found


def hardware_ports(text: str) -> dict[str, str]:
    """The interface of each port, from ``networksetup -listallhardwareports``."""
    return dict(re.findall(r"^Hardware Port: ([^\n]+?)[ \t]*\nDevice: (\w+)[ \t]*$", text, re.MULTILINE))


def _blocks(text: str) -> list[str]:
    return re.split(r"^(?=\S)", text, flags=re.MULTILINE)
