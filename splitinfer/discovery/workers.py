"""Merges the sightings of workers, and chooses a stage's worker and the address to use. Pure.

A worker is seen once for each interface and each kind of address; the number of its run joins these sightings. A killed
worker says no goodbye, and caches may keep its announcement for up to 75 minutes (RFC 6762, section 10). So of two runs
at the same port and address with the same key, only the later one counts.

A stage's worker is identified by its key, from the layout or from this machine's keyring under the stage's name: anyone
may announce a name. The name only decides between workers that share a key, as the workers of one machine do.

Among a worker's addresses, Thunderbolt comes first, regardless of measurements: a first connection over a sleeping
cable may be slow, and a round trip does not show bandwidth. Other cables are next, then Wi-Fi; VPNs and virtual
interfaces come last. Within one kind, the interface with the higher speed wins, then the shorter round trip.
"""

import ipaddress
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from splitinfer.core.layout import StageSpec
from splitinfer.discovery.announcement import Announcement, announced_name, fingerprint_of, short
from splitinfer.errors import LayoutError, WorkerUnreachable
from splitinfer.system.interface_kind import Kind, LocalInterface

_MOST_WORKERS, _MOST_ADDRESSES = 256, 16  # a stranger may announce any number
_RANKS = {Kind.THUNDERBOLT: 0, Kind.CABLE: 1, Kind.WIRELESS: 2, Kind.VPN: 3, Kind.VIRTUAL: 3}


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """A worker: its last announcement, and its addresses, each once. A sighting is a worker with a few of its
    addresses."""

    announcement: Announcement
    addresses: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.announcement.name

    @property
    def fingerprint(self) -> str:
        return self.announcement.fingerprint


@dataclass(frozen=True, slots=True)
class Route:
    """How an address was reached. ``interface``: this end's, or None if unknown. ``seconds``: the shortest round trip
    of a connection, or None if no connection was made; ``problem`` says why."""

    address: str
    interface: LocalInterface | None
    seconds: float | None
    problem: str = ""


# ----- sightings -----------------------------------------------------------------------------------


def merge(sightings: Iterable[KnownWorker]) -> tuple[KnownWorker, ...]:
    """Return the workers that were seen, sorted by name, without stale announcements of earlier runs. Only the last
    announcement of a run counts."""
    by_id: dict[str, KnownWorker] = {}
    for seen in sightings:
        number = seen.announcement.id
        if number in by_id or len(by_id) < _MOST_WORKERS:
            before = by_id[number].addresses if number in by_id else ()
            addresses = dict.fromkeys((*before, *filter(None, map(_usable, seen.addresses))))
            by_id[number] = KnownWorker(seen.announcement, tuple(addresses)[:_MOST_ADDRESSES])
    kept: list[KnownWorker] = []
    for worker in reversed(by_id.values()):  # the last one heard is the most likely to be alive
        if not any(_is_same_place(worker, other) for other in kept):
            kept.append(worker)
    return tuple(sorted(kept, key=lambda each: (each.name.lower(), each.announcement.id)))


def without_own(worker: KnownWorker, interfaces: Sequence[LocalInterface]) -> KnownWorker:
    """Return the worker without addresses that are this machine's own: containers and virtual machines have the same
    address on every machine. A worker without other addresses is on this machine and keeps them."""
    others = tuple(each for each in worker.addresses if not _is_own(each, interfaces))
    return replace(worker, addresses=others or worker.addresses)


def is_here(worker: KnownWorker, interfaces: Sequence[LocalInterface]) -> bool:
    """Return whether all of the worker's addresses are this machine's own."""
    return bool(worker.addresses) and all(_is_own(each, interfaces) for each in worker.addresses)


def _is_own(address: str, interfaces: Sequence[LocalInterface]) -> bool:
    bare = address.partition("%")[0]
    return any(str(each.ip) == bare for interface in interfaces for each in interface.networks)


def _is_same_place(one: KnownWorker, other: KnownWorker) -> bool:
    same = one.fingerprint == other.fingerprint and one.announcement.port == other.announcement.port
    return same and not set(one.addresses).isdisjoint(other.addresses)


def _usable(address: str) -> str | None:
    """Return the address in a form to connect to. Return None if it is not valid or leads nowhere."""
    number, _, scope = address.partition("%")
    try:
        parsed = ipaddress.ip_address(number)
    except ValueError:
        return None
    if parsed.is_loopback or parsed.is_multicast or parsed.is_unspecified:
        return None
    if parsed.version == 6 and parsed.is_link_local:
        return f"{parsed}%{scope}" if scope else None
    return str(parsed)


# ----- which worker --------------------------------------------------------------------------------


def key_of(stage: StageSpec, layout: str, known: Iterable[tuple[str, str]]) -> str:
    """Return the key of a stage without an address. ``known``: the keys and names in this machine's keyring.
    ``layout``: its name, for messages.

    Raises:
        LayoutError: no key is known, or several are.
    """
    if stage.key is not None:
        return stage.key
    keys = sorted({key for key, name in known if is_same_name(name, stage.name)})
    if len(keys) == 1:
        return keys[0]
    if keys:
        raise LayoutError(
            f"{len(keys)} keys are known here under the name {stage.name!r}; "
            f"write the one of the stage into layout {layout}"
        )
    raise LayoutError(
        f"stage {stage.name!r} of layout {layout} has no address and no key, and a worker is found by its key: "
        "give it the key that the worker printed, or its address tcp://host:port, or local for a worker on this machine"
    )


def choose(stage: str, key: str, workers: Sequence[KnownWorker]) -> KnownWorker:
    """Return the worker that a stage's name and key identify.

    Raises:
        WorkerUnreachable: no worker or more than one has that key; the text names the workers found instead.
    """
    fingerprint = fingerprint_of(key)
    owners = [worker for worker in workers if worker.fingerprint == fingerprint]
    if len(owners) > 1:
        owners = [worker for worker in owners if is_same_name(worker.name, stage)] or owners
    if len(owners) == 1:
        return owners[0]
    if owners:
        raise WorkerUnreachable(
            f"{len(owners)} workers with the key of stage {stage} were found: {_places(owners)}; "
            "name the stage as one of them (splitinfer worker --name), or give it an address"
        )
    named = [worker for worker in workers if is_same_name(worker.name, stage)]
    if named:
        raise WorkerUnreachable(_another_key(stage, fingerprint, named))
    others = f"; others were found: {_places(workers)}" if workers else ""
    raise WorkerUnreachable(f"no worker with the key of stage {stage} ({short(fingerprint)}) was found{others}")


def is_same_name(one: str, other: str) -> bool:
    """Return whether two names mean one machine; ``.local`` and the case do not count.

    >>> is_same_name("Mini.local", "mini")
    True
    """
    return announced_name(one).lower() == announced_name(other).lower()


def _another_key(stage: str, fingerprint: str, named: Sequence[KnownWorker]) -> str:
    """Return the error's text for workers that have the stage's name but another key, or no key."""
    keys = [short(worker.fingerprint) for worker in named if worker.fingerprint]
    found = f"worker {stage} was found ({_places(named)})"
    if not keys:
        return (
            f"{found}, but it has no key (it runs with --insecure), and the stage has one ({short(fingerprint)}); "
            "start it without --insecure, or give the stage its address and no key"
        )
    return (
        f"{found}, but it has another key ({' and '.join(keys)}) than the stage ({short(fingerprint)}): it is another "
        "machine, or it was given a new key; `splitinfer pair` there prints it"
    )


def _places(workers: Sequence[KnownWorker]) -> str:
    """Return the names and addresses of workers, at most four."""
    shown = [f"{worker.name} at {_place(worker)}" for worker in workers[:4]]
    more = len(workers) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _place(worker: KnownWorker) -> str:
    address = worker.addresses[0] if worker.addresses else "no address"
    return f"{f'[{address}]' if ':' in address else address}:{worker.announcement.port}"


# ----- which address -------------------------------------------------------------------------------


def in_order(ways: Iterable[Route]) -> tuple[Route, ...]:
    """Return the ways, the best first and the unreachable ones last."""

    def key(way: Route) -> tuple[float, ...]:
        rank, speed = (2, 0) if way.interface is None else (_RANKS[way.interface.kind], way.interface.speed)
        return (math.inf,) if way.seconds is None else (rank, -speed, way.seconds)

    return tuple(sorted(ways, key=lambda way: (key(way), way.address)))


def for_both(ways: Iterable[Route], others: Sequence[str]) -> tuple[Route, ...]:
    """Return the ways whose network also holds one of the ``others``, or all ways if no network does. ``others``: the
    addresses of the worker that will connect to this one and may have cables that this machine does not see."""
    every = tuple(ways)
    return tuple(way for way in every if is_shared(way, [others])) or every


def is_shared(way: Route, others: Iterable[Sequence[str]]) -> bool:
    """Return whether the network of a way holds an address of each of the ``others``."""
    by = way.interface
    return all(by is not None and any(holds(by, address) for address in addresses) for addresses in others)


def holds(interface: LocalInterface, address: str) -> bool:
    """Return whether an address is in one of the interface's networks, or a scoped one in its scope."""
    number, _, scope = address.partition("%")
    if scope:
        return scope in (interface.name, str(interface.index))
    parsed = ipaddress.ip_address(number)
    return any(parsed.version == each.version and parsed in each.network for each in interface.networks)
