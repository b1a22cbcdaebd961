"""Recorded outputs of macOS's commands, and whatever else comes, are read without an error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitinfer.doctor import parsing as reading
from splitinfer.doctor.parsing import Interface, Port
from transports.rdma.probe import parse_devices, parse_states

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8")


def test_ports_of_a_studio_with_a_mac_and_a_disk():
    assert reading.thunderbolt_ports(recorded("thunderbolt_tb5_studio.json")) == (
        Port("1", 120.0, False, None),
        Port("2", 80.0, True, "MacBook Pro"),
        Port("3", 120.0, False, None),
        Port("4", 80.0, True, None),  # a disk is no Mac
        Port("5", 120.0, False, None),
        Port("6", 120.0, False, None),
    )


def test_a_docks_free_receptacles_are_not_this_machines():
    assert reading.thunderbolt_ports(recorded("thunderbolt_tb5_dock.json")) == (
        Port("1", 120.0, False, None),
        Port("2", 40.0, True, None),
        Port("3", 80.0, True, None),
    )


def test_ports_of_thunderbolt_4():
    air = reading.thunderbolt_ports(recorded("thunderbolt_tb4_air.json"))
    assert air == (Port("1", 40.0, False, None), Port("2", 40.0, False, None))
    mini = reading.thunderbolt_ports(recorded("thunderbolt_tb4_mac_connected.json"))
    assert mini is not None
    assert mini[0] == Port("1", 40.0, True, "Mac mini")


def test_a_mac_behind_a_dock_is_found():
    whole = json.loads(recorded("thunderbolt_tb5_dock.json"))
    studio = json.loads(recorded("thunderbolt_tb5_studio.json"))
    mac = studio["SPThunderboltDataType"][4]["_items"]
    whole["SPThunderboltDataType"][0]["_items"][0]["_items"] = mac
    ports = reading.thunderbolt_ports(json.dumps(whole))
    assert ports is not None
    assert ports[2].mac == "MacBook Pro"


def test_no_thunderbolt():
    assert reading.thunderbolt_ports(recorded("thunderbolt_none.json")) == ()
    assert reading.thunderbolt_ports("") is None
    assert reading.thunderbolt_ports("[]") is None
    assert reading.thunderbolt_ports('{"SPThunderboltDataType": {}}') is None


def test_rdma_devices():
    assert parse_devices(recorded("ibv_devices_three.txt")) == ("rdma_en2", "rdma_en3", "rdma_en4")
    assert parse_devices(recorded("ibv_devices_none.txt")) == ()


def test_port_states():
    down = dict.fromkeys(("rdma_en1", "rdma_en6", "rdma_en2"), "PORT_DOWN")
    assert parse_states(recorded("ibv_devinfo_down.txt")) == down
    assert parse_states(recorded("ibv_devinfo_active.txt"))["rdma_en3"] == "PORT_ACTIVE"
    assert parse_states(recorded("ibv_devinfo_none.txt")) == {}


def test_rdma_ctl():
    assert reading.rdma_is_enabled(recorded("rdma_ctl_enabled.txt")) is True
    assert reading.rdma_is_enabled(recorded("rdma_ctl_disabled.txt")) is False
    assert reading.rdma_is_enabled("RDMA: Disabled") is False
    for unclear in ("", "not enabled", "enabled on one, disabled on another", "permission denied"):
        assert reading.rdma_is_enabled(unclear) is None


def test_interfaces():
    bridged = reading.interfaces(recorded("ifconfig_bridged.txt"))
    assert bridged["bridge0"] == Interface(True, ("169.254.90.11",), ("en2", "en3", "en4"))
    assert bridged["en0"] == Interface(True, ("192.168.1.11",))
    ready = reading.interfaces(recorded("ifconfig_ready.txt"))
    assert not ready["bridge0"].is_up
    assert ready["en3"].ipv4 == ("192.168.90.1",)
    assert list(ready) == ["lo0", "gif0", "stf0", "en0", "en2", "en3", "en4", "bridge0"]


def test_hardware_ports():
    assert reading.hardware_ports(recorded("networksetup.txt")) == {
        "Ethernet": "en0", "Wi-Fi": "en1", "Thunderbolt Bridge": "bridge0",
        "Thunderbolt 1": "en2", "Thunderbolt 2": "en3", "Thunderbolt 3": "en4",
    }  # fmt: skip


def test_versions_and_limits():
    assert reading.version(recorded("sw_vers_26.txt")) == (26, 2)
    assert reading.version(recorded("sw_vers_15.txt")) == (15, 7, 1)
    assert reading.version("ProductName:\t\tmacOS\nProductVersion:\t\t26.3\nBuildVersion:\t\t25D5087f\n") == (26, 3)
    assert reading.wired_limit(recorded("sysctl_wired_default.txt")) == 0
    assert reading.wired_limit(recorded("sysctl_wired_set.txt")) == 26000
    assert reading.wired_limit("sysctl: unknown oid 'iogpu.wired_limit_mb'") is None


# -- what is no output of theirs ---------------------------------------------------------------------------------------

READERS: list[Callable[[str], Any]] = [
    reading.version, reading.wired_limit, reading.rdma_is_enabled, parse_devices, parse_states,
    reading.interfaces, reading.hardware_ports, reading.thunderbolt_ports,
]  # fmt: skip
FILES = sorted(path.name for path in RECORDED.iterdir())
WORDS = st.sampled_from(
    [
        "hca_id:",
        "state:",
        "\n",
        "\t",
        "member: ",
        "inet ",
        "bridge0: flags=8863<UP>",
        "Hardware Port: ",
        "Device: ",
        "{",
        "]",
    ]
)


@pytest.mark.parametrize("read", READERS)
@settings(max_examples=200, deadline=None)
@given(st.text() | st.lists(WORDS | st.text(max_size=8)).map("".join))
def test_any_text(read: Callable[[str], Any], text: str):
    read(text)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("name", FILES)
def test_outputs_of_other_commands_and_halves(read: Callable[[str], Any], name: str):
    text = recorded(name)
    for end in range(0, len(text), max(1, len(text) // 50)):
        read(text[:end])
        read(text[end:])


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.just("Up to 120 Gb/s"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["_items", "_name", "receptacle_1_tag", "current_speed_key", "receptacle_status_key"])
            | st.sampled_from(["domain_uuid_key", "receptacle_id_key", "SPThunderboltDataType"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(JSON)
def test_any_document(document: Any):
    reading.thunderbolt_ports(json.dumps({"SPThunderboltDataType": document}))
    reading.thunderbolt_ports(json.dumps({"SPThunderboltDataType": [document]}))


def test_a_document_without_a_bottom():
    assert reading.thunderbolt_ports("[" * 100_000) is None
    deep: dict[str, Any] = {"domain_uuid_key": "x", "_name": "at the bottom"}
    for _ in range(50):
        deep = {"_items": [deep]}
    tag = {"receptacle_status_key": "receptacle_connected", "current_speed_key": "80 Gb/s"}
    found = reading.thunderbolt_ports(json.dumps({"SPThunderboltDataType": [{**deep, "receptacle_1_tag": tag}]}))
    assert found == (Port("?", 80.0, True, None),)
