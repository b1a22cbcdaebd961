"""What is missing for RDMA over Thunderbolt is named, with a remedy, and nothing else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordings import RDMA_READY, altered, mac

from splitinfer.probes.evidence import MACOS, Printed, SeenHere
from splitinfer.probes.finding import Finding, Outcome
from splitinfer.probes.rdma import requirements, verdict


def by_name(seen: SeenHere) -> dict[str, Finding]:
    return {each.name: each for each in requirements(seen)}


def test_all_is_right():
    found = by_name(mac())
    assert {each.outcome for each in found.values()} == {Outcome.PASSED}
    assert verdict(list(found.values())).sentence == "Available."
    assert found["cable to a Mac"].sentence == "MacBook Pro at receptacle 2, 80 Gb/s"
    assert found["active port"].sentence == "rdma_en3"
    assert found["IPv4 address"].sentence == "en3 192.168.90.1"


DOWN = altered("ibv_devinfo_active.txt", ("PORT_ACTIVE (4)", "PORT_DOWN (1)"))
NO_ADDRESS = altered("ifconfig_ready.txt", ("inet 192.168.90.1 ", "unused "))
WRONG: dict[str, tuple[dict[str, str | Printed], str, str, str]] = {
    "an old macOS": ({"macos": "sw_vers_15.txt"}, "macOS", "15.7.1 is too old", "update macOS"),
    "thunderbolt 4": (
        {"thunderbolt": "thunderbolt_tb4_mac_connected.json"}, "Thunderbolt 5", "make 40 Gb/s", "tcp://",
    ),
    "no cable": ({"thunderbolt": "thunderbolt_tb5_dock.json"}, "cable to a Mac", "no other Mac", "Thunderbolt 5 cable"),
    "not enabled": ({"rdma": "rdma_ctl_disabled.txt"}, "rdma_ctl", "not enabled", "Recovery"),
    "no rdma_ctl": ({"rdma": Printed(None, "there is no rdma_ctl here")}, "rdma_ctl", "no rdma_ctl", "update macOS"),
    "ports down": ({"states": DOWN}, "active port", "rdma_en3 PORT_DOWN", "other Mac too"),
    "bridged": ({"interfaces": "ifconfig_bridged.txt"}, "Thunderbolt bridge", "holds en2, en3, en4", "bridge0 down"),
    "no address": ({"interfaces": NO_ADDRESS}, "IPv4 address", "en3 has no IPv4", "ifconfig en3 inet"),
}  # fmt: skip


TB4, ADDRESS = ("Thunderbolt 5", "cable to a Mac"), ("IPv4 address",)
OLDER = {"thunderbolt": "thunderbolt_tb4_mac_connected.json", "rdma": "rdma_ctl_disabled.txt", "states": Printed("")}
FOLLOWS = {"thunderbolt 4": TB4, "bridged": ADDRESS}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str):
    changes, about, words, remedy = WRONG[name]
    found = by_name(mac(changes))
    assert found[about].outcome is Outcome.FAILED
    assert words in found[about].sentence
    assert remedy in found[about].remedy
    missing = [each.name for each in found.values() if each.outcome is Outcome.FAILED]
    assert missing == sorted({about, *FOLLOWS.get(name, ())}, key=list(found).index)  # and nothing else is wrong
    assert verdict(list(found.values())).sentence == f"Not available. Missing: {', '.join(missing)}."


def test_nobody_is_sent_to_recovery_for_thunderbolt_4():
    found = by_name(mac(OLDER))
    assert [found[name].outcome for name in ("rdma_ctl", "active port")] == [Outcome.FAILED] * 2
    assert not [each.remedy for each in found.values() if "Recovery" in each.remedy]


def test_a_hanging_devinfo_is_unknown():
    found = by_name(mac({"states": Printed(None, "ibv_devinfo has not answered for 15 s")}))
    assert found["active port"].outcome is Outcome.UNKNOWN
    assert "plug it in again" in found["active port"].remedy
    assert verdict(list(found.values())).sentence == "May work. Could not check: active port, IPv4 address."


def test_what_this_process_knows_of_itself():
    assert by_name(mac(has_jaccl=False))["MLX with JACCL"].outcome is Outcome.FAILED


def test_nothing_can_be_asked():
    found = requirements(mac(dict.fromkeys(MACOS, Printed(None, "it does not want to"))))
    judged = {each.outcome for each in found if "MLX" not in each.name}
    assert judged == {Outcome.UNKNOWN}
    assert all(each.sentence == "it does not want to" for each in found if each.outcome is Outcome.UNKNOWN)


FILES = sorted(RDMA_READY.values())


@given(st.dictionaries(st.sampled_from(["macos", *RDMA_READY]), st.text(max_size=60) | st.sampled_from(FILES)))
def test_whatever_they_say_is_judged(answers: dict[str, str]):
    found = requirements(mac({name: text if text in FILES else Printed(text) for name, text in answers.items()}))
    assert len(found) == 8
    assert all(each.sentence and "\n" not in each.sentence for each in found)
