"""Hostile bytes at a worker's port, then real requests: nothing must crash, hang or grow.

    in the open damaged frames: bytes on a bare connection, the first word of a well-framed link, and what comes after
                the greeting and the order to load, when it believes in its coordinator
    admitted    over the encrypted link, with a key: damaged packets inside the encryption, first words, orders

Each has half of the time, unless ``--only`` names one. After each batch the worker serves a good coordinator.
"""

import argparse
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import zmq
from every_message import EXAMPLES, mutate
from peers import Peer, generate, hello, load, raw
from processes import RunningWorker, until, worker

from splitinfer.keyring import Keyring
from splitinfer.wire import headers
from transports import LinkClosed, LinkOptions, LinkTimeout, Security
from transports.framing import FrameKind, encode
from transports.security import secure_connector

from .report import Report

_MESSAGES = [*EXAMPLES.values()]
_HIDDEN = bytes(48)  # of a step
_BATCH = 500  # between two looks at the worker
_MOST_GROWTH = 30 * 2**20  # bytes
_SETTLED = 5  # strikes, after which it has what it needs for them
_PASSING = 10  # descriptors of connections that it has not seen the end of yet


@dataclass(frozen=True)
class Victim:
    worker: RunningWorker
    options: LinkOptions = LinkOptions()  # noqa: RUF009 - frozen

    @property
    def address(self) -> str:
        return self.worker.address.replace("0.0.0.0", "127.0.0.1")

    @property
    def key(self) -> str | None:
        return None if self.options.security is None else self.options.security.peer

    def serves(self) -> list[int]:
        return generate(self.address, key=self.key)

    def peer(self) -> Peer:
        return Peer(self.address, options=self.options)

    @property
    def held(self) -> tuple[int, int]:
        return self.worker.process.num_fds(), self.worker.process.num_threads()


Way = Callable[[Victim, random.Random], str]  # what was done


# -- what is sent ----------------------------------------------------------------------------------


def on_a_bare_connection(victim: Victim, chance: random.Random) -> str:
    """Bytes that look like a packet of ours, without ZeroMQ around them."""
    with raw(victim.address) as connection, suppress(OSError):
        connection.sendall(mutate(b"".join(_packet()), chance))
        connection.shutdown(socket.SHUT_WR)
    return "bare"


def as_the_first_word(victim: Victim, chance: random.Random) -> str:
    """A damaged message on a whole link."""
    with victim.peer() as peer:
        peer.send(mutate(headers.encode(chance.choice(_MESSAGES)), chance))
        _await_end(peer)
    return "first"


def after_the_order(victim: Victim, chance: random.Random) -> str:
    """Damaged messages and payloads from a coordinator that was let in."""
    with victim.peer() as peer:
        peer.say(hello(session=str(chance.random()))).say(load())
        parts = [mutate(_HIDDEN, chance)] * chance.randint(0, 2)
        peer.send(mutate(headers.encode(chance.choice(_MESSAGES)), chance), *parts)
        _await_end(peer)
    return "ordered"


def in_packets(victim: Victim, chance: random.Random) -> str:
    """Damaged packets below our messages, inside the encryption."""
    peer = zmq.Context.instance().socket(zmq.DEALER)
    secure_connector(peer, victim.options.security)
    peer.LINGER, peer.RECONNECT_IVL = 0, -1
    with peer:
        peer.connect(victim.address)
        opening = [bytes(memoryview(part)) for part in encode(FrameKind.OPEN, seq=0)]
        parts = _packet()
        at = chance.randrange(len(parts))
        parts[at] = mutate(parts[at], chance)
        if chance.random() < 0.5:
            opening[0] = mutate(opening[0], chance)
        peer.send_multipart(opening)
        peer.send_multipart(parts)
        peer.poll(50)  # the first word back: a link, or why there is none
    return "packets"


def _packet() -> list[bytes]:
    packet = encode(FrameKind.DATA, seq=0, progress=0, header=headers.encode(hello()), parts=())
    return [bytes(memoryview(part)) for part in packet]


def _await_end(peer: Peer) -> None:
    """Read until the worker ends the link; a frame that happened to be harmless is not answered."""
    with suppress(LinkClosed, LinkTimeout):
        while True:
            peer.link.recv(timeout=0.02)


# -- the storm -------------------------------------------------------------------------------------


def storm(victim: Victim, numbers: Iterable[int], seed: int, ways: Sequence[Way]) -> dict[str, int]:
    """Mutated frames, the ways in turn, one for each number; counts, and what the worker has grown by since the first
    of them. After each batch it serves."""
    chance, expected, counts = random.Random(seed), generate(), Counter[str]()

    def look() -> None:
        assert victim.serves() == expected, "it does not serve on"
        until(lambda: _holds_no_more(victim, before), f"it holds no more than {before}", 20)

    assert victim.serves() == expected
    before, settled = victim.held, victim.worker.rss
    for number in numbers:
        counts[ways[number % len(ways)](victim, chance)] += 1
        assert victim.worker.is_alive, "the worker is gone"
        if (number + 1) % _BATCH == 0:
            look()
        if number + 1 in (_SETTLED, _BATCH):
            settled = victim.worker.rss
    look()
    return {**counts, "growth": victim.worker.rss - settled}


def _holds_no_more(victim: Victim, before: tuple[int, int]) -> bool:
    return victim.held[0] <= before[0] + _PASSING and victim.held[1] <= before[1]


@contextmanager
def in_the_open(_folder: Path) -> Iterator[Victim]:
    """A worker that anybody on this machine may use."""
    with worker() as running:
        yield Victim(running)


@contextmanager
def admitted(folder: Path) -> Iterator[Victim]:
    """A worker with keys, that admits this process's."""
    own, there = Keyring().own(), Keyring(folder / "splitinfer")
    there.admit(own.public, "studio")
    with worker("--host", "0.0.0.0", env={"XDG_CONFIG_HOME": str(folder)}) as running:
        yield Victim(running, LinkOptions(security=Security(own, there.own().public)))


# -- the campaign ----------------------------------------------------------------------------------

PARTS = {
    "in the open": (in_the_open, (on_a_bare_connection, as_the_first_word, after_the_order)),
    "admitted": (admitted, (in_packets, as_the_first_word, after_the_order)),
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=PARTS)


def campaign(report: Report, given: argparse.Namespace) -> None:
    parts = [given.only] if given.only else [*PARTS]
    for name in parts:
        opened, ways = PARTS[name]
        report.begin(1 / len(parts))
        try:
            with opened(report.folder) as victim:
                found = storm(victim, report.numbers(), report.seed, ways)
        except AssertionError as error:
            report.wrong(f"{name}: {error}")
            continue
        growth = found["growth"]
        report.check(growth < _MOST_GROWTH, f"{name}: memory grew by {growth:,} bytes")
        report.say(f"{name}: {found}")
        report.figures[name] = found
