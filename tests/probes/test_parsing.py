"""Recorded outputs of macOS's commands, and whatever else comes, are read without an error."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from recordings import said

from splitinfer.probes import parsing
from splitinfer.probes.parsing import Port, PowerSettings
from splitinfer.system.interfaces import Interface, parse_ifconfig
from transports.rdma.probe import parse_states

# What the findings on a recorded machine say already (test_findings, test_rdma_probes) is not repeated here.
SAID: list[tuple[Callable[[str], Any], str, Any]] = [
    (parsing.thunderbolt_ports, "thunderbolt_tb5_studio.json", tuple(
        Port(number, speed, mac is not None or number == "4", mac, "Mac Studio")  # a disk is no Mac
        for number, speed, mac in (
            ("1", 120.0, None), ("2", 80.0, "MacBook Pro"), ("3", 120.0, None), ("4", 80.0, None),
            ("5", 120.0, None), ("6", 120.0, None),
        )
    )),
    (parsing.thunderbolt_ports, "thunderbolt_tb5_dock.json", (  # a dock's free receptacles are not this machine's
        Port("1", 120.0, False, None, "MacBook Pro"), Port("2", 40.0, True, None, "MacBook Pro"),
        Port("3", 80.0, True, None, "MacBook Pro"),
    )),
    (parsing.thunderbolt_ports, "thunderbolt_tb4_air.json", (
        Port("1", 40.0, False, None, "MacBook Air"), Port("2", 40.0, False, None, "MacBook Air"),
    )),
    (parse_states, "ibv_devinfo_none.txt", {}),
    (lambda text: parse_ifconfig(text)["bridge0"], "ifconfig_bridged.txt",
     Interface(True, ("169.254.90.11",), ("en2", "en3", "en4"))),
    (lambda text: list(parse_ifconfig(text)), "ifconfig_ready.txt",
     ["lo0", "gif0", "stf0", "en0", "en2", "en3", "en4", "bridge0"]),
    (parsing.power_settings, "pmset_studio.txt", PowerSettings(0, False, False, 0)),  # 2 is high power
]  # fmt: skip


@pytest.mark.parametrize(("read", "name", "found"), SAID)
def test_what_is_recorded_is_read(read: Callable[[str], Any], name: str, found: Any):
    assert read(said(name).text) == found


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (parsing.thunderbolt_ports, ""), (parsing.thunderbolt_ports, "[]"),
        (parsing.thunderbolt_ports, '{"SPThunderboltDataType": {}}'), (parsing.rdma_is_enabled, "not enabled"),
        (parsing.rdma_is_enabled, "enabled on one, disabled on another"), (parsing.rdma_is_enabled,
        "permission denied"),
        (parsing.power_settings, "no settings"),
        (parsing.listed_apps, "Must be root to list the apps"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_none(read: Callable[[str], Any], text: str):
    assert read(text) is None


def test_a_document_without_a_bottom():
    assert parsing.thunderbolt_ports("[" * 100_000) is None
    deep: dict[str, Any] = {"domain_uuid_key": "x", "_name": "at the bottom"}
    for _ in range(50):
        deep = {"_items": [deep]}
    tag = {"receptacle_status_key": "receptacle_connected", "current_speed_key": "80 Gb/s"}
    found = parsing.thunderbolt_ports(json.dumps({"SPThunderboltDataType": [{**deep, "receptacle_1_tag": tag}]}))
    assert found == (Port("?", 80.0, True, None),)
