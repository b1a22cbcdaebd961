"""Sightings as workers; which worker a stage means, by its key and its name; which of several addresses is taken."""

import pytest
from announcing import CABLE, ETHERNET, KEY, OTHER, OTHER_KEY, VPN, WIFI, interface, way, worker

from splitinfer.core.layout import StageSpec
from splitinfer.discovery.announcement import short
from splitinfer.discovery.workers import (
    KnownWorker,
    Route,
    choose,
    holds,
    in_order,
    is_here,
    key_of,
    merge,
    without_own,
)
from splitinfer.errors import LayoutError, WorkerUnreachable
from splitinfer.system.interface_kind import Kind

# ----- sightings -----------------------------------------------------------------------------------

AGAIN, THIRD = "ffffffffffffffff", "eeeeeeeeeeeeeeee"
HERE = worker("192.168.7.2")


@pytest.mark.parametrize(
    ("sightings", "num_workers"),
    [
        ([HERE, worker("192.168.7.2", "10.77.0.2")], 1),
        ([HERE, worker("192.168.7.3", id=THIRD, fingerprint=OTHER)], 2),  # two of one name
        ([HERE, worker("192.168.7.2", id=THIRD, port=5578)], 2),  # two on one machine share its key
        ([HERE, worker("192.168.7.2", id=AGAIN)], 1),  # an earlier run
        ([HERE, worker("192.168.7.2", id=AGAIN, fingerprint=OTHER)], 2),  # not one of this worker
    ],
)
def test_how_many_workers_were_seen(sightings: list[KnownWorker], num_workers: int):
    found = merge(sightings)
    assert len(found) == num_workers
    assert sightings[-1].announcement in [each.announcement for each in found]


def test_the_last_announcement_counts_and_all_addresses_do():
    seen = [
        worker("10.77.0.2", memory=9),
        worker("192.168.7.2", "10.77.0.2", memory=7),
        worker("192.168.8.2", memory=5),
    ]
    (found,) = merge(seen)
    assert (found.announcement.memory, found.addresses) == (5, ("10.77.0.2", "192.168.7.2", "192.168.8.2"))


def test_addresses_that_lead_nowhere_are_left_out():
    odd = worker("127.0.0.1", "::1", "224.0.0.251", "0.0.0.0", "nonsense", "fe80::2", "10.0.0.2", "fe80::2%en5")
    assert merge([odd])[0].addresses == ("10.0.0.2", "fe80::2%en5")


def test_a_stranger_s_flood_is_bounded():
    flood = [worker(f"10.0.{n >> 8}.{n & 255}", id=f"{n:016x}", fingerprint=f"{n:032x}") for n in range(1000)]
    assert len(merge(flood)) == 256
    many = KnownWorker(flood[0].announcement, tuple(f"10.1.0.{n}" for n in range(100)))
    assert len(merge([many])[0].addresses) == 16


def test_an_address_that_every_machine_has_is_not_the_worker_s():
    docker = interface("docker0", Kind.VIRTUAL, "172.17.0.1/16")
    found = without_own(worker("172.17.0.1", "192.168.7.2"), (ETHERNET, docker))
    assert found.addresses == ("192.168.7.2",)


def test_a_worker_on_this_machine_keeps_its_addresses():
    own = worker("192.168.7.1", "fe80::1%bridge0")
    assert without_own(own, (ETHERNET, CABLE)) == own
    assert is_here(own, (ETHERNET, CABLE))
    assert not is_here(worker("192.168.7.1", "192.168.7.2"), (ETHERNET, CABLE))
    assert not is_here(KnownWorker(own.announcement, ()), (ETHERNET, CABLE))


# ----- which worker --------------------------------------------------------------------------------

STAGE = StageSpec("mini", 6, 12)
MINE, OTHERS = worker("10.0.0.2", name="second"), worker("10.0.0.3", id="f" * 16, fingerprint=OTHER)
ONE, TWO = worker("10.0.0.2", name="one"), worker("10.0.0.2", name="Two", id="f" * 16, port=5578)
MANY = [worker(f"fd00::{n}", name=f"w{n}", id=f"{n:016x}", fingerprint=OTHER) for n in range(1, 7)]


@pytest.mark.parametrize(
    ("stage", "key", "workers", "chosen"),
    [
        ("mini", KEY, [OTHERS, MINE], MINE),  # by the key, whatever the name
        ("mini", OTHER_KEY, [OTHERS, MINE], OTHERS),
        ("two.local", KEY, [ONE, TWO], TWO),  # of two with one key, by the name
    ],
)
def test_which_worker_a_stage_means(stage: str, key: str, workers: list[KnownWorker], chosen: KnownWorker):
    assert choose(stage, key, workers) is chosen


@pytest.mark.parametrize(
    ("stage", "workers", "said"),
    [
        ("three", [ONE, TWO], "of stage three were found: one at 10.0.0.2:5577, Two at 10.0.0.2:5578; name the stage"),
        ("one", [ONE, worker("10.0.0.2", name="one", id="f" * 16, port=5578)], "2 workers with the key of stage one"),
        ("mini", [OTHERS], f"mini at 10.0.0.3:5577), but it has another key ({short(OTHER)}) than the stage (9a2d"),
        ("mini", [worker("10.0.0.3", fingerprint="")], "but it has no key (it runs with --insecure)"),
        ("mini", [], "no worker with the key of stage mini (9a2d b2e2 3f15 04cd) was found"),
        ("mini", MANY, "others were found: w1 at [fd00::1]:5577, w2 at [fd00::2]:5577, w3 at [fd00::3]:5577, w4 at"),
        ("mini", MANY, "[fd00::4]:5577 and 2 more"),
    ],
)
def test_who_is_not_the_stage_s_worker(stage: str, workers: list[KnownWorker], said: str):
    with pytest.raises(WorkerUnreachable) as error:
        choose(stage, KEY, workers)
    assert said in str(error.value)


def test_the_layout_s_key_before_the_keyring_s():
    assert key_of(StageSpec("mini", 6, 12, key=KEY), "x.yaml", [(OTHER_KEY, "mini")]) == KEY
    assert key_of(STAGE, "x.yaml", [(OTHER_KEY, "Mini.local"), (KEY, "air")]) == OTHER_KEY


def test_no_key_and_several():
    with pytest.raises(LayoutError, match=r"stage 'mini' of layout x.yaml has no address and no key.*tcp://host:port"):
        key_of(STAGE, "x.yaml", [(KEY, "air")])
    with pytest.raises(LayoutError, match=r"2 keys are known here under the name 'mini'"):
        key_of(STAGE, "x.yaml", [(KEY, "mini"), (OTHER_KEY, "mini")])


# ----- which address -------------------------------------------------------------------------------

THUNDER, WIRED, AIR = "10.77.0.2", "192.168.7.2", "192.168.8.2"


TEN, ON_TEN = interface("en7", Kind.CABLE, "192.168.9.1/24", speed=10000), "192.168.9.2"


@pytest.mark.parametrize(
    ("ways", "order"),
    [
        ([way(WIRED, ETHERNET, 0.1), way(THUNDER, CABLE, 2.0)], [THUNDER, WIRED]),  # whatever was measured
        ([way(THUNDER, CABLE, None), way(AIR, WIFI, 5.0), way(WIRED, ETHERNET, 0.3)], [WIRED, AIR, THUNDER]),
        ([way(AIR, WIFI, 0.2), way(WIRED, ETHERNET, 0.9)], [WIRED, AIR]),  # Wi-Fi behind any cable
        ([way(WIRED, ETHERNET, 0.30), way(ON_TEN, TEN, 0.80)], [ON_TEN, WIRED]),  # of cables the one with more speed
        ([way(WIRED, ETHERNET, 0.30), way("192.168.7.3", ETHERNET, 0.20)], ["192.168.7.3", WIRED]),
        ([way("100.64.0.2", VPN, 0.01), way(AIR, WIFI, 5.0)], [AIR, "100.64.0.2"]),  # a VPN last, though it is near
        ([way("10.9.9.9", None, None), way(AIR, None, 1.0)], [AIR, "10.9.9.9"]),
    ],
)
def test_which_address_comes_first(ways: list[Route], order: list[str]):
    assert [each.address for each in in_order(ways)] == order
    assert [each.address for each in in_order(reversed(ways))] == order


@pytest.mark.parametrize(
    ("address", "is_held"),
    [("10.77.0.9", True), ("fe80::9%bridge0", True), ("fe80::9%4", True), ("fe80::9%en0", False), ("10.7.0.9", False)],
)
def test_what_an_interface_holds(address: str, is_held: bool):
    assert holds(CABLE, address) is is_held
