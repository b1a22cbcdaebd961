"""Machines of recorded outputs; ``recorded/README.txt`` says which are assumed."""

import json
from collections.abc import Mapping
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any

from splitinfer.probes.evidence import Printed, SeenHere
from splitinfer.system.free_memory import MemoryPages, parse_vm_stat
from splitinfer.system.interface_kind import Kind, LocalInterface
from splitinfer.system.origin import ProcessOrigin, Start

GIB = 2**30
UV = "/Users/me/.local/share/uv/python/cpython-3.13/bin/python3.13"
RECORDED = Path(__file__).parent / "recorded"
RDMA_READY = {
    "thunderbolt": "thunderbolt_tb5_studio.json",
    "hardware_ports": "networksetup.txt",
    "interfaces": "ifconfig_ready.txt",
    "rdma": "rdma_ctl_enabled.txt",
    "states": "ibv_devinfo_active.txt",
}
"""Of a Mac whose RDMA can be used: the file of each command's output."""
WELL = {
    "macos": "sw_vers_26_3.txt",
    "power": "pmset_studio.txt",
    "firewall": "firewall_off.txt",
    "firewall_apps": "firewall_apps.txt",
    **RDMA_READY,
}


def interface(name: str, kind: Kind, network: str) -> LocalInterface:
    return LocalInterface(name, kind, (IPv4Interface(network),))


INTERFACES = (
    interface("en0", Kind.CABLE, "192.168.1.11/24"), interface("en1", Kind.WIRELESS, "192.168.1.12/24"),
    interface("bridge0", Kind.THUNDERBOLT, "10.77.0.1/24"),
)  # fmt: skip


def said(name: str) -> Printed:
    """What a recorded command said; without a name, that there is no such command."""
    return Printed((RECORDED / name).read_text(encoding="utf-8")) if name else Printed(None, "there is none here")


def altered(name: str, *changes: tuple[str, str]) -> Printed:
    """What a recorded command would have said with other words."""
    text = (RECORDED / name).read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return Printed(text)


def recabled(target: str, *, is_second: bool = False) -> Printed:
    """What the studio says with its cable at receptacle ``target`` in place of 2, or with a second one there."""
    said = json.loads((RECORDED / RDMA_READY["thunderbolt"]).read_text(encoding="utf-8"))
    buses = {bus["receptacle_1_tag"]["receptacle_id_key"]: bus for bus in said["SPThunderboltDataType"]}
    if is_second:
        connected = {**buses["2"]["receptacle_1_tag"], "receptacle_id_key": target}
        buses[target] |= {"receptacle_1_tag": connected, "_items": buses["2"]["_items"]}
    else:
        for at, other in (("2", target), (target, "2")):
            buses[at]["receptacle_1_tag"]["receptacle_id_key"] = other
    return Printed(json.dumps(said))


def pages(name: str) -> MemoryPages:
    """What macOS counted once."""
    return parse_vm_stat((RECORDED / name).read_text(encoding="utf-8"))


def mac(changes: Mapping[str, str | Printed] | None = None, **more: Any) -> SeenHere:
    """A Mac with 64 GiB on which all is well, but for ``changes``: other files, or answers."""
    chosen = {**WELL, **(changes or {})}
    outputs = {name: each if isinstance(each, Printed) else said(each) for name, each in chosen.items()}
    known: dict[str, Any] = {
        "memory": 64 * GIB,
        "pages": pages("vm_stat_roomy.txt"),
        "interfaces": INTERFACES,
        "origin": ProcessOrigin(Start.TERMINAL),
        "executable": UV,
        "prefix": "/uv",
    }
    return SeenHere(outputs, **{"system": "Darwin", "has_jaccl": True, **known, **more})
