"""Which address of several is taken."""

from announcing import CABLE, ETHERNET, VPN, WIFI, interface, way

from splitinfer.discovery.choosing import for_both, holds, in_order
from splitinfer.system.interface_kind import Kind

THUNDER, WIRED, AIR = "10.77.0.2", "192.168.7.2", "192.168.8.2"


def order(*ways):
    return [each.address for each in in_order(ways)]


def test_thunderbolt_comes_first_whatever_was_measured():
    assert order(way(WIRED, ETHERNET, 0.1), way(THUNDER, CABLE, 2.0)) == [THUNDER, WIRED]


def test_thunderbolt_that_does_not_answer_comes_last():
    assert order(way(THUNDER, CABLE, None), way(AIR, WIFI, 5.0), way(WIRED, ETHERNET, 0.3)) == [WIRED, AIR, THUNDER]


def test_the_fastest_of_the_others():
    assert order(way(AIR, WIFI, 0.2), way(WIRED, ETHERNET, 0.9)) == [AIR, WIRED]


def test_of_equals_the_one_with_the_higher_speed():
    ten = interface("en7", Kind.CABLE, "192.168.9.1/24", speed=10000)
    assert order(way(WIRED, ETHERNET, 0.30), way("192.168.9.2", ten, 0.40)) == ["192.168.9.2", WIRED]
    assert order(way(WIRED, ETHERNET, 0.30), way("192.168.9.2", ten, 0.80)) == [WIRED, "192.168.9.2"]


def test_a_vpn_comes_last_though_it_is_near():
    assert order(way("100.64.0.2", VPN, 0.01), way(AIR, WIFI, 5.0)) == [AIR, "100.64.0.2"]


def test_the_order_does_not_hang_on_what_came_first():
    ways = [way(THUNDER, CABLE, 0.2), way(WIRED, ETHERNET, 0.2), way(AIR, WIFI, 4.0), way("10.9.9.9", None, None)]
    assert order(*ways) == order(*reversed(ways)) == [THUNDER, WIRED, AIR, "10.9.9.9"]


def test_a_worker_that_another_connects_to_is_taken_where_both_are():
    """The coordinator's cable to the last worker is no use to the worker before it, which is on the switch."""
    ways = in_order([way(THUNDER, CABLE, 0.1), way(WIRED, ETHERNET, 0.4)])
    assert [each.address for each in for_both(ways, ("192.168.7.3",))] == [WIRED]
    assert [each.address for each in for_both(ways, ("10.77.0.3", "192.168.7.3"))] == [THUNDER, WIRED]
    assert for_both(ways, ("172.16.0.9",)) == ways


def test_what_an_interface_holds():
    assert holds(CABLE, "10.77.0.9")
    assert holds(CABLE, "fe80::9%bridge0")
    assert holds(CABLE, "fe80::9%4")
    assert not holds(CABLE, "fe80::9%en0")
    assert not holds(CABLE, "192.168.7.9")
