"""What avahi-browse and dns-sd print, read."""

import random
from pathlib import Path

import pytest
from announcing import announced

from splitinfer.discovery.announcement import from_strings
from splitinfer.discovery.parsing import avahi_sightings, zone_services

RECORDED = Path(__file__).parent / "recorded"
AVAHI, ZONE = (RECORDED / "avahi_browse.txt").read_text(), (RECORDED / "dns_sd_zone.txt").read_text()
ODD = 'Zoë; "the" mini\\'


def test_avahi_s_lines_with_quotes_and_semicolons():
    found = avahi_sightings(AVAHI)
    assert [(each.addresses, each.interface) for each in found] == [
        (("fe80::105f:83ff:fe1f:be2c",), "eth0"),
        (("10.9.0.2",), "eth0"),
    ]
    assert {each.announcement for each in found} == {announced(name=ODD, device="Apple M4; Pro")}


def test_dns_sd_s_zone():
    (found,) = zone_services(ZONE)
    assert (found.host, found.port) == ("arts-mini-2.local.", 5577)
    assert from_strings(found.strings, found.port) == announced(name=ODD)


def test_of_another_service_nothing_is_taken():
    assert avahi_sightings(AVAHI.replace("_splitinfer._tcp", "_http._tcp")) == ()
    assert zone_services(ZONE.replace("_splitinfer._tcp", "_http._tcp")) == ()


@pytest.mark.parametrize("text", [AVAHI, ZONE], ids=["avahi", "dns-sd"])
def test_damaged_output_raises_nothing(text: str):
    chance = random.Random(3)
    for _ in range(300):
        damaged = list(text)
        for _ in range(chance.randrange(1, 40)):
            damaged[chance.randrange(len(damaged))] = chance.choice('\\";=\n 09\ufffd')
        avahi_sightings("".join(damaged))
        for service in zone_services("".join(damaged)):
            from_strings(service.strings, service.port)
