"""Sightings of one worker as one worker.

A worker is seen once for each interface and each kind of address, and again whenever its record changes. The number of
its run joins these sightings: names do not, since two workers may have one.

A worker that was killed says no goodbye, and for up to 75 minutes (RFC 6762, section 10) a cache may still hold what it
announced. If another run is announced at the same port of the same address, with the same key, then the earlier run is
over: one of both entries is left out. Which one is no matter, because both lead to the same place.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from splitinfer.discovery.announcement import Announcement
from splitinfer.system.interface_kind import LocalInterface

_MOST_WORKERS, _MOST_ADDRESSES = 256, 16  # a stranger may announce any number


@dataclass(frozen=True, slots=True)
class Sighting:
    """An announcement with addresses that came with it. ``interface``: where it was heard, "" if that is not known; it
    is the scope of an IPv6 address that is valid on one link only."""

    announcement: Announcement
    addresses: tuple[str, ...]
    interface: str = ""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker: what it announced last, and all addresses, each once."""

    announcement: Announcement
    addresses: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.announcement.name

    @property
    def fingerprint(self) -> str:
        return self.announcement.fingerprint


@dataclass(frozen=True, slots=True)
class Merged:
    """The workers, by name, and the names of entries that earlier runs left behind."""

    workers: tuple[Worker, ...]
    stale: tuple[str, ...] = ()


def merge(sightings: Iterable[Sighting]) -> Merged:
    """The workers that were seen. Of several announcements of one run, the last counts."""
    by_id: dict[str, Worker] = {}
    for seen in sightings:
        number = seen.announcement.id
        before = by_id.get(number)
        if before is None and len(by_id) >= _MOST_WORKERS:
            continue
        addresses = (*(before.addresses if before else ()), *filter(None, (_scoped(seen, a) for a in seen.addresses)))
        by_id[number] = Worker(seen.announcement, tuple(dict.fromkeys(addresses))[:_MOST_ADDRESSES])
    return _without_stale(tuple(by_id.values()))


def without_own(worker: Worker, interfaces: Sequence[LocalInterface]) -> Worker:
    """The worker without the addresses that are this machine's own, unless it has no others, and so is on this machine.
    Containers and virtual machines have the same address on every machine."""
    own = {str(each.ip) for interface in interfaces for each in interface.networks}
    others = tuple(address for address in worker.addresses if address.partition("%")[0] not in own)
    return replace(worker, addresses=others or worker.addresses)


def is_here(worker: Worker, interfaces: Sequence[LocalInterface]) -> bool:
    """Whether all of its addresses are this machine's own."""
    own = {str(each.ip) for interface in interfaces for each in interface.networks}
    return bool(worker.addresses) and all(address.partition("%")[0] in own for address in worker.addresses)


def _without_stale(workers: Sequence[Worker]) -> Merged:
    kept: list[Worker] = []
    stale: list[str] = []
    for worker in reversed(workers):  # the last one heard is the likelier to live
        if any(_is_same_place(worker, other) for other in kept):
            stale.append(worker.name)
        else:
            kept.append(worker)
    return Merged(tuple(sorted(kept, key=lambda each: (each.name.lower(), each.announcement.id))), tuple(stale))


def _is_same_place(one: Worker, other: Worker) -> bool:
    same = one.fingerprint == other.fingerprint and one.announcement.port == other.announcement.port
    return same and not set(one.addresses).isdisjoint(other.addresses)


def _scoped(seen: Sighting, address: str) -> str | None:
    """The address as it can be connected to; ``None`` for what is none, or leads nowhere."""
    number, _, scope = address.partition("%")
    try:
        parsed = ipaddress.ip_address(number)
    except ValueError:
        return None
    if parsed.is_loopback or parsed.is_multicast or parsed.is_unspecified:
        return None
    if parsed.version == 6 and parsed.is_link_local:
        scope = scope or seen.interface
        return f"{parsed}%{scope}" if scope else None
    return str(parsed)
