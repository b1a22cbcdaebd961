"""Two processes of this machine and a link between them, for round trips; and, run as a program, one end of it.

One JSON line in, one out:

    {"listen": "tcp://127.0.0.1:0", "curve": false, "checksum": true} -> {"address": ..., "key": ...}
    {"connect": ..., "key": ..., "checksum": true}                    -> {}
    {"ping": 4096, "rounds": 1000}                                    -> {"seconds": [...]}

The listening end echoes every frame from then on. The address ``bare`` stands for ZeroMQ without this package: a DEALER
that connects, a ROUTER that listens, no framing, no checksums, no heartbeats, and no thread between the socket and its
reader. A failed command is answered with {"error": ...}.
"""

import math
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import zmq

from splitinfer.bench.shared import machine
from splitinfer.bench.shared.child_process import ChildProcess, serve_commands
from splitinfer.errors import ModelError, PeerError
from transports import Frame, KeyPair, LinkOptions, Security, TransportError, connect, listen

_COLD = 0.1  # share of a trial's rounds, the first ones, that is not counted
BARE = "bare"
_SECONDS = 20.0  # to connect, and for one answer
_SWITCH = 0.0005  # seconds, as in a worker
Round = Callable[[memoryview], None]  # one round trip


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of link: where to listen, whether it is encrypted, whether payloads have a checksum of their own."""

    name: str
    address: str
    curve: bool = False
    checksum: bool = False


class Pair:
    """Two processes and the link between them.

    Raises:
        PeerError: there can be no link of this kind here.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._ends, common = [ChildProcess(__name__), ChildProcess(__name__)], {"checksum": kind.checksum}
        processors = machine.free_processors()
        try:
            for i, end in enumerate(self._ends):
                if processors:
                    machine.pin(end.pid, processors[i % len(processors)])
            there = self._ask(self._ends[1], {"listen": kind.address, "curve": kind.curve, **common})
            self._ask(self._ends[0], {"connect": there["address"], "key": there["key"], **common})
        except BaseException:
            self.close()
            raise

    def round_trips(self, num_bytes: int, rounds: int) -> list[float]:
        """Seconds of each round trip, the cold ones left out."""
        found = self._ask(self._ends[0], {"ping": num_bytes, "rounds": rounds})["seconds"]
        return list(found[math.ceil(rounds * _COLD) :])

    def processor_seconds(self) -> float:
        """Processor seconds of one end so far, on average."""
        return sum(sum(psutil.Process(end.pid).cpu_times()[:2]) for end in self._ends) / len(self._ends)

    def close(self) -> None:
        """End both processes."""
        for end in self._ends:
            end.close()

    def _ask(self, end: ChildProcess, options: Mapping[str, Any]) -> dict[str, Any]:
        try:
            answer = end.ask(options)
        except ModelError as error:
            raise PeerError(f"{self.kind.name}: {error}") from error
        if "error" in answer:
            raise PeerError(f"{self.kind.name}: {answer['error']}")
        return answer


# -- inside the child ----------------------------------------------------------------------------


class End:
    """The end of a link that this process is told to be."""

    def __init__(self) -> None:
        self._round: Round | None = None
        self._open: list[Any] = []  # must live as long as this process

    def handle(self, options: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command and return its answer."""
        try:
            if "listen" in options:
                return self._listen(str(options["listen"]), curve=bool(options["curve"]), checksum=options["checksum"])
            if "connect" in options:
                self._round = self._connect(str(options["connect"]), options["key"], checksum=options["checksum"])
                return {}
            return {"seconds": self._ping(int(options["ping"]), int(options["rounds"]))}
        except (TransportError, zmq.ZMQError, ValueError, RuntimeError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _listen(self, address: str, *, curve: bool, checksum: bool) -> dict[str, Any]:
        if address == BARE:
            return {"address": self._listen_bare(), "key": None}
        pair = KeyPair.make() if curve else None
        security = None if pair is None else Security(pair, None, lambda _: True)
        options = LinkOptions(checksum_parts=checksum, security=security)
        listener = listen(address, options=options)
        self._open.append(listener)

        def echo() -> None:
            with listener.accept(_SECONDS) as link:
                while True:
                    frame = link.recv()
                    link.send(Frame(frame.header, frame.parts))

        self._start(echo)
        return {"address": listener.address, "key": None if pair is None else pair.public}

    def _listen_bare(self) -> str:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        socket.LINGER = 0
        port = socket.bind_to_random_port("tcp://127.0.0.1")

        def echo() -> None:
            while True:
                socket.send_multipart(socket.recv_multipart(copy=False), copy=False)

        self._start(echo)
        return f"{BARE}:tcp://127.0.0.1:{port}"

    def _start(self, echo: Callable[[], None]) -> None:
        def until_it_ends() -> None:
            try:
                echo()
            except (TransportError, zmq.ZMQError):
                return

        threading.Thread(target=until_it_ends, name="echo", daemon=True).start()

    def _connect(self, address: str, key: str | None, *, checksum: bool) -> Round:
        if address.startswith(f"{BARE}:"):
            return self._connect_bare(address.removeprefix(f"{BARE}:"))
        security = None if key is None else Security(KeyPair.make(), key)
        options = LinkOptions(checksum_parts=checksum, security=security)
        link = connect(address, timeout=_SECONDS, options=options)
        self._open.append(link)

        def round_trip(payload: memoryview) -> None:
            link.send(Frame(b"ping", (payload,)))
            frame = link.recv(_SECONDS)
            if sum(memoryview(part).nbytes for part in frame.parts) != payload.nbytes:
                raise RuntimeError("the echo differs from what was sent")

        return round_trip

    def _connect_bare(self, address: str) -> Round:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.LINGER = 0
        socket.RCVTIMEO = int(_SECONDS * 1000)
        socket.connect(address)

        def round_trip(payload: memoryview) -> None:
            socket.send_multipart([b"ping", payload], copy=False)
            if len(socket.recv_multipart(copy=False)[1].buffer) != payload.nbytes:
                raise RuntimeError("the echo differs from what was sent")

        return round_trip

    def _ping(self, num_bytes: int, rounds: int) -> list[float]:
        if self._round is None:
            raise ValueError("there is no link to ping")
        payload = memoryview(random.Random(num_bytes).randbytes(num_bytes))
        found = []
        for _ in range(rounds):
            began = time.perf_counter()
            self._round(payload)
            found.append(time.perf_counter() - began)
        return found


if __name__ == "__main__":
    sys.setswitchinterval(_SWITCH)
    serve_commands(End().handle)
