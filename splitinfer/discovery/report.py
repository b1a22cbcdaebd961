"""Reports the result of a search: as values, as rows of a table with notes below, and as JSON. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from splitinfer.common.endpoint import Endpoint
from splitinfer.discovery.announcement import FORM, short
from splitinfer.discovery.workers import KnownWorker, Route
from splitinfer.system.interface_kind import LocalInterface

COLUMNS = ("worker", "address", "by", "key fingerprint", "machine")

_NO_INTERFACE = "this machine has no network interface that is up: connect a cable or Wi-Fi"
_START = "on the worker's machine, run `splitinfer worker --host 0.0.0.0` (without --no-announce), and look again"
_BLOCKED = (
    "if one runs there, something blocks the search: a firewall on either machine (UDP port 5353), a Wi-Fi that keeps "
    "its devices apart, a VPN, or on a Mac the missing permission for the local network"
)
_BY_HAND = "an address always works: `--workers HOST.local`, or `address: HOST` in a layout"


@dataclass(frozen=True, slots=True)
class Look:
    """A search: the workers that were seen, the interfaces, its duration in seconds, and why it failed, or ""."""

    workers: tuple[KnownWorker, ...]
    interfaces: tuple[LocalInterface, ...]
    seconds: float
    problem: str = ""

    @property
    def words(self) -> str:
        """The attempts, as the end of a sentence."""
        where = ", ".join(each.words for each in self.interfaces)
        return self.problem or (f"looked for {self.seconds:.1f} s on {where}" if where else _NO_INTERFACE)


@dataclass(frozen=True, slots=True)
class Found:
    """A worker and the ways to it, the best first.

    Args:
        known_as: the name of its key in this machine's keyring, or "".
        is_impostor: the keyring has another key under its name.
        is_here: it runs on this machine.
        same_key: a cure if another machine's worker has this machine's key, else "".
        difference: the first version that differs from this process's, in words, or None.
    """

    worker: KnownWorker
    ways: tuple[Route, ...]
    known_as: str = ""
    is_impostor: bool = False
    is_here: bool = False
    difference: str | None = None
    same_key: str = ""

    @property
    def address(self) -> str | None:
        """The address for a layout, or None if the worker does not answer at any."""
        answers = self.ways and self.ways[0].seconds is not None
        return address_of(self.ways[0], self.worker) if answers else None


def address_of(way: Route, worker: KnownWorker) -> str:
    """Return a way's address in the form that a layout uses."""
    return str(Endpoint(way.address, worker.announcement.port))


def way_words(way: Route) -> str:
    """Describe a way: its interface and its round trip.

    >>> way_words(Route("10.0.0.2", None, 0.0002))
    'an unknown interface, 0.20 ms'
    """
    by = "an unknown interface" if way.interface is None else way.interface.words
    return f"{by}, {'no answer' if way.seconds is None else f'{way.seconds * 1e3:.2f} ms'}"


# ----- for people ----------------------------------------------------------------------------------


def rows(found: Sequence[Found]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each way to each worker, the best first; their columns are ``COLUMNS``."""
    for each in found:
        name, key, machine = each.worker.name, _key(each), _machine(each)
        for way in each.ways:
            by = way_words(way) if way.seconds is not None else way.problem
            yield name, address_of(way, each.worker), by + (", this machine" if each.is_here else ""), key, machine
            name = key = machine = ""  # they stand in the first row only


def _machine(found: Found) -> str:
    it = found.worker.announcement
    memory = f"{it.memory / 1e9:.0f} GB" if it.memory else ""
    return ", ".join(filter(None, (it.device, memory, f"splitinfer {it.versions.splitinfer}")))


def _key(found: Found) -> str:
    if not found.worker.fingerprint:
        return "none"
    shown = short(found.worker.fingerprint)
    return f"{shown}, known here as {found.known_as}" if found.known_as else f"{shown}, not known here"


def notes(look: Look, found: Sequence[Found]) -> Iterator[str]:
    """Yield the notes below the rows: trouble with workers, or the cure if no worker was found."""
    for each in found:
        yield from (f"{each.worker.name} {what}" for what in _troubles(each))
    yield from _shared(found)
    for name, count in Counter(each.worker.name.lower() for each in found).items():
        if count > 1:
            yield f"{count} workers are named {name}: a layout tells them apart by their keys, or by an address"
    if not found:
        yield f"no worker was found: {look.words}"
        if look.interfaces and not look.problem:
            yield from (_START, _BLOCKED)
        yield _BY_HAND


def _shared(found: Sequence[Found]) -> Iterator[str]:
    """Yield a note for workers with one key but different addresses. Workers of one machine share addresses, too."""
    by_key = {each.worker.fingerprint: each.worker for each in found if each.worker.fingerprint}
    for worker in (each.worker for each in found if each.worker.fingerprint):
        other = by_key[worker.fingerprint]
        if worker is not other and set(worker.addresses).isdisjoint(other.addresses):
            yield (
                f"{worker.name} and {other.name} have the same key: if they are two machines, the file `key` was "
                "copied from one to the other; remove it on one of them, which makes a new one, and pair that one again"
            )


def _troubles(found: Found) -> Iterator[str]:
    if found.address is None:
        refused = any("refused" in way.problem for way in found.ways)
        gone = "nothing listens there any more, or a firewall refuses connections"
        silent = "its machine is off or asleep, it was killed, or a firewall keeps connections out"
        yield f"announced itself, but does not answer: {gone if refused else silent}"
    if not found.worker.fingerprint:
        yield "has no key: it admits everyone, unencrypted (--insecure)"
    if found.same_key:
        yield found.same_key
    if found.is_impostor:
        yield (
            "has NOT the key that is known here under this name: it is another machine, or it was given a new key; "
            "`splitinfer pair` there prints it"
        )
    if found.worker.announcement.form != FORM:
        yield "announces itself in a form that this version does not know"
    if found.difference is not None:
        yield f"runs another version ({found.difference}); install the same on both"


# ----- for programs --------------------------------------------------------------------------------


def as_json(look: Look, found: Sequence[Found]) -> dict[str, Any]:
    """Return the result as JSON values; times are in seconds, memory in bytes."""
    return {"problem": look.problem or None, "workers": [_worker_as_json(each) for each in found]}


def _worker_as_json(found: Found) -> dict[str, Any]:
    announcement = found.worker.announcement
    ways = [
        {
            "address": address_of(way, found.worker),
            "interface": way.interface and way.interface.name,
            "round_trip": way.seconds,
            "problem": way.problem or None,
        }
        for way in found.ways
    ]
    return {
        "name": announcement.name,
        "address": found.address,
        "ways": ways,
        "fingerprint": announcement.fingerprint or None,
        "known_as": found.known_as or None,
        "other_key_known": found.is_impostor,
        "here": found.is_here,
        "has_own_key": bool(found.same_key),
        "device": announcement.device,
        "memory": announcement.memory,
        "versions": asdict(announcement.versions),
    }
