"""A whole look around, with means that see what they are told: lists, layouts with names, and sentences."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from announcing import CABLE, ETHERNET, KEY, MINI, OTHER_KEY, VERSIONS, WIFI, seen, way

from splitinfer.config import Layout
from splitinfer.discovery.announcement import fingerprint_of
from splitinfer.discovery.choosing import Way, in_order
from splitinfer.discovery.discover import Surroundings, best_addresses, discover, find_stages
from splitinfer.discovery.document import document
from splitinfer.discovery.means import MeansFailed
from splitinfer.discovery.overhearing import Heard
from splitinfer.discovery.result import Discovery
from splitinfer.discovery.sentences import lines
from splitinfer.discovery.workers import Sighting, Worker
from splitinfer.errors import LayoutError, WorkerUnreachable
from splitinfer.keyring import Keyring, Known
from splitinfer.system.interface_kind import LocalInterface
from splitinfer.wire.messages import Versions

INTERFACES = (CABLE, ETHERNET, WIFI)
BY_ADDRESS = {"10.77.0.": (CABLE, 0.2), "192.168.7.": (ETHERNET, 0.4), "192.168.8.": (WIFI, 4.0)}
OTHER = fingerprint_of(OTHER_KEY)
LONG = 1e9  # seconds: what is told has an end


class Told:
    """Means that see these sightings, unless it is over before, and then end; or fail."""

    name = "told"

    def __init__(self, *sightings: Sighting, failure: str = "") -> None:
        self.sightings, self.failure, self.num_asked = sightings, failure, 0

    def browse(
        self, interfaces: Sequence[LocalInterface], put: Callable[[Sighting], None], is_over: Callable[[], bool]
    ) -> None:
        if self.failure:
            raise MeansFailed(self.failure)
        for each in self.sightings:
            if is_over():
                return
            self.num_asked += 1
            put(each)

    def announce(self, *_: object) -> object:
        raise NotImplementedError


class Overheard:
    """What was overheard, told before."""

    def __init__(self, *heard: Heard) -> None:
        self.heard = list(heard)

    def __enter__(self) -> "Overheard":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def ways(worker: Worker, _: Sequence[LocalInterface]) -> tuple[Way, ...]:
    """By the networks of the addresses; what ends with .99 is a dead host."""

    def one(address: str) -> Way:
        by, milliseconds = next(
            (found for start, found in BY_ADDRESS.items() if address.startswith(start)), (None, 1.0)
        )
        return way(address, None, None, "no answer") if address.endswith(".99") else way(address, by, milliseconds)

    return in_order(map(one, worker.addresses))


def around(*sightings: Sighting, heard: Sequence[Heard] = (), failure: str = "") -> Surroundings:
    return Surroundings(
        Told(*sightings, failure=failure),
        INTERFACES,
        lambda _: Overheard(*heard),  # type: ignore[arg-type, return-value]
        ways,
    )


def look(*sightings: Sighting, known: Sequence[Known] = (), own: Versions = VERSIONS, **told) -> Discovery:
    return discover(around(*sightings, **told), LONG, known, own)


def text(found: Discovery) -> str:
    return "\n".join(lines(found))


# ----- lists ------------------------------------------------------------------------------------------


def test_a_worker_with_three_ways():
    said = text(look(seen("192.168.8.2", "10.77.0.2", "192.168.7.2"), known=[Known(KEY, "the mini")]))
    assert said.splitlines() == [
        "mini: tcp://10.77.0.2:5577 by Thunderbolt (bridge0), 0.20 ms",
        "    also tcp://192.168.7.2:5577 by cable (en0), 0.40 ms",
        "    also tcp://192.168.8.2:5577 by Wi-Fi (en1), 4.00 ms",
        "    Apple M4 Pro · 48 GB of memory, 41 GB free · splitinfer 0.1.0, mlx 0.32.2",
        "    key 9a2d b2e2 3f15 04cd, known here as the mini",
    ]


def test_a_dead_host():
    said = text(look(seen("192.168.7.99")))
    assert "mini: announced, but it does not answer\n    tcp://192.168.7.99:5577: no answer\n" in said
    assert "its machine is off or asleep" in said


def test_two_of_one_name_one_of_which_is_not_the_known_one():
    said = text(
        look(seen("10.77.0.2"), seen("192.168.7.3", id="f" * 16, fingerprint=OTHER), known=[Known(KEY, "mini")])
    )
    assert "2 workers are named mini" in said
    assert said.count("known here as mini") == 1
    assert said.count("NOT the key that is known here under this name") == 1


def test_another_version_another_form_no_key_and_this_machine():
    said = text(look(seen("10.77.0.1", form="2", fingerprint="", versions=Versions(12, "0.2.0", "0.33.0", "0.33.0"))))
    assert "another version (protocol 11 here, protocol 12 there)" in said
    assert "a form that this version does not know" in said
    assert "no key: it admits everyone" in said
    assert ", on this machine" in said


def test_an_earlier_run_is_told():
    said = text(look(seen("10.77.0.2"), seen("10.77.0.2", id="f" * 16)))
    assert "left out: 1 entry that an earlier run left behind (mini)" in said
    assert said.count("mini: tcp://") == 1


def test_nothing_found_says_what_was_tried_on_which_interface():
    heard = [
        Heard(CABLE, set()),
        Heard(ETHERNET, {"192.168.7.5", "192.168.7.6"}),
        Heard(WIFI, set(), "No route to host"),
    ]
    said = text(look(heard=heard))
    assert "no worker was found in " in said
    assert "Thunderbolt (bridge0), 10.77.0.1: no device answered" in said
    assert "cable (en0), 192.168.7.1: 2 other devices answered, no worker" in said
    assert "Wi-Fi (en1), 192.168.8.1: could not ask (No route to host)" in said
    assert (
        "either there is no other device on bridge0, en1, or multicast DNS (UDP port 5353) does not get through" in said
    )
    assert "so no worker announces itself there: on the worker's machine, run" in said
    assert "an address always works" in said


def test_nobody_answers_anywhere():
    said = text(look(heard=[Heard(CABLE), Heard(ETHERNET), Heard(WIFI)]))
    assert "either there is no other device, or multicast DNS" in said
    assert "multicast DNS works" not in said


def test_no_interface_and_no_means():
    told = Told(seen("10.77.0.2"))
    said = text(discover(Surroundings(told, ()), LONG, (), VERSIONS))  # type: ignore[arg-type]
    assert said.startswith("this machine has no network interface that is up")
    assert told.num_asked == 0
    said = text(discover(Surroundings(None, INTERFACES), LONG, (), VERSIONS))
    assert "nothing here speaks multicast DNS" in said
    assert "an address always works" in said


def test_why_browsing_failed():
    said = text(look(failure="avahi-browse failed: Daemon not running", heard=[Heard(CABLE), Heard(WIFI)]))
    assert "avahi-browse failed: Daemon not running\nno worker is found without it: put that right" in said
    assert "no device answered" not in said
    assert "an address always works" in said


def test_the_document():
    found = look(seen("192.168.7.2", "192.168.7.99"), heard=[Heard(ETHERNET, {"192.168.7.5"})])
    read = json.loads(json.dumps(document(found)))
    (worker,) = read["workers"]
    assert worker["address"] == "tcp://192.168.7.2:5577"
    assert worker["fingerprint"] == MINI.fingerprint
    assert [each["round_trip"] for each in worker["ways"]] == [0.0004, None]
    assert worker["free"] == 41 * 10**9
    assert read["interfaces"] == [
        {"name": "en0", "kind": "cable", "addresses": ["192.168.7.1"], "others": 1, "problem": None}
    ]


# ----- layouts with names -----------------------------------------------------------------------------


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path / "keys")


def layout(*stages: dict) -> Layout:
    return Layout.from_dict({"stages": [{"name": "studio", "layers": 6}, *stages]}, "x.yaml")


def test_a_layout_with_addresses_looks_for_nothing(keyring: Keyring):
    whole, told = layout({"name": "mini", "layers": 6, "address": "tcp://10.0.0.9:5577"}), Told()
    assert find_stages(whole, keyring, surroundings=Surroundings(told, INTERFACES)) is whole  # type: ignore[arg-type]
    assert told.num_asked == 0


def test_a_name_becomes_the_best_address_and_no_more_is_waited_for(keyring: Keyring):
    named = layout({"name": "mini", "layers": 6, "key": KEY, "codec": "fp16"})
    said: list[tuple[str, str]] = []
    found = find_stages(
        named, keyring, LONG, around(seen("192.168.7.2", "10.77.0.2")), lambda name, text: said.append((name, text))
    )
    assert found.stages[1].address == "tcp://10.77.0.2:5577"
    assert (found.stages[1].key, found.stages[1].codec, found.to_find) == (KEY, "fp16", ())
    assert said == [("mini", "found at tcp://10.77.0.2:5577 by Thunderbolt (bridge0), 0.20 ms")]


def test_a_key_of_the_keyring(keyring: Keyring):
    keyring.admit(KEY, "mini")
    found = find_stages(layout({"name": "mini", "layers": 6}), keyring, LONG, around(seen("10.77.0.2")))
    assert found.stages[1].key == KEY


def test_without_a_key_nobody_is_taken(keyring: Keyring):
    with pytest.raises(LayoutError, match="has no address and no key"):
        find_stages(layout({"name": "mini", "layers": 6}), keyring, LONG, around(seen("10.77.0.2")))


def test_an_impostor_is_refused_and_the_search_goes_on_for_the_owner(keyring: Keyring):
    named, impostor = (
        layout({"name": "mini", "layers": 6, "key": KEY}),
        seen("10.77.0.9", id="f" * 16, fingerprint=OTHER),
    )
    found = find_stages(named, keyring, LONG, around(impostor, seen("192.168.7.2")))
    assert found.stages[1].address == "tcp://192.168.7.2:5577"
    with pytest.raises(WorkerUnreachable, match="has another key") as error:
        find_stages(named, keyring, LONG, around(impostor, heard=[Heard(WIFI)]))
    assert "answered" not in str(error.value)  # what was tried is of no interest where somebody was found


def test_nobody_says_what_was_tried(keyring: Keyring):
    with pytest.raises(WorkerUnreachable) as error:
        find_stages(
            layout({"name": "mini", "layers": 6, "key": KEY}),
            keyring,
            LONG,
            around(heard=[Heard(WIFI)], failure="it broke"),
        )
    said = str(error.value)
    assert said.startswith(
        "no worker with the key of stage mini (9a2d b2e2 3f15 04cd) was found; it broke; no worker is"
    )
    with pytest.raises(WorkerUnreachable) as error:
        find_stages(layout({"name": "mini", "layers": 6, "key": KEY}), keyring, LONG, around(heard=[Heard(WIFI)]))
    assert " was found; looked for " in str(error.value)
    assert str(error.value).endswith("by told on Wi-Fi (en1), 192.168.8.1: no device answered")


def test_an_announced_worker_that_does_not_answer(keyring: Keyring):
    with pytest.raises(WorkerUnreachable, match=r"announces itself, but does not answer \(192.168.7.99: no answer\)"):
        find_stages(layout({"name": "mini", "layers": 6, "key": KEY}), keyring, LONG, around(seen("192.168.7.99")))


def test_the_last_of_three_is_taken_where_the_one_before_it_is(keyring: Keyring):
    """mini has a cable to the coordinator and is on the switch; air, which comes behind it, only on the switch. A cable
    from the coordinator to mini is no way from air to mini."""
    air = {"name": "air", "layers": 6, "key": OTHER_KEY}
    named = layout(air, {"name": "mini", "layers": 6, "key": KEY})
    both = (seen("10.77.0.2", "192.168.7.2"), seen("192.168.7.3", name="air", id="f" * 16, fingerprint=OTHER))
    found = find_stages(named, keyring, LONG, around(*both))
    assert [each.address for each in found.stages[1:]] == ["tcp://192.168.7.3:5577", "tcp://192.168.7.2:5577"]


def test_two_stages_cannot_be_one_worker(keyring: Keyring):
    named = layout({"name": "mini", "layers": 6, "key": KEY}, {"name": "air", "layers": 6, "key": KEY})
    with pytest.raises(LayoutError, match="both at"):
        find_stages(named, keyring, LONG, around(seen("10.77.0.2")))


def test_the_time_ends_a_search_that_has_not_found_enough():
    told = Told(seen("10.77.0.2"))
    surroundings = Surroundings(told, INTERFACES, lambda _: Overheard(), ways)  # type: ignore[arg-type, return-value]
    merged, *_ = surroundings.look(0.0, lambda _: False)
    assert (merged.workers, told.num_asked) == ((), 0)


# ----- a better way than the one that is known --------------------------------------------------------


def test_a_cable_is_taken_in_place_of_the_address_that_is_known():
    said: list[tuple[str, str]] = []
    found = best_addresses(
        [("mini", KEY, "tcp://mini.local:5577")],
        LONG,
        around(seen("192.168.8.2", "10.77.0.2")),
        lambda name, text: said.append((name, text)),
    )
    assert found == {"mini": "tcp://10.77.0.2:5577"}
    assert said == [("mini", "found at tcp://10.77.0.2:5577 by Thunderbolt (bridge0), 0.20 ms")]


@pytest.mark.parametrize("there", [(), ("192.168.7.99",)])
def test_the_known_address_stays_where_no_other_answers(there: tuple[str, ...]):
    known = [("mini", KEY, "tcp://mini.local:5577")]
    assert best_addresses(known, 0.01, around(*([seen(*there)] if there else []))) == {"mini": "tcp://mini.local:5577"}


def test_a_cable_that_another_worker_does_not_have_is_not_taken():
    key = "7" * 64
    known = [("mini", KEY, "tcp://mini.local:5577"), ("air", key, "tcp://air.local:5577")]
    air = seen("192.168.7.3", id="e" * 16, name="air", fingerprint=fingerprint_of(key))
    assert best_addresses(known, LONG, around(seen("192.168.7.2", "10.77.0.2"), air)) == {
        "mini": "tcp://192.168.7.2:5577",
        "air": "tcp://192.168.7.3:5577",
    }
    assert best_addresses(known, 0.01, around(seen("10.77.0.2"))) == {
        "mini": "tcp://mini.local:5577",
        "air": "tcp://air.local:5577",
    }
