"""Mutated frames through a worker's port, then a real request: the worker must not crash, hang or grow.

    python tests/cluster/storm.py --frames 20000

A third of the frames are bytes on a bare connection, a third come as the first word of a well-framed link, a
third after the greeting and the order to load, when the worker believes in its coordinator.
"""

import argparse
import json
import random
import socket
import time
from collections import Counter
from contextlib import suppress

import fuzz
from peers import Peer, generate, generate_alone, hello, load, raw
from processes import RunningWorker, worker

from splitinfer.wire import codec
from transports import LinkClosed, LinkTimeout
from transports.framing import Kind, encode


def on_a_bare_connection(address: str, chance: random.Random) -> str:
    """Bytes that look like a packet of ours, without ZeroMQ around them."""
    packet = encode(Kind.DATA, seq=0, progress=0, header=codec.encode(hello()), parts=())
    with raw(address) as connection, suppress(OSError):
        connection.sendall(fuzz.mutate(b"".join(bytes(memoryview(part)) for part in packet), chance))
        connection.shutdown(socket.SHUT_WR)
    return "bare"


def as_the_first_word(address: str, chance: random.Random) -> str:
    """A damaged message on a whole link."""
    with Peer(address) as peer:
        peer.send(fuzz.mutate(codec.encode(chance.choice(fuzz.MESSAGES)), chance))
        _await_end(peer)
    return "first"


def after_the_order(address: str, chance: random.Random) -> str:
    """Damaged messages and payloads from a coordinator that was let in."""
    with Peer(address) as peer:
        peer.say(hello(session=str(chance.random()))).say(load())
        parts = [fuzz.mutate(fuzz.HIDDEN, chance)] * chance.randint(0, 2)
        peer.send(fuzz.mutate(codec.encode(chance.choice(fuzz.MESSAGES)), chance), *parts)
        _await_end(peer)
    return "ordered"


def _await_end(peer: Peer) -> None:
    """Read until the worker ends the link; a frame that happened to be harmless is not answered."""
    with suppress(LinkClosed, LinkTimeout):
        while True:
            peer.link.recv(timeout=0.02)


def storm(victim: RunningWorker, num_frames: int, seed: int) -> dict[str, object]:
    """``num_frames`` mutated frames; counts, seconds, and the worker's growth in bytes after the first tenth."""
    chance, counts = random.Random(seed), Counter[str]()
    ways = (on_a_bare_connection, as_the_first_word, after_the_order)
    began, settled = time.monotonic(), 0
    for i in range(num_frames):
        if i == num_frames // 10:
            settled = victim.rss
        counts[ways[i % len(ways)](victim.address, chance)] += 1
        assert victim.is_alive, "the worker is gone"
    return {**counts, "seconds": time.monotonic() - began, "growth": victim.rss - settled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    expected = generate_alone()
    with worker() as victim:
        assert generate(victim.address) == expected
        found = storm(victim, args.frames, args.seed)
        found["serves_on"] = generate(victim.address) == expected
    print(json.dumps(found))


if __name__ == "__main__":
    main()
