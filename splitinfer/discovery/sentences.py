"""What a person reads: each worker, what was tried on which interface, and what to do where nothing was found."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from splitinfer.discovery.announcement import FORM, short
from splitinfer.discovery.choosing import Way
from splitinfer.discovery.result import Discovery, Found, Tried, address_of

NONE_HERE = (
    "nothing here speaks multicast DNS: install splitinfer with its extra `discover` "
    "(pip install 'splitinfer[discover]')" + ("" if sys.platform == "darwin" else ", or Avahi with avahi-utils")
)
_BY_HAND = "an address always works: tcp://HOST:5577 in the layout, or HOST.local if the system resolves that"
_START = "on the worker's machine, run `splitinfer worker --host 0.0.0.0` (without --no-announce), and look again"
_BLOCKED = (
    "multicast DNS (UDP port 5353) does not get through: a firewall on either machine, a Wi-Fi that keeps its devices "
    "apart (client isolation), a VPN, or on macOS a program without the permission for the local network"
)


def lines(discovery: Discovery) -> Iterator[str]:
    """The report, line by line."""
    for found in discovery.found:
        yield from _worker(found)
    yield from _several(discovery.found)
    if discovery.stale:
        names = ", ".join(sorted(set(discovery.stale)))
        yield f"left out: {_times(discovery.stale)} that an earlier run left behind ({names})"
    if not discovery.found:
        yield from nothing(discovery)


def nothing(discovery: Discovery) -> Iterator[str]:
    """What was tried where no worker was found, and what to do."""
    if not discovery.means:
        yield NONE_HERE
        yield _BY_HAND
        return
    if discovery.tried:
        yield f"no worker was found in {discovery.seconds:.1f} s by {discovery.means}"
    if discovery.problem:
        yield discovery.problem
    for tried in discovery.tried:
        if tried.problem or not discovery.problem:  # that nobody answered in so short a time says nothing
            yield f"  {_tried(tried)}"
    yield from [_mended(discovery.means)] if discovery.problem else _remedies(discovery.tried)
    yield _BY_HAND


def in_one(discovery: Discovery) -> str:
    """What was tried, as the end of a sentence."""
    if not discovery.means:
        return NONE_HERE
    if discovery.problem:
        return f"{discovery.problem}; {_mended(discovery.means)}"
    where = ", ".join(_tried(each) for each in discovery.tried) or "no network interface is up"
    return f"looked for {discovery.seconds:.1f} s by {discovery.means} on {where}"


def way_words(way: Way) -> str:
    """A way: its interface and its round trip.

    >>> way_words(Way("10.0.0.2", None, 0.0002))
    'an unknown interface, 0.20 ms'
    """
    by = "an unknown interface" if way.interface is None else way.interface.words
    return f"{by}, {'no answer' if way.seconds is None else f'{way.seconds * 1e3:.2f} ms'}"


def _worker(found: Found) -> Iterator[str]:
    announcement = found.worker.announcement
    if found.best is None:
        yield f"{announcement.name}: announced, but it does not answer"
        for way in found.ways:
            yield f"    {address_of(way, found.worker)}: {way.problem}"
        yield f"    {_why_silent(found)}"
    else:
        here = ", on this machine" if found.is_here else ""
        yield f"{announcement.name}: {found.address} by {way_words(found.best)}{here}"
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
    announcement = found.worker.announcement
    memory = (
        f"{announcement.memory / 1e9:.0f} GB of memory, {announcement.free / 1e9:.0f} GB free"
        if announcement.memory
        else ""
    )
    version = f"splitinfer {announcement.versions.splitinfer}, mlx {announcement.versions.mlx}"
    return " · ".join(filter(None, (announcement.device, memory, version)))


def _key(found: Found) -> str:
    if not found.worker.fingerprint:
        return "no key: it admits everyone, unencrypted (--insecure)"
    shown = f"key {short(found.worker.fingerprint)}"
    if found.is_impostor:
        return (
            f"{shown}: NOT the key that is known here under this name: another machine, or it was given a new key; "
            "`splitinfer pair` there prints it"
        )
    return f"{shown}, known here as {found.known_as}" if found.known_as else f"{shown}, not known here"


def _several(found: Sequence[Found]) -> Iterator[str]:
    names = Counter(each.worker.name.lower() for each in found)
    for name, count in names.items():
        if count > 1:
            yield f"{count} workers are named {name}: a layout tells them apart by their keys, or by an address"


def _tried(tried: Tried) -> str:
    interface = tried.interface
    where = f"{interface.words}, {next(iter(interface.ipv4), 'no IPv4 address')}"
    if tried.problem:
        return f"{where}: could not ask ({tried.problem})"
    if tried.num_others == 0:
        return f"{where}: no device answered"
    return f"{where}: {tried.num_others} other device{'s' if tried.num_others > 1 else ''} answered, no worker"


def _remedies(tried: Sequence[Tried]) -> Iterator[str]:
    if not tried:
        yield "this machine has no network interface that is up: connect a cable or Wi-Fi"
        return
    silent = [each for each in tried if each.num_others == 0]
    if silent:
        where = "" if len(silent) == len(tried) else f" on {', '.join(each.interface.name for each in silent)}"
        yield f"either there is no other device{where}, or {_BLOCKED}"
    if len(silent) < len(tried):
        yield f"multicast DNS works, so no worker announces itself there: {_START}"
    else:
        yield f"if a worker runs there: {_START}"


def _mended(means: str) -> str:
    """What to do where browsing failed."""
    daemon = " (Avahi needs its daemon, avahi-daemon)" if means.startswith("avahi") else ""
    other = "" if means == "zeroconf" else ", or do without it: pip install 'splitinfer[discover]'"
    return f"no worker is found without it: put that right{daemon}{other}"


def _times(names: Sequence[str]) -> str:
    return "1 entry" if len(names) == 1 else f"{len(names)} entries"
