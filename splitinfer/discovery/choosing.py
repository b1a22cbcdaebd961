"""Which of a worker's addresses to use, by how each was reached.

Thunderbolt comes first, whatever was measured: a first connection to a sleeping cable may be slow, and its bandwidth is
not seen in a round trip. A VPN and what is virtual come last: they cost processor time and often lead around. Among the
others the shortest round trip wins. Round trips up to half again as long count as equal, because they differ by so much
from one minute to the next; among equals the interface with the higher speed is taken.

Which interface an address is reached by is not read off the address but off the connection that was made to it.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from splitinfer.system.interface_kind import Kind, LocalInterface

_EQUAL_FACTOR, _EQUAL_SECONDS = 1.5, 50e-6
_RANKS = {Kind.THUNDERBOLT: 0, Kind.CABLE: 1, Kind.WIRELESS: 1, Kind.VPN: 2, Kind.VIRTUAL: 2}


@dataclass(frozen=True, slots=True)
class Way:
    """How an address was reached. ``interface``: this end's, ``None`` where unknown; ``seconds``: the shortest round
    trip of a connection, ``None`` if there was none, and ``problem`` says why."""

    address: str
    interface: LocalInterface | None
    seconds: float | None
    problem: str = ""


def in_order(ways: Iterable[Way]) -> tuple[Way, ...]:
    """The ways, the best first; those that lead nowhere last."""
    left, ordered = sorted(ways, key=lambda way: way.address), list[Way]()
    while left:
        best = _best(left)
        left.remove(best)
        ordered.append(best)
    return tuple(ordered)


def for_both(ways: Iterable[Way], others: Sequence[str]) -> tuple[Way, ...]:
    """The ways whose network also holds one of the ``others``: addresses of the worker that will connect to this one,
    and has cables that this machine does not see. All of them, if none does."""
    every = tuple(ways)
    shared = tuple(way for way in every if way.interface is not None and _leads_to(way.interface, others))
    return shared or every


def is_shared(way: Way, others: Iterable[Sequence[str]]) -> bool:
    """Whether the network of a way holds an address of each of the ``others``."""
    return all(way.interface is not None and _leads_to(way.interface, addresses) for addresses in others)


def _best(ways: Sequence[Way]) -> Way:
    reached = [(way.seconds, way) for way in ways if way.seconds is not None]
    if not reached:
        return ways[0]
    first = min(_rank(way) for _, way in reached)
    peers = [(seconds, way) for seconds, way in reached if _rank(way) == first]
    equal = min(seconds for seconds, _ in peers) * _EQUAL_FACTOR + _EQUAL_SECONDS
    near = [(seconds, way) for seconds, way in peers if seconds <= equal]
    return min(near, key=lambda each: (-_speed(each[1]), each[0], each[1].address))[1]


def _rank(way: Way) -> int:
    return 1 if way.interface is None else _RANKS[way.interface.kind]


def _speed(way: Way) -> int:
    return 0 if way.interface is None else way.interface.speed


def _leads_to(interface: LocalInterface, addresses: Sequence[str]) -> bool:
    return any(holds(interface, address) for address in addresses)


def holds(interface: LocalInterface, address: str) -> bool:
    """Whether an address is in one of the interface's networks; a scoped one, whether it is in its scope."""
    number, _, scope = address.partition("%")
    if scope:
        return scope in (interface.name, str(interface.index))
    parsed = ipaddress.ip_address(number)
    return any(parsed.version == each.version and parsed in each.network for each in interface.networks)
