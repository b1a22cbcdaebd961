"""Recorded outputs of macOS's commands, and whatever else comes, are read without an error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitinfer.probes import parsing
from splitinfer.probes.parsing import Job, Port, PowerSettings
from splitinfer.system import network
from splitinfer.system.network import Interface
from transports.rdma.probe import parse_devices, parse_states

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8")


def test_ports_of_a_studio_with_a_mac_and_a_disk():
    assert parsing.thunderbolt_ports(recorded("thunderbolt_tb5_studio.json")) == (
        Port("1", 120.0, False, None),
        Port("2", 80.0, True, "MacBook Pro"),
        Port("3", 120.0, False, None),
        Port("4", 80.0, True, None),  # a disk is no Mac
        Port("5", 120.0, False, None),
        Port("6", 120.0, False, None),
    )


def test_a_docks_free_receptacles_are_not_this_machines():
    assert parsing.thunderbolt_ports(recorded("thunderbolt_tb5_dock.json")) == (
        Port("1", 120.0, False, None),
        Port("2", 40.0, True, None),
        Port("3", 80.0, True, None),
    )


def test_ports_of_thunderbolt_4():
    air = parsing.thunderbolt_ports(recorded("thunderbolt_tb4_air.json"))
    assert air == (Port("1", 40.0, False, None), Port("2", 40.0, False, None))
    mini = parsing.thunderbolt_ports(recorded("thunderbolt_tb4_mac_connected.json"))
    assert mini is not None
    assert mini[0] == Port("1", 40.0, True, "Mac mini")


def test_a_mac_behind_a_dock_is_found():
    whole = json.loads(recorded("thunderbolt_tb5_dock.json"))
    studio = json.loads(recorded("thunderbolt_tb5_studio.json"))
    mac = studio["SPThunderboltDataType"][4]["_items"]
    whole["SPThunderboltDataType"][0]["_items"][0]["_items"] = mac
    ports = parsing.thunderbolt_ports(json.dumps(whole))
    assert ports is not None
    assert ports[2].mac == "MacBook Pro"


def test_no_thunderbolt():
    assert parsing.thunderbolt_ports(recorded("thunderbolt_none.json")) == ()
    assert parsing.thunderbolt_ports("") is None
    assert parsing.thunderbolt_ports("[]") is None
    assert parsing.thunderbolt_ports('{"SPThunderboltDataType": {}}') is None


def test_rdma_devices():
    assert parse_devices(recorded("ibv_devices_three.txt")) == ("rdma_en2", "rdma_en3", "rdma_en4")
    assert parse_devices(recorded("ibv_devices_none.txt")) == ()


def test_port_states():
    down = dict.fromkeys(("rdma_en1", "rdma_en6", "rdma_en2"), "PORT_DOWN")
    assert parse_states(recorded("ibv_devinfo_down.txt")) == down
    assert parse_states(recorded("ibv_devinfo_active.txt"))["rdma_en3"] == "PORT_ACTIVE"
    assert parse_states(recorded("ibv_devinfo_none.txt")) == {}


def test_rdma_ctl():
    assert parsing.rdma_is_enabled(recorded("rdma_ctl_enabled.txt")) is True
    assert parsing.rdma_is_enabled(recorded("rdma_ctl_disabled.txt")) is False
    assert parsing.rdma_is_enabled("RDMA: Disabled") is False
    for unclear in ("", "not enabled", "enabled on one, disabled on another", "permission denied"):
        assert parsing.rdma_is_enabled(unclear) is None


def test_interfaces():
    bridged = network.interfaces(recorded("ifconfig_bridged.txt"))
    assert bridged["bridge0"] == Interface(True, ("169.254.90.11",), ("en2", "en3", "en4"))
    assert bridged["en0"] == Interface(True, ("192.168.1.11",))
    ready = network.interfaces(recorded("ifconfig_ready.txt"))
    assert not ready["bridge0"].is_up
    assert ready["en3"].ipv4 == ("192.168.90.1",)
    assert list(ready) == ["lo0", "gif0", "stf0", "en0", "en2", "en3", "en4", "bridge0"]


def test_hardware_ports():
    assert network.hardware_ports(recorded("networksetup.txt")) == {
        "Ethernet": "en0", "Wi-Fi": "en1", "Thunderbolt Bridge": "bridge0",
        "Thunderbolt 1": "en2", "Thunderbolt 2": "en3", "Thunderbolt 3": "en4",
    }  # fmt: skip


def test_versions_and_limits():
    assert parsing.version(recorded("sw_vers_26.txt")) == (26, 2)
    assert parsing.version(recorded("sw_vers_15.txt")) == (15, 7, 1)
    assert parsing.version("ProductName:\t\tmacOS\nProductVersion:\t\t26.3\nBuildVersion:\t\t25D5087f\n") == (26, 3)
    assert parsing.wired_limit(recorded("sysctl_wired_default.txt")) == 0
    assert parsing.wired_limit(recorded("sysctl_wired_set.txt")) == 26000
    assert parsing.wired_limit("sysctl: unknown oid 'iogpu.wired_limit_mb'") is None


def test_swap():
    assert parsing.swap_used(recorded("swap_used.txt")) == int(11625.69 * 2**20)
    assert parsing.swap_used(recorded("swap_none.txt")) == 0


def test_networks():
    found = network.networks(recorded("ifconfig_ready.txt"))
    assert {name: [str(each) for each in nets] for name, nets in found.items()} == {
        "lo0": ["127.0.0.1/8"], "en0": ["192.168.1.11/24"], "en3": ["192.168.90.1/30"]
    }  # fmt: skip


def test_routes():
    assert network.route_interface(recorded("route_wifi.txt")) == "en1"
    assert network.route_interface(recorded("ip_route.json")) == "eth0"


def test_power():
    assert parsing.power_settings(recorded("pmset_studio.txt")) == PowerSettings(0, False, False)  # 2 is high power
    assert parsing.power_settings(recorded("pmset_laptop.txt")) == PowerSettings(1, True, False)
    assert parsing.power_settings(recorded("pmset_sleep_disabled.txt")) == PowerSettings(1, False, True)
    assert parsing.power_settings("no settings") is None
    assert parsing.battery_percent(recorded("pmset_batt_ac.txt")) is None
    assert parsing.battery_percent(recorded("pmset_batt_battery.txt")) == 43
    assert parsing.speed_limit(recorded("pmset_therm_none.txt")) is None
    assert parsing.speed_limit(recorded("pmset_therm_limited.txt")) == 28


def test_the_firewall():
    states = [parsing.firewall_state(recorded(f"firewall_{name}.txt")) for name in ("off", "on", "blocking")]
    assert states == [0, 1, 2]
    assert parsing.is_on(recorded("firewall_block_all_on.txt"))
    assert parsing.is_on(recorded("firewall_stealth_off.txt")) is False
    apps = parsing.listed_apps(recorded("firewall_apps.txt"))
    assert apps is not None
    assert len(apps) == 5
    assert apps["/usr/bin/python3"]
    assert not apps["/usr/libexec/sshd-session"]
    assert parsing.listed_apps("Must be root to list the apps") is None


def test_a_job_of_launchd():
    path = "/Users/me/Library/LaunchAgents/io.splitinfer.worker.plist"
    running = Job("io.splitinfer.worker", path, "running", "interactive", 28474, "")
    assert parsing.job(recorded("launchctl_interactive.txt")) == running  # its coalition's state is "active"
    ended = parsing.job(recorded("launchctl_ended.txt"))
    assert ended is not None
    assert (ended.state, ended.spawn_type, ended.pid, ended.last_exit) == (
        "spawn scheduled", "daemon", None, "78: EX_CONFIG"
    )  # fmt: skip
    assert parsing.job("Bad request.\nCould not find service") is None


def test_gpus():
    first, second = parsing.gpus(recorded("nvidia_busy.txt"))
    assert (first.is_throttled, second.is_throttled) == (False, True)
    assert (second.memory, second.used) == (24564, 20110)
    assert parsing.gpus("NVIDIA GB10, 580.95.05, [N/A], [N/A], Not Active, Not Active")[0].memory is None
    assert parsing.gpus(recorded("nvidia_no_driver.txt")) == []


# -- what is no output of theirs ---------------------------------------------------------------------------------------

READERS: list[Callable[[str], Any]] = [
    parsing.version, parsing.wired_limit, parsing.swap_used, parsing.rdma_is_enabled, parse_devices, parse_states,
    parsing.thunderbolt_ports,
    network.interfaces, network.networks, network.hardware_ports, network.route_interface,
    parsing.power_settings, parsing.battery_percent, parsing.speed_limit,
    parsing.firewall_state, parsing.is_on, parsing.listed_apps, parsing.job, parsing.gpus,
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
        "pid 7(",
        "sleep 1",
        "interface: en0",
        "gui/501/x = {",
        "(State = 1)",
        " used = 1,5M",
    ]
)


@pytest.mark.parametrize("read", READERS)
@settings(max_examples=60, deadline=None)
@given(st.text() | st.lists(WORDS | st.text(max_size=8)).map("".join))
def test_any_text(read: Callable[[str], Any], text: str):
    read(text)


@pytest.mark.parametrize("read", READERS)
def test_outputs_of_other_commands_and_halves(read: Callable[[str], Any]):
    for name in FILES:
        text = recorded(name)
        for end in range(0, len(text), max(1, len(text) // 12)):
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
    parsing.thunderbolt_ports(json.dumps({"SPThunderboltDataType": document}))
    parsing.thunderbolt_ports(json.dumps({"SPThunderboltDataType": [document]}))


def test_a_document_without_a_bottom():
    assert parsing.thunderbolt_ports("[" * 100_000) is None
    deep: dict[str, Any] = {"domain_uuid_key": "x", "_name": "at the bottom"}
    for _ in range(50):
        deep = {"_items": [deep]}
    tag = {"receptacle_status_key": "receptacle_connected", "current_speed_key": "80 Gb/s"}
    found = parsing.thunderbolt_ports(json.dumps({"SPThunderboltDataType": [{**deep, "receptacle_1_tag": tag}]}))
    assert found == (Port("?", 80.0, True, None),)
