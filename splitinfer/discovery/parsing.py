"""What ``avahi-browse`` and ``dns-sd`` print about workers. Nothing raises: what cannot be parsed is left out.

avahi-browse --resolve --parsable   "=;eth0;IPv4;mini\\0323fa2c1;_splitinfer._tcp;local;mini.local;10.0.0.2;5577;"key=…"
…"
                                    A text's bytes that are no letters are \\DDD, decimal; in the strings of the TXT
                                    record only quotes and backslashes are escaped. Recorded from avahi 0.8.
dns-sd -Z                           "mini\\0323fa2c1._splitinfer._tcp   SRV   0 0 5577 mini.local. ; Replace …" and
                                    "mini\\0323fa2c1._splitinfer._tcp   TXT   "key=…" …", as Apple's dns-sd.c prints
                                    them (mDNSResponder, Clients); it has no addresses.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from splitinfer.discovery.announcement import SERVICE, from_strings
from splitinfer.discovery.workers import Sighting

_FIELDS = 10  # of a resolved line of avahi-browse
_MOST_LINES = 4096
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(rb"\\(\d{3}|.)", re.DOTALL)
_ZONE = re.compile(rf"^(\S+)\.{re.escape(SERVICE)}(?:\.local\.?)?\s+(SRV|TXT)\s+(.*)$")
_SRV = re.compile(r"^\d+ \d+ (\d{1,5}) (\S+)")


@dataclass(frozen=True, slots=True)
class Service:
    """An instance that dns-sd listed: its host, whose addresses the system knows, its port, its TXT record."""

    host: str
    port: int
    strings: tuple[bytes, ...]


def avahi_sightings(text: str) -> tuple[Sighting, ...]:
    """The workers in the output of ``avahi-browse --resolve --parsable``."""
    return tuple(filter(None, map(_avahi_sighting, text.splitlines()[:_MOST_LINES])))


def zone_services(text: str) -> tuple[Service, ...]:
    """The instances in the output of ``dns-sd -Z``; those that have both records."""
    places: dict[str, tuple[str, int]] = {}
    records: dict[str, tuple[bytes, ...]] = {}
    for line in text.splitlines()[:_MOST_LINES]:
        found = _ZONE.match(line)
        if found is None:
            continue
        if found[2] == "TXT":
            records[found[1]] = tuple(_strings(found[3]))
        elif place := _SRV.match(found[3]):
            places[found[1]] = (_unescaped(place[2]).decode(errors="replace"), int(place[1]))
    return tuple(Service(*places[name], records[name]) for name in places if name in records)


def _avahi_sighting(line: str) -> Sighting | None:
    fields = line.split(";", _FIELDS - 1)
    if len(fields) != _FIELDS or fields[0] != "=" or fields[4] != SERVICE or not fields[8].isdigit():
        return None
    announcement = from_strings(_strings(fields[9]), int(fields[8][:6]))
    return None if announcement is None else Sighting(announcement, (fields[7],), fields[1])


def _strings(text: str) -> Iterator[bytes]:
    return (_unescaped(found[1]) for found in _QUOTED.finditer(text))


def _unescaped(text: str) -> bytes:
    return _ESCAPED.sub(_byte, text.encode(errors="replace"))


def _byte(found: re.Match[bytes]) -> bytes:
    escaped = found[1]
    if len(escaped) == 1:
        return escaped
    return bytes([int(escaped)]) if int(escaped) < 256 else found[0]
