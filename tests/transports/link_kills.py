"""Kill one side of an rdma link over emulated JACCL at a random moment, many times.

Two engines, each a process of this file, exchange small frames (a tenth of them up to 1 MB) as fast as they can. At a
random moment, which may be while they join, one of these is killed (-9): the child of the writer or of the reader, both
children, the engine of the connector or of the listener. Afterwards

- what each engine received until then was right and in order, byte for byte;
- each engine that is alive got one reason, of one line, the same from every call;
- no process of a link, no registration but those of killed readers, and no shared memory is left;
- the next link works.

Devices that lost their memory regions are restarted, and counted.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
from jaccl import carriers_of, is_free, is_gone
from processes import until

import transports
from tests.emulation.jaccl.world import World
from transports import Frame, Link, LinkClosed, LinkOptions, TransportError

ROOT = Path(__file__).resolve().parents[2]
VICTIMS = ("writer's child", "reader's child", "both children", "connector", "listener")
OPTIONS = LinkOptions(beat_every=0.1, dead_after=3.0)
_EARLY = 0.2  # share of the kills that come while the engines join, the latest after _JOINING seconds
_JOINING, _TALKING = 1.0, 0.3
_SECONDS = 60.0  # for everything that must happen
_TO_REACH = 10.0  # a listener, which may be dead


# -- an engine ---------------------------------------------------------------------------------------------------------


def frame(seed: int, number: int) -> Frame:
    """The frame that the other engine expects at this place."""
    chance = random.Random(f"{seed} {number}")
    size = chance.randrange(1 << 20) if chance.random() < 0.1 else chance.randrange(20_000)
    return Frame(number.to_bytes(8, "little"), (chance.randbytes(size),))


def is_right(got: Frame, expected: Frame) -> bool:
    return got.header == expected.header and [bytes(memoryview(part)) for part in got.parts] == list(expected.parts)


def talk(link: Link, seed: int, *, is_connector: bool) -> dict[str, Any]:
    """Send frames, one by one answered with a number, until the link ends; what became of it."""
    reasons: list[str] = []
    sent, received, wrong = 0, 0, 0

    def send() -> None:
        nonlocal sent
        try:
            while True:
                link.send(frame(seed, sent))
                sent += 1
        except LinkClosed as ending:
            reasons.append(ending.reason)

    sending = threading.Thread(target=send)
    if is_connector:
        sending.start()
    try:
        while True:
            got = link.recv(_SECONDS)
            expected = Frame(received.to_bytes(8, "little"), ()) if is_connector else frame(seed, received)
            wrong += not is_right(got, expected)
            received += 1
            if not is_connector:
                link.send(Frame((received - 1).to_bytes(8, "little")))
    except LinkClosed as ending:
        reasons.append(ending.reason)
    if is_connector:
        sending.join(_SECONDS)
    with suppress(LinkClosed):
        link.send(Frame(b""))
        reasons.append("it sends after its end")
    if link.closed is not None:
        reasons.append(link.closed.reason)
    return {"sent": sent, "received": received, "wrong": wrong, "reasons": reasons}


def run_connector() -> None:
    """One link for each line `ADDRESS SEED` of standard input."""
    for line in sys.stdin:
        address, seed = line.split()
        try:
            link = transports.connect(address, timeout=_TO_REACH, options=OPTIONS)
        except TransportError as problem:
            report({"refused": str(problem)})
            continue
        with link:
            report({"linked": True})
            report(talk(link, int(seed), is_connector=True))


def run_listener(address: str) -> None:
    """One link after the other; their seed comes by standard input."""
    with transports.listen(address, options=OPTIONS) as listener:
        report({"address": listener.address})
        while True:
            with listener.accept() as link:
                report(talk(link, int(sys.stdin.readline()), is_connector=False))


def report(found: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()


# -- the campaign ------------------------------------------------------------------------------------------------------


class Engine:
    """A process of this file, and what it prints."""

    def __init__(self, world: World, *arguments: str) -> None:
        paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        environment = {**os.environ, **paths, **world.environment}
        command = [sys.executable, __file__, *arguments]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines: list[dict[str, Any]] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(json.loads(line))

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def hear(self, seconds: float = _SECONDS) -> dict[str, Any]:
        """The next line that it prints. Raises AssertionError if there is none in time."""
        until(lambda: bool(self._lines), f"engine {self.process.pid} says nothing", seconds)
        return self._lines.pop(0)

    def carriers(self) -> list[psutil.Process]:
        return carriers_of(self.process.pid) if self.process.poll() is None else []

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join(_SECONDS)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


@dataclass
class Count:
    """What a campaign found."""

    kills: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    frames: int = 0
    refused: int = 0
    restarts: Counter[str] = field(default_factory=Counter)  # by what was killed
    faults: list[str] = field(default_factory=list)

    def add(self, other: Count) -> None:
        """Count another campaign's, too."""
        self.kills += other.kills
        self.reasons += other.reasons
        self.frames, self.refused = self.frames + other.frames, self.refused + other.refused
        self.restarts += other.restarts
        self.faults += other.faults


class Pair:
    """Two engines on a world's cable; whichever was killed is started again."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listener = self._listen()
        self.connector = Engine(world, "--connector")

    def _listen(self) -> Engine:
        listener = Engine(self.world, "--listener", self.world.address())
        self.address = str(listener.hear()["address"])
        return listener

    def begin(self, seed: int) -> None:
        self.listener.tell(str(seed))
        self.connector.tell(f"{self.address} {seed}")

    def kill(self, victim: str) -> bool:
        """Whether there was anything to kill."""
        if victim in ("connector", "listener"):
            getattr(self, victim).end()
            return True
        writers, readers = self.connector.carriers(), self.listener.carriers()
        chosen = {"writer's child": writers, "reader's child": readers}.get(victim, writers + readers)
        for process in chosen:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return bool(chosen)

    def mend(self) -> None:
        """Start again what was killed. The listener is always new where it waits for a link that never came."""
        if self.connector.process.poll() is not None:
            self.connector = Engine(self.world, "--connector")
        if self.listener.process.poll() is not None:
            self.listener = self._listen()

    def end(self) -> None:
        for engine in (self.connector, self.listener):
            engine.end()


@contextmanager
def pair(folder: Path) -> Iterator[Pair]:
    made = Pair(World.make(folder / "jaccl"))
    try:
        yield made
    finally:
        made.end()


def strike(engines: Pair, seed: int, count: Count) -> None:
    """One trial. Raises AssertionError with what was wrong."""
    chance = random.Random(seed)
    victim = chance.choice(VICTIMS)
    segments = _segments()
    engines.begin(seed)
    if chance.random() < _EARLY:
        time.sleep(chance.uniform(0.0, _JOINING))
    else:
        assert engines.connector.hear() == {"linked": True}, "no link"
        time.sleep(chance.uniform(0.0, _TALKING))
    if victim in ("writer's child", "reader's child", "both children"):
        until(lambda: bool(engines.connector.carriers() and engines.listener.carriers()), "no children", _SECONDS)
    carriers = engines.connector.carriers() + engines.listener.carriers()
    assert engines.kill(victim), f"{victim}: nothing to kill"
    count.kills[victim] += 1
    connected = None
    if victim != "connector":
        while "linked" in (connected := engines.connector.hear()):
            continue
        _judge(connected, count)
    if victim != "listener":
        if connected is not None and "refused" in connected:
            engines.listener.end()  # it waits for the next link, with a seed that is used up
        else:
            _judge_listener(engines, count, was_connected=connected is not None)
    until(lambda: all(map(is_gone, carriers)), f"{victim}: processes are left", _SECONDS)
    until(lambda: is_free(engines.world), f"{victim}: registrations are left", _SECONDS)
    until(lambda: _segments() <= segments, f"{victim}: shared memory is left", _SECONDS)
    left = {device: engines.world.usage(device).num_left for device in engines.world.ports}
    if any(left.values()):
        assert victim != "writer's child" or left["rdma_en0"] == 0, "a writer was within a receive"
        count.restarts[victim] += 1
    if any(left.values()) or any(engines.world.usage(device).num_groups > 400 for device in left):
        engines.world.restart()
    engines.mend()


def _judge_listener(engines: Pair, count: Count, *, was_connected: bool) -> None:
    """The listener's report; if its connector was killed early, there may have been no link and there is none."""
    try:
        _judge(engines.listener.hear(_SECONDS if was_connected else 6.0), count)
    except AssertionError:
        if was_connected or "wrong" in str(sys.exc_info()[1]):
            raise
        engines.listener.end()


def _judge(found: dict[str, Any], count: Count) -> None:
    if "refused" in found:
        count.refused += 1
        count.reasons[_kind(found["refused"])] += 1
        assert _is_sentence(found["refused"]), f"not one line is wrong: {found}"
        return
    count.frames += found["received"]
    assert found["wrong"] == 0, f"{found['wrong']} frames were wrong"
    reasons = set(found["reasons"])
    assert len(reasons) == 1, f"not one and the same reason was wrong: {reasons}"
    (reason,) = reasons
    assert _is_sentence(reason), f"not one line is wrong: {found}"
    count.reasons[_kind(reason)] += 1


def _is_sentence(reason: str) -> bool:
    return bool(reason.strip()) and "\n" not in reason


def _kind(reason: str) -> str:
    for words in ("transport process", "lost", "refused", "[jaccl]", "nothing arrived", "did not send", "silent"):
        if words in reason:
            return words
    return reason[:60]


def _segments() -> set[Path]:
    return set(Path("/dev/shm").glob("splitinfer-*"))


def campaign(kills: int, seed: int, folder: Path) -> Count:
    """So many kills, from the seed's first on."""
    return several([seed * 1_000_003 + number for number in range(1, kills + 1)], folder)


def several(seeds: Iterable[int], folder: Path) -> Count:
    """A kill for each seed; engines that showed a fault are not used again."""
    count, left = Count(), iter(seeds)
    for first in left:
        with pair(folder / str(first)) as engines:
            for seed in chain([first], left):
                try:
                    strike(engines, seed, count)
                except AssertionError as problem:
                    count.faults.append(f"kill {seed}: {problem}")
                    break
    return count


if __name__ == "__main__":
    run_listener(sys.argv[2]) if sys.argv[1] == "--listener" else run_connector()
