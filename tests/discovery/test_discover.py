"""A whole look around in a made-up network: lists, layouts with names, and sentences."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from announcing import CABLE, ETHERNET, KEY, MINI, OTHER, OTHER_KEY, VERSIONS, WIFI, way, worker

from splitinfer.config import Layout
from splitinfer.core.layout import StageSpec
from splitinfer.discovery import discover as looking
from splitinfer.discovery import network
from splitinfer.discovery.announcement import fingerprint_of
from splitinfer.discovery.report import as_json, notes, rows
from splitinfer.discovery.workers import KnownWorker, Route
from splitinfer.errors import WorkerUnreachable
from splitinfer.keyring import Known
from splitinfer.system.interface_kind import LocalInterface
from splitinfer.wire.messages import Versions

INTERFACES = (CABLE, ETHERNET, WIFI)
BY_ADDRESS = {"10.77.0.": (CABLE, 0.2), "192.168.7.": (ETHERNET, 0.4), "192.168.8.": (WIFI, 4.0)}
Scene = dict[str, Any]
LONG = 1e9  # seconds of any search: what is told has an end


def way_to(address: str, *_: object) -> Route:
    """By the networks of the addresses; what ends with .99 is a dead host."""
    by, milliseconds = next((found for start, found in BY_ADDRESS.items() if address.startswith(start)), (None, 1.0))
    return way(address, None, None, "no answer") if address.endswith(".99") else way(address, by, milliseconds)


def around(
    *sightings: KnownWorker,
    failure: str = "",
    interfaces: tuple[LocalInterface, ...] = INTERFACES,
    asked: list[KnownWorker] | None = None,
) -> Scene:
    """A network in which these sightings are made, one after the other; ``asked``: gets those that were looked at."""

    def browse(_: Sequence[LocalInterface]) -> Iterator[KnownWorker]:
        if failure:
            raise OSError(failure)
        for each in sightings:
            if asked is not None:
                asked.append(each)
            yield each

    return {"browse": browse, "local_interfaces": lambda: interfaces, "way_to": way_to}


def on(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function in the network that is its last argument."""

    def run(*given: Any, **named: Any) -> Any:
        *rest, scene = given
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(looking, "SECONDS", LONG)
            patch.setattr(looking, "SHORTLY", LONG)
            for name, part in scene.items():
                patch.setattr(network, name, part)
            return function(*rest, **named)

    return run


discover, find_stages, find_again = map(on, (looking.discover, looking.find_stages, looking.find_again))
best_addresses, paired = map(on, (looking.best_addresses, looking.paired))


def look(scene: Scene, known: Sequence[Known] = (), own: Versions = VERSIONS) -> str:
    """What `splitinfer discover` says below its table."""
    return "\n".join(notes(*discover(LONG, known, own, scene)))


# ----- lists ------------------------------------------------------------------------------------------


def test_a_worker_with_three_ways():
    scene = around(worker("192.168.8.99", "10.77.0.2", "192.168.7.2"))
    _, found = discover(LONG, [Known(KEY, "the mini")], VERSIONS, scene)
    assert list(rows(found)) == [
        (
            "mini",
            "tcp://10.77.0.2:5577",
            "Thunderbolt (bridge0), 0.20 ms",
            "9a2d b2e2 3f15 04cd, known here as the mini",
            "Apple M4 Pro, 48 GB, splitinfer 0.1.0",
        ),
        ("", "tcp://192.168.7.2:5577", "cable (en0), 0.40 ms", "", ""),
        ("", "tcp://192.168.8.99:5577", "no answer", "", ""),
    ]
    assert look(scene, [Known(KEY, "the mini")]) == ""


OTHER_VERSION = Versions(12, "0.2.0", "0.33.0", "0.33.0")
ODD = worker("10.77.0.1", form="2", fingerprint="", versions=OTHER_VERSION)


@pytest.mark.parametrize(
    ("sightings", "said"),
    [
        ([worker("192.168.7.99")], "mini announced itself, but does not answer: its machine is off or asleep"),
        ([worker("10.77.0.2"), worker("192.168.7.3", id="f" * 16, fingerprint=OTHER)], "2 workers are named mini"),
        ([worker("10.77.0.2", fingerprint=OTHER)], "NOT the key that is known here under this name"),
        ([ODD], "another version (protocol 11 here, protocol 12 there)"),
        ([ODD], "a form that this version does not know"),
        ([ODD], "no key: it admits everyone"),
    ],
)
def test_what_is_said_of_a_worker(sightings: list[KnownWorker], said: str):
    assert said in look(around(*sightings), known=[Known(KEY, "mini")])


@pytest.mark.parametrize(
    ("sighting", "known", "names"),
    [
        (worker("10.77.0.2", "192.168.7.2"), [Known(KEY, "the mini")], ["mini"]),
        (worker("192.168.7.99"), [Known(KEY, "the mini")], []),  # it does not answer
        (worker("10.77.0.2", versions=OTHER_VERSION), [Known(KEY, "the mini")], []),
        (worker("10.77.0.2", fingerprint=OTHER), [Known(KEY, "mini")], []),
        (worker("10.77.0.2"), [], []),
    ],
)
def test_paired_workers_answer_with_a_known_key(sighting: KnownWorker, known: list[Known], names: list[str]):
    found = paired(known, VERSIONS, around(sighting))
    assert [each["name"] for each in found] == names
    assert all(each == {"name": "mini", "address": "tcp://10.77.0.2:5577", "key": KEY} for each in found)


def test_what_is_said_where_nobody_is_found():
    said = look(around())
    assert said.startswith("no worker was found: looked for 0.0 s on Thunderbolt (bridge0), cable (en0), Wi-Fi (en1)\n")
    for each in ("on the worker's machine, run", "something blocks the search", "an address always works"):
        assert f"\n{each}" in said or each in said.splitlines()[-2]
    failed = look(around(failure="it does not work"))
    assert failed.startswith("no worker was found: it does not work\nan address always works")


def test_without_an_interface_nobody_is_asked():
    asked: list[KnownWorker] = []
    said = look(around(worker("10.77.0.2"), interfaces=(), asked=asked))
    assert said.startswith("no worker was found: this machine has no network interface")
    assert asked == []


def test_what_a_program_gets():
    scene = around(worker("192.168.7.2", "192.168.7.99"), worker("10.77.0.1", name="air", id="f" * 16, fingerprint=""))
    read = json.loads(json.dumps(as_json(*discover(LONG, (), VERSIONS, scene))))
    air, mini = read["workers"]
    assert (air["here"], air["fingerprint"], mini["here"]) == (True, None, False)
    assert mini["address"] == "tcp://192.168.7.2:5577"
    assert mini["fingerprint"] == MINI.fingerprint
    assert [each["round_trip"] for each in mini["ways"]] == [0.0004, None]
    assert mini["memory"] == 48 * 10**9
    assert mini["versions"]["mlx_lm"] == "0.32.2"


# ----- layouts with names -----------------------------------------------------------------------------


def layout(*stages: dict) -> Layout:
    return Layout.from_dict({"stages": [{"name": "studio", "layers": 6}, *stages]}, "x.yaml")


def test_a_layout_with_addresses_looks_for_nothing():
    whole = layout({"name": "mini", "layers": 6, "address": "tcp://10.0.0.9:5577"})
    asked: list[KnownWorker] = []
    assert find_stages(whole, around(worker("10.77.0.2"), asked=asked)) is whole
    assert asked == []


def test_a_name_becomes_the_best_address_and_no_more_is_waited_for():
    named = layout({"name": "mini", "layers": 6, "key": KEY, "codec": "fp16"})
    said: list[tuple[str, str]] = []
    found = find_stages(
        named,
        around(worker("192.168.7.2", "10.77.0.2")),
        notice=lambda name, text: said.append((name, text)),
    )
    assert found.stages[1].address == "tcp://10.77.0.2:5577"
    assert (found.stages[1].key, found.stages[1].codec, found.to_find) == (KEY, "fp16", ())
    assert said == [("mini", "found at tcp://10.77.0.2:5577 by Thunderbolt (bridge0), 0.20 ms")]


def test_an_impostor_is_refused_and_the_search_goes_on_for_the_owner():
    named, impostor = (
        layout({"name": "mini", "layers": 6, "key": KEY}),
        worker("10.77.0.9", id="f" * 16, fingerprint=OTHER),
    )
    found = find_stages(named, around(impostor, worker("192.168.7.2")))
    assert found.stages[1].address == "tcp://192.168.7.2:5577"
    with pytest.raises(WorkerUnreachable, match="has another key") as error:
        find_stages(named, around(impostor))
    assert "looked for" not in str(error.value)  # of no interest where somebody was found


def test_nobody_says_what_was_tried():
    named = layout({"name": "mini", "layers": 6, "key": KEY})
    with pytest.raises(WorkerUnreachable, match=r"announces itself, but does not answer \(192.168.7.99: no answer\)"):
        find_stages(named, around(worker("192.168.7.99")))
    with pytest.raises(WorkerUnreachable) as error:
        find_stages(named, around(failure="it broke"))
    assert str(error.value) == "no worker with the key of stage mini (9a2d b2e2 3f15 04cd) was found; it broke"
    with pytest.raises(WorkerUnreachable) as error:
        find_stages(named, around())
    assert " was found; looked for " in str(error.value)
    assert str(error.value).endswith("s on Thunderbolt (bridge0), cable (en0), Wi-Fi (en1)")


def test_the_last_of_three_is_taken_where_the_one_before_it_is():
    """mini has a cable to the coordinator and is on the switch; air, which comes behind it, only on the switch. A cable
    from the coordinator to mini is no way from air to mini."""
    air = {"name": "air", "layers": 6, "key": OTHER_KEY}
    named = layout(air, {"name": "mini", "layers": 6, "key": KEY})
    both = (worker("10.77.0.2", "192.168.7.2"), worker("192.168.7.3", name="air", id="f" * 16, fingerprint=OTHER))
    found = find_stages(named, around(*both))
    assert [each.address for each in found.stages[1:]] == ["tcp://192.168.7.3:5577", "tcp://192.168.7.2:5577"]


# ----- one key on two machines ------------------------------------------------------------------------


def test_a_worker_with_this_machines_key_is_told():
    there, here = worker("192.168.7.2"), worker(str(ETHERNET.networks[0].ip))
    looks = [discover(LONG, (), VERSIONS, KEY, around(each)) for each in (there, here)]
    said = ["\n".join(notes(*each)) for each in looks]
    assert "mini has the same key as this machine, so the two cannot be told apart: " in said[0]
    assert "Remove that file on one of them" in said[0]
    assert "same key" not in said[1]
    assert [as_json(*each)["workers"][0]["has_own_key"] for each in looks] == [True, False]


@pytest.mark.parametrize(("address", "is_told"), [("192.168.7.3", True), ("192.168.7.2", False)])
def test_two_workers_with_one_key_at_different_addresses(address: str, is_told: bool):
    other = worker(address, name="air", id="f" * 16, port=5578)
    assert ("have the same key: if they are two machines" in look(around(worker("192.168.7.2"), other))) == is_told


# ----- a worker that has moved ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "key", "address"),
    [
        ([worker("192.168.7.33")], KEY, "tcp://192.168.7.33:5577"),
        ([worker("192.168.7.99", "192.168.7.33")], KEY, "tcp://192.168.7.33:5577"),  # the old one is announced, too
        ([worker("192.168.7.99")], KEY, None),
        ([worker("192.168.7.33")], OTHER_KEY, None),
        ([worker("192.168.7.33")], None, None),
        ([], KEY, None),
    ],
)
def test_a_worker_is_found_again_by_its_key(there: list[KnownWorker], key: str | None, address: str | None):
    assert find_again(StageSpec("mini", 6, 12, "tcp://192.168.7.2:5577", key), around(*there)) == address


def test_zeroconfs_tracebacks_reach_no_terminal():
    assert not logging.getLogger("zeroconf").isEnabledFor(logging.ERROR)


# ----- a better way than the one that is known --------------------------------------------------------


def test_a_cable_is_taken_in_place_of_the_address_that_is_known():
    said: list[tuple[str, str]] = []
    found = best_addresses(
        [("mini", KEY, "tcp://mini.local:5577")],
        around(worker("192.168.8.2", "10.77.0.2")),
        notice=lambda name, text: said.append((name, text)),
    )
    assert found == {"mini": "tcp://10.77.0.2:5577"}
    assert said == [("mini", "found at tcp://10.77.0.2:5577 by Thunderbolt (bridge0), 0.20 ms")]


@pytest.mark.parametrize("there", [(), ("192.168.7.99",)])
def test_the_known_address_stays_where_no_other_answers(there: tuple[str, ...]):
    known = [("mini", KEY, "tcp://mini.local:5577")]
    assert best_addresses(known, around(*([worker(*there)] if there else []))) == {"mini": "tcp://mini.local:5577"}


def test_a_cable_that_another_worker_does_not_have_is_not_taken():
    key = "7" * 64
    known = [("mini", KEY, "tcp://mini.local:5577"), ("air", key, "tcp://air.local:5577")]
    air = worker("192.168.7.3", id="e" * 16, name="air", fingerprint=fingerprint_of(key))
    assert best_addresses(known, around(worker("192.168.7.2", "10.77.0.2"), air)) == {
        "mini": "tcp://192.168.7.2:5577",
        "air": "tcp://192.168.7.3:5577",
    }
    assert best_addresses(known, around(worker("10.77.0.2"))) == {
        "mini": "tcp://mini.local:5577",
        "air": "tcp://air.local:5577",
    }
