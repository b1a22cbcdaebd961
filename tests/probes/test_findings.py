"""What is wrong with a machine is named once, with a remedy to paste; a machine that is well has no findings."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordings import GIB, INTERFACES, RECORDED, UV, WELL, altered, interface, mac, pages, recabled, said

from splitinfer.probes.evidence import LINUX, MACOS, Printed, SeenHere, WayThere
from splitinfer.probes.findings import every_finding
from splitinfer.system.interface_kind import Kind
from splitinfer.system.origin import ProcessOrigin, Start
from splitinfer.system.processes import Process


def ours(pid: int, command: str) -> Process:
    return Process(pid, ("splitinfer", command))


PYTHON = "/opt/homebrew/Cellar/python@3.13/3.13.1/Frameworks/Python.framework/Versions/3.13"


def linux(nvidia: str = "", **more: Any) -> SeenHere:
    output = said(nvidia) if nvidia else Printed(None, "there is no nvidia-smi here")
    return SeenHere({"nvidia": output}, "Linux", **{"has_jaccl": False, **more})


def way(own: str | None, address: str = "192.168.1.7") -> WayThere:
    return WayThere("mini", "mini.local", address, own)


def test_a_mac_that_is_well():
    assert set(WELL) == set(MACOS)
    assert every_finding(mac()) == []
    assert every_finding(mac(ways=(way("10.77.0.1", "10.77.0.2"),))) == []


def test_a_linux_machine_that_is_well():
    assert set(linux().outputs) == set(LINUX)
    assert every_finding(linux(memory=64 * GIB, available=60 * GIB)) == []
    assert every_finding(linux("nvidia_h200.txt", memory=64 * GIB, available=60 * GIB, on_gpu=True)) == []


WIFI = (interface("eth0", Kind.WIRELESS, "10.0.0.1/8"),)
VPN = (interface("utun3", Kind.VPN, "10.8.0.2/32"),)
ONE_NETWORK = (INTERFACES[0], interface("bridge0", Kind.THUNDERBOLT, "192.168.1.23/24"))
ON = {"firewall": "firewall_on.txt"}
DISPLAY = altered("pmset_studio.txt", ("displaysleep         0", "displaysleep         10"))
WRONG: dict[str, tuple[SeenHere, str, str, str, str]] = {
    "swap": (mac(swapped=12_200_000_000), "memory", "warning", "12.2 GB are in swap files", "quit programs"),
    "memory full": (
        mac(pages=pages("vm_stat_tight.txt")), "memory", "warning", "of 68.7 GB are available (app memory 46.9 GB",
        "fewer layers",
    ),
    "wired limit": (
        mac(wired_limit=26000 * 2**20, memory=24 * GIB), "memory", "warning", "26000, which leaves macOS",
        "sudo sysctl iogpu.wired_limit_mb=20889",
    ),
    "battery": (mac(battery=80), "power", "warning", "runs on its battery (80 %)", "plug it in"),
    "sleep": (
        mac({"power": "pmset_laptop.txt"}), "power", "warning", "sleeps after 1 minute without",
        "sudo pmset -c sleep 0",
    ),
    "firewall blocks all": (
        mac({"firewall": "firewall_blocking.txt"}), "firewall", "failed", "blocks all incoming",
        "socketfilterfw --setblockall off",
    ),
    "firewall blocks Python": (
        mac(ON, executable=f"{PYTHON}/bin/python3.13", prefix=PYTHON), "firewall", "failed",
        f"blocks connections to {PYTHON}/Resources/Python.app", f"--unblockapp {PYTHON}/Resources/Python.app",
    ),
    "firewall asks": (mac(ON), "firewall", "note", "does not know this Python", f"--add {UV} && sudo"),
    "an agent": (
        mac(origin=ProcessOrigin(Start.AGENT, "io.splitinfer.worker")), "local network", "note",
        "what agent io.splitinfer.worker starts", "or use Terminal or ssh",
    ),
    "two processes": (
        mac(processes=(ours(7, "worker"), ours(8, "coord"))), "process", "note",
        "2 processes of splitinfer share", "kill PID",
    ),
    "Wi-Fi beside a cable": (
        mac(ways=(way("192.168.1.12"),)), "network", "warning",
        "mini (mini.local) goes over Wi-Fi (en1), while a Thunderbolt cable leads to MacBook Pro",
        "ipconfig getifaddr bridge0",
    ),
    "Wi-Fi on Linux": (
        linux(ways=(way("10.0.0.1"),), interfaces=WIFI), "network", "note", "goes over Wi-Fi (eth0)",
        "Ethernet cable",
    ),
    "a VPN": (
        mac(ways=(way("10.8.0.2"),), interfaces=VPN), "network", "warning",
        "through a VPN, such as Tailscale (utun3), while a Thunderbolt cable leads to MacBook Pro", "getifaddr bridge0",
    ),
    "a VPN without a cable": (
        mac({"thunderbolt": "thunderbolt_none.json"}, ways=(way("10.8.0.2"),), interfaces=VPN), "network", "warning",
        "through a VPN, such as Tailscale (utun3)", "local network",
    ),
    "no route": (
        mac(ways=(way(None),)), "network", "failed",
        "there is no route to mini", "one network",
    ),
    "an address that was self-assigned": (
        mac(ways=(way("192.168.1.12", "169.254.7.7"),)), "network", "failed", "self-assigned address",
        'networksetup -setmanual "Thunderbolt Bridge" 10.77.0.1',
    ),
    "a bridge in the house's network": (
        mac(interfaces=ONE_NETWORK), "network", "warning",
        "bridge0 (192.168.1.23) and en0 (192.168.1.11) are in one network", "networksetup -setmanual",
    ),
    "low power mode": (mac({"power": "pmset_laptop.txt"}), "power", "warning", "low power mode is on", "powermode 0"),
    "a display that sleeps": (
        mac({"power": DISPLAY}), "power", "note", "display sleeps after 10 minutes",
        "sudo pmset -c displaysleep 0",
    ),
    "macOS 27": (mac({"macos": "sw_vers_27.txt"}), "speed", "note", "4 to 10 times slower", "to High Power again"),
    "a variable of MLX's": (mac(fast_synch=True), "speed", "warning", "hung the GPU", "unset MLX_METAL_FAST_SYNCH"),
    "long up": (mac(up=12.2 * 86400), "rdma", "note", "has run for 12 days", "restart both Macs"),
    "two cables": (
        mac({"thunderbolt": recabled("3", is_second=True)}), "rdma", "warning",
        "2 Thunderbolt cables lead to MacBook Pro", "leave one cable",
    ),
    "the port next to Ethernet": (
        mac({"thunderbolt": recabled("1")}), "rdma", "warning",
        "to MacBook Pro is in the port next to Ethernet (en2)", "another Thunderbolt port",
    ),
    "short frames": (mac({"macos": "sw_vers_26.txt"}), "rdma", "note", "works only with a Mac that has 26.2", "26.3"),
    "MLX on the processor": (linux("nvidia_h200.txt"), "gpu", "warning", "(NVIDIA H200), but this MLX", "mlx[cuda13]"),
    "a GPU in use": (
        linux("nvidia_busy.txt", on_gpu=True), "gpu", "warning", "20110 MiB of GPU 1's 24564 MiB", "nvidia-smi",
    ),
}  # fmt: skip


SEVERAL = {"sleep": 3, "low power mode": 3, "an address that was self-assigned": 2}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_once(name: str):
    seen, area, severity, words, remedy = WRONG[name]
    every = every_finding(seen)
    assert len(every) == SEVERAL.get(name, 1)  # and nothing else is
    found = [each for each in every if words in each.sentence]
    assert [(each.name, str(each.outcome)) for each in found] == [(area, severity)]
    assert remedy in found[0].remedy


@pytest.mark.parametrize(
    "seen",
    [
        mac({"power": altered("pmset_studio.txt", ("\n sleep                0", "\n SleepDisabled 1\n sleep 1"))}),
        mac({"macos": Printed("14.7.1")}, origin=ProcessOrigin(Start.PROGRAM, "iTerm")),  # privacy came with macOS 15
        mac({"rdma": "rdma_ctl_disabled.txt", "thunderbolt": recabled("3", is_second=True)}, up=12e5),  # no RDMA
    ],
)
def test_what_is_no_harm(seen: SeenHere):
    assert every_finding(seen) == []


def test_nothing_can_be_asked():
    for system, keys in (("Darwin", MACOS), ("Linux", LINUX), ("Plan 9", {})):
        silent = dict.fromkeys(keys, Printed(None, "there is no such command here"))
        assert every_finding(SeenHere(silent, system, False)) == []
        assert every_finding(SeenHere({}, system, False)) == []


FILES = sorted(path.name for path in RECORDED.iterdir())


@given(st.dictionaries(st.sampled_from([*MACOS, *LINUX]), st.sampled_from(FILES) | st.text(max_size=40)))
def test_whatever_they_say_is_judged(answers: dict[str, str]):
    outputs = {name: said(text) if text in FILES else Printed(text) for name, text in answers.items()}
    ways = (way(None), way("192.168.1.12"))
    for system in ("Darwin", "Linux"):
        for each in every_finding(SeenHere(outputs, system, True, memory=GIB, ways=ways)):
            assert each.sentence
            assert each.remedy
            assert "\n" not in each.sentence
