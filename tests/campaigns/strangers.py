"""Mutated frames through a worker's port, then a real request: the worker must not crash, hang or grow.

    python -m tests.campaigns.strangers --frames 20000              # in the open
    python -m tests.campaigns.strangers --curve 20000               # strangers at an encrypted port
    python -m tests.campaigns.strangers --admitted 20000            # whose key is known, over the encrypted link

In the open, a third of the frames are bytes on a bare connection, a third come as the first word of a well-framed
link, a third after the greeting and the order to load, when the worker believes in its coordinator. Who is admitted to
an encrypted port sends the last two, and damaged packets inside the encryption. What strangers do there is in
``knocks.py``. After each batch the worker serves a good coordinator.
"""

import argparse
import os
import random
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import zmq
from knocks import Door, Handshake, knock
from peers import Peer, generate, generate_alone, hello, load, raw
from processes import RunningWorker, until, worker

from splitinfer.core.json_text import dumps
from splitinfer.keyring import Keyring
from splitinfer.wire import codec
from transports import LinkClosed, LinkOptions, LinkTimeout, Security
from transports.framing import Kind, encode
from transports.security import secure_connector

from . import fuzz

_BATCH = 500  # between two looks at the worker
_PASSING = 10  # descriptors of connections that it has not seen the end of yet


@dataclass(frozen=True)
class Victim:
    """A worker, and what those use who are admitted."""

    worker: RunningWorker
    options: LinkOptions = LinkOptions()  # noqa: RUF009 - frozen

    @property
    def address(self) -> str:
        return self.worker.address.replace("0.0.0.0", "127.0.0.1")

    @property
    def key(self) -> str | None:
        return None if self.options.security is None else self.options.security.peer

    def serves(self) -> list[int]:
        """What a good coordinator gets."""
        return generate(self.address, key=self.key)

    def peer(self) -> Peer:
        return Peer(self.address, options=self.options)

    @property
    def held(self) -> tuple[int, int]:
        """Descriptors and threads."""
        return self.worker.process.num_fds(), self.worker.process.num_threads()


Way = Callable[[Victim, random.Random], str]  # what was done


# -- what is sent ----------------------------------------------------------------------------------


def on_a_bare_connection(victim: Victim, chance: random.Random) -> str:
    """Bytes that look like a packet of ours, without ZeroMQ around them."""
    with raw(victim.address) as connection, suppress(OSError):
        connection.sendall(fuzz.mutate(b"".join(_packet()), chance))
        connection.shutdown(socket.SHUT_WR)
    return "bare"


def as_the_first_word(victim: Victim, chance: random.Random) -> str:
    """A damaged message on a whole link."""
    with victim.peer() as peer:
        peer.send(fuzz.mutate(codec.encode(chance.choice(fuzz.MESSAGES)), chance))
        _await_end(peer)
    return "first"


def after_the_order(victim: Victim, chance: random.Random) -> str:
    """Damaged messages and payloads from a coordinator that was let in."""
    with victim.peer() as peer:
        peer.say(hello(session=str(chance.random()))).say(load())
        parts = [fuzz.mutate(fuzz.HIDDEN, chance)] * chance.randint(0, 2)
        peer.send(fuzz.mutate(codec.encode(chance.choice(fuzz.MESSAGES)), chance), *parts)
        _await_end(peer)
    return "ordered"


def in_packets(victim: Victim, chance: random.Random) -> str:
    """Damaged packets below our messages, inside the encryption."""
    peer = zmq.Context.instance().socket(zmq.DEALER)
    assert victim.options.security is not None
    secure_connector(peer, victim.options.security)
    peer.LINGER, peer.RECONNECT_IVL = 0, -1
    with peer:
        peer.connect(victim.address)
        opening = [bytes(memoryview(part)) for part in encode(Kind.OPEN, seq=0)]
        parts = _packet()
        at = chance.randrange(len(parts))
        parts[at] = fuzz.mutate(parts[at], chance)
        if chance.random() < 0.5:
            opening[0] = fuzz.mutate(opening[0], chance)
        peer.send_multipart(opening)
        peer.send_multipart(parts)
        peer.poll(50)  # the first word back: a link, or why there is none
    return "packets"


def _packet() -> list[bytes]:
    packet = encode(Kind.DATA, seq=0, progress=0, header=codec.encode(hello()), parts=())
    return [bytes(memoryview(part)) for part in packet]


def _await_end(peer: Peer) -> None:
    """Read until the worker ends the link; a frame that happened to be harmless is not answered."""
    with suppress(LinkClosed, LinkTimeout):
        while True:
            peer.link.recv(timeout=0.02)


PLAIN: tuple[Way, ...] = (on_a_bare_connection, as_the_first_word, after_the_order)
ADMITTED: tuple[Way, ...] = (in_packets, as_the_first_word, after_the_order)


# -- the storm -------------------------------------------------------------------------------------


def storm(victim: Victim, num_frames: int, seed: int, ways: tuple[Way, ...] = PLAIN) -> dict[str, object]:
    """``num_frames`` mutated frames, the ways in turn."""
    chance = random.Random(seed)
    return _weather(victim, num_frames, lambda number: ways[number % len(ways)](victim, chance))


def strangers(victim: Victim, num_knocks: int, seed: int) -> dict[str, object]:
    """``num_knocks`` at an encrypted port. None of them may hear anything of ours."""
    assert victim.options.security is not None
    port = int(victim.address.rpartition(":")[2])
    good = Handshake.listened_to(port, victim.options, codec.encode(hello()))
    door, chance = Door(port, victim.options.security, good), random.Random(seed)
    return _weather(victim, num_knocks, lambda number: knock(door, chance, number))


def _weather(victim: Victim, count: int, strike: Callable[[int], str]) -> dict[str, object]:
    """``count`` strikes in batches; counts, seconds, and what the worker has grown by after the first tenth."""
    expected, counts, began = generate_alone(), Counter[str](), time.monotonic()
    assert victim.serves() == expected
    before, settled = victim.held, 0
    for number in range(count):
        if number == count // 10:
            settled = victim.worker.rss
        counts[strike(number)] += 1
        assert victim.worker.is_alive, "the worker is gone"
        if (number + 1) % _BATCH == 0 or number == count - 1:
            assert victim.serves() == expected, "it does not serve on"
            until(lambda: _holds_no_more(victim, before), f"it holds no more than {before}", 20)
    return {**counts, "seconds": round(time.monotonic() - began, 1), "growth": victim.worker.rss - settled}


def _holds_no_more(victim: Victim, before: tuple[int, int]) -> bool:
    return victim.held[0] <= before[0] + _PASSING and victim.held[1] <= before[1]


@contextmanager
def in_the_open() -> Iterator[Victim]:
    """A worker that anybody on this machine may use."""
    with worker() as running:
        yield Victim(running)


@contextmanager
def encrypted(folder: Path, *options: str) -> Iterator[Victim]:
    """A worker with keys, that admits this process's. ``options``: further ones of its command."""
    own, there = Keyring().own(), Keyring(folder / "splitinfer")
    there.admit(own.public, "studio")
    with worker("--host", "0.0.0.0", *options, env={"XDG_CONFIG_HOME": str(folder)}) as running:
        yield Victim(running, LinkOptions(security=Security(own, there.own().public)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=0)
    parser.add_argument("--curve", type=int, default=0)
    parser.add_argument("--admitted", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CONFIG_HOME"] = str(Path(folder) / "own")
        if args.frames:
            with in_the_open() as victim:
                print(dumps({"in the open": storm(victim, args.frames, args.seed)}), flush=True)
        if args.curve or args.admitted:
            with encrypted(Path(folder) / "worker") as victim:
                if args.curve:
                    print(dumps({"strangers": strangers(victim, args.curve, args.seed)}), flush=True)
                if args.admitted:
                    print(dumps({"admitted": storm(victim, args.admitted, args.seed, ADMITTED)}), flush=True)


if __name__ == "__main__":
    main()
