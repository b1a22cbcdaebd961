"""Several sightings of one worker, several workers of one name, and entries of earlier runs."""

from announcing import CABLE, ETHERNET, interface, seen, worker

from splitinfer.discovery.workers import Sighting, Worker, is_here, merge, without_own
from splitinfer.system.interface_kind import Kind

AGAIN, OTHER = "ffffffffffffffff", "eeeeeeeeeeeeeeee"


def test_one_worker_on_three_interfaces():
    merged = merge([seen("10.77.0.2", on="bridge0"), seen("192.168.7.2", "10.77.0.2"), seen("192.168.8.2")])
    assert [each.addresses for each in merged.workers] == [("10.77.0.2", "192.168.7.2", "192.168.8.2")]


def test_the_last_announcement_counts():
    merged = merge([seen("10.77.0.2", free=9), seen("10.77.0.2", free=5)])
    assert [each.announcement.free for each in merged.workers] == [5]


def test_two_workers_of_one_name_stay_two():
    merged = merge([seen("192.168.7.2"), seen("192.168.7.3", id=OTHER, fingerprint="1" * 32)])
    assert len(merged.workers) == 2
    assert merged.stale == ()


def test_two_workers_on_one_machine_share_a_key_and_not_a_port():
    assert len(merge([seen("192.168.7.2"), seen("192.168.7.2", id=OTHER, port=5578)]).workers) == 2


def test_an_earlier_run_is_left_out():
    merged = merge([seen("192.168.7.2"), seen("192.168.7.2", id=AGAIN)])
    assert [each.announcement.id for each in merged.workers] == [AGAIN]
    assert merged.stale == ("mini",)


def test_another_key_at_the_same_place_is_no_earlier_run():
    assert len(merge([seen("192.168.7.2"), seen("192.168.7.2", id=AGAIN, fingerprint="1" * 32)]).workers) == 2


def test_addresses_that_lead_nowhere_are_left_out():
    merged = merge([seen("127.0.0.1", "::1", "224.0.0.251", "0.0.0.0", "nonsense", "fe80::2", "10.0.0.2")])
    assert merged.workers[0].addresses == ("10.0.0.2",)


def test_an_address_of_one_link_gets_the_interface_as_its_scope():
    merged = merge([seen("fe80::2", on="bridge0"), seen("fe80::2%en5"), seen("fd00::2", on="bridge0")])
    assert merged.workers[0].addresses == ("fe80::2%bridge0", "fe80::2%en5", "fd00::2")


def test_a_stranger_s_flood_is_bounded():
    flood = [seen(f"10.0.{n >> 8}.{n & 255}", id=f"{n:016x}", fingerprint=f"{n:032x}") for n in range(1000)]
    assert len(merge(flood).workers) == 256
    many = Sighting(flood[0].announcement, tuple(f"10.1.0.{n}" for n in range(100)))
    assert len(merge([many]).workers[0].addresses) == 16


def test_an_address_that_every_machine_has_is_not_the_worker_s():
    docker = interface("docker0", Kind.VIRTUAL, "172.17.0.1/16")
    found = without_own(worker("172.17.0.1", "192.168.7.2"), (ETHERNET, docker))
    assert found.addresses == ("192.168.7.2",)


def test_a_worker_on_this_machine_keeps_its_addresses():
    own = worker("192.168.7.1", "fe80::1%bridge0")
    assert without_own(own, (ETHERNET, CABLE)) == own
    assert is_here(own, (ETHERNET, CABLE))
    assert not is_here(worker("192.168.7.1", "192.168.7.2"), (ETHERNET, CABLE))
    assert not is_here(Worker(own.announcement, ()), (ETHERNET, CABLE))
