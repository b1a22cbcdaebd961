"""What a look around found and what was tried: as values, as sentences for people, and as one JSON document. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from splitinfer.discovery.announcement import FORM, short
from splitinfer.discovery.workers import Way, Worker
from splitinfer.system.interface_kind import LocalInterface

_BY_HAND = "an address always works: tcp://HOST:5577 in the layout, or HOST.local if the system resolves that"
_START = "on the worker's machine, run `splitinfer worker --host 0.0.0.0` (without --no-announce), and look again"
_BLOCKED = (
    "multicast DNS (UDP port 5353) does not get through: a firewall on either machine, a Wi-Fi that keeps its devices "
    "apart (client isolation), a VPN, or on macOS a program without the permission for the local network"
)
_NO_INTERFACE = "this machine has no network interface that is up: connect a cable or Wi-Fi"


@dataclass(frozen=True, slots=True)
class Tried:
    """An interface: how many other devices were heard on it, or why it could not be asked."""

    interface: LocalInterface
    num_others: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """A look around: the workers that were seen, the names of entries that earlier runs left behind, what was tried,
    how many seconds it took, and why it failed, or ""."""

    workers: tuple[Worker, ...]
    stale: tuple[str, ...]
    tried: tuple[Tried, ...]
    seconds: float
    problem: str = ""

    @property
    def words(self) -> str:
        """What was tried, as the end of a sentence."""
        where = ", ".join(map(_tried, self.tried)) or "no network interface is up"
        return self.problem or f"looked for {self.seconds:.1f} s on {where}"


@dataclass(frozen=True, slots=True)
class Found:
    """A worker, and the ways to it, the best first. ``known_as``: the name under which its key is in this machine's
    keyring, "" if it is not; ``is_impostor``: the keyring has another key under its name; ``is_here``: it runs on this
    machine; ``difference``: of its versions from the own ones, in words, or None."""

    worker: Worker
    ways: tuple[Way, ...]
    known_as: str = ""
    is_impostor: bool = False
    is_here: bool = False
    difference: str | None = None

    @property
    def address(self) -> str | None:
        """The address for a layout; ``None`` if the worker does not answer at any."""
        answers = self.ways and self.ways[0].seconds is not None
        return address_of(self.ways[0], self.worker) if answers else None


def address_of(way: Way, worker: Worker) -> str:
    """A way's address as a layout has it."""
    host = f"[{way.address}]" if ":" in way.address else way.address
    return f"tcp://{host}:{worker.announcement.port}"


def way_words(way: Way) -> str:
    """A way: its interface and its round trip.

    >>> way_words(Way("10.0.0.2", None, 0.0002))
    'an unknown interface, 0.20 ms'
    """
    by = "an unknown interface" if way.interface is None else way.interface.words
    return f"{by}, {'no answer' if way.seconds is None else f'{way.seconds * 1e3:.2f} ms'}"


# ----- sentences -----------------------------------------------------------------------------------


def lines(look: Look, found: Sequence[Found]) -> Iterator[str]:
    """The report, line by line."""
    for each in found:
        yield from _worker(each)
    for name, count in Counter(each.worker.name.lower() for each in found).items():
        if count > 1:
            yield f"{count} workers are named {name}: a layout tells them apart by their keys, or by an address"
    if look.stale:
        entries = "1 entry" if len(look.stale) == 1 else f"{len(look.stale)} entries"
        yield f"left out: {entries} that an earlier run left behind ({', '.join(sorted(set(look.stale)))})"
    if not found:
        yield from _nothing(look)


def _nothing(look: Look) -> Iterator[str]:
    """What was tried where no worker was found, and what to do."""
    if look.tried:
        yield f"no worker was found in {look.seconds:.1f} s"
    if look.problem:
        yield look.problem
    for tried in look.tried:
        if tried.problem or not look.problem:  # after a failure it means nothing that nobody answered
            yield f"  {_tried(tried)}"
    if not look.problem:
        yield from _remedies(look.tried)
    yield _BY_HAND


def _worker(found: Found) -> Iterator[str]:
    announcement = found.worker.announcement
    if found.address is None:
        yield f"{announcement.name}: announced, but it does not answer"
        for way in found.ways:
            yield f"    {address_of(way, found.worker)}: {way.problem}"
        yield f"    {_why_silent(found)}"
    else:
        here = ", on this machine" if found.is_here else ""
        yield f"{announcement.name}: {found.address} by {way_words(found.ways[0])}{here}"
        for way in found.ways[1:]:
            by = f"by {way_words(way)}" if way.seconds is not None else f"does not answer ({way.problem})"
            yield f"    also {address_of(way, found.worker)} {by}"
    yield f"    {_machine(found)}"
    yield f"    {_key(found)}"
    if announcement.form != FORM:
        yield "    it announces itself in a form that this version does not know"
    if found.difference is not None:
        yield f"    it runs another version ({found.difference}); install the same on both"


def _why_silent(found: Found) -> str:
    if any("refused" in way.problem for way in found.ways):
        return "nothing listens there any more, or a firewall refuses connections"
    return "its machine is off or asleep, or a firewall keeps connections out"


def _machine(found: Found) -> str:
    it = found.worker.announcement
    memory = f"{it.memory / 1e9:.0f} GB of memory, {it.free / 1e9:.0f} GB free" if it.memory else ""
    version = f"splitinfer {it.versions.splitinfer}, mlx {it.versions.mlx}"
    return " · ".join(filter(None, (it.device, memory, version)))


def _key(found: Found) -> str:
    if not found.worker.fingerprint:
        return "no key: it admits everyone, unencrypted (--insecure)"
    shown = f"key fingerprint {short(found.worker.fingerprint)}"
    if found.is_impostor:
        return (
            f"{shown}: NOT the key that is known here under this name: another machine, or it was given a new key; "
            "`splitinfer pair` there prints it"
        )
    return f"{shown}, known here as {found.known_as}" if found.known_as else f"{shown}, not known here"


def _tried(tried: Tried) -> str:
    where = f"{tried.interface.words}, {next(iter(tried.interface.ipv4), 'no IPv4 address')}"
    if tried.problem:
        return f"{where}: could not ask ({tried.problem})"
    if tried.num_others == 0:
        return f"{where}: no device answered"
    return f"{where}: {tried.num_others} other device{'s' if tried.num_others > 1 else ''} answered, no worker"


def _remedies(tried: Sequence[Tried]) -> Iterator[str]:
    silent = [each for each in tried if each.num_others == 0]
    if not tried:
        yield _NO_INTERFACE
        return
    if silent:
        where = "" if len(silent) == len(tried) else f" on {', '.join(each.interface.name for each in silent)}"
        yield f"either there is no other device{where}, or {_BLOCKED}"
    if len(silent) < len(tried):
        yield f"multicast DNS works, so no worker announces itself there: {_START}"
    else:
        yield f"if a worker runs there: {_START}"


# ----- the document --------------------------------------------------------------------------------


def document(look: Look, found: Sequence[Found]) -> dict[str, Any]:
    """The report as one JSON document: seconds in seconds, memory in bytes, speeds in Mb/s."""
    return {
        "seconds": round(look.seconds, 3),
        "problem": look.problem or None,
        "workers": [_document_of(each) for each in found],
        "stale": list(look.stale),
        "interfaces": [
            {
                "name": each.interface.name,
                "kind": each.interface.kind.value,
                "addresses": [str(network.ip) for network in each.interface.networks],
                "others": each.num_others,
                "problem": each.problem or None,
            }
            for each in look.tried
        ],
    }


def _document_of(found: Found) -> dict[str, Any]:
    announcement = found.worker.announcement
    return {
        "name": announcement.name,
        "id": announcement.id,
        "address": found.address,
        "ways": [_way(each, found.worker) for each in found.ways],
        "fingerprint": announcement.fingerprint or None,
        "known_as": found.known_as or None,
        "other_key_known": found.is_impostor,
        "here": found.is_here,
        "device": announcement.device or None,
        "memory": announcement.memory or None,
        "free": announcement.free or None,
        "versions": asdict(announcement.versions),
        "version_difference": found.difference,
    }


def _way(way: Way, worker: Worker) -> dict[str, Any]:
    interface = way.interface
    return {
        "address": address_of(way, worker),
        "interface": interface and interface.name,
        "kind": interface and interface.kind.value,
        "speed": (interface and interface.speed) or None,
        "round_trip": way.seconds,
        "problem": way.problem or None,
    }
