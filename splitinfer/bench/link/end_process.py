"""One end of a link, in a process of its own: ``python -m splitinfer.bench.link.end_process``. One JSON line in, one
out.

    {"listen": "tcp://127.0.0.1:0", "curve": false, "checksum": true} -> {"address": ..., "key": ...}
    {"connect": ..., "key": ..., "checksum": true}                    -> {}
    {"ping": 4096, "rounds": 1000}                                    -> {"seconds": [...]}

Who listens sends everything back from then on.
The address ``bare`` stands for ZeroMQ without anything of ours: a DEALER that connects, a ROUTER that listens, no
framing, no checksums, no heartbeats, no thread between the socket and whoever waits. What cannot be done is said as
{"error": ...}.
"""

import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from splitinfer.bench.shared.child_process import commands, own_output
from transports import Frame, KeyPair, LinkOptions, Security, TransportError, connect, listen

BARE = "bare"
_SECONDS = 20.0  # to connect, and for one answer
_SWITCH = 0.0005  # as a worker has it
Round = Callable[[memoryview], None]  # there and back


def main() -> None:
    """Obey until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it closes the pipe
    sys.setswitchinterval(_SWITCH)
    end = End()
    commands(own_output(), end.obey)


class End:
    """What this process has been told to be."""

    def __init__(self) -> None:
        self._round: Round | None = None
        self._kept: list[Any] = []  # what must not go before this process does

    def obey(self, options: dict[str, Any]) -> dict[str, Any]:
        """One order, and what comes of it."""
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
        self._kept.append(listener)

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
        self._kept.append(link)

        def round_trip(payload: memoryview) -> None:
            link.send(Frame(b"ping", (payload,)))
            frame = link.recv(_SECONDS)
            if sum(memoryview(part).nbytes for part in frame.parts) != payload.nbytes:
                raise RuntimeError("something else came back")

        return round_trip

    def _connect_bare(self, address: str) -> Round:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.LINGER = 0
        socket.RCVTIMEO = int(_SECONDS * 1000)
        socket.connect(address)

        def round_trip(payload: memoryview) -> None:
            socket.send_multipart([b"ping", payload], copy=False)
            if len(socket.recv_multipart(copy=False)[1].buffer) != payload.nbytes:
                raise RuntimeError("something else came back")

        return round_trip

    def _ping(self, num_bytes: int, rounds: int) -> list[float]:
        if self._round is None:
            raise ValueError("there is nobody to ping")
        payload = memoryview(random.Random(num_bytes).randbytes(num_bytes))
        found = []
        for _ in range(rounds):
            began = time.perf_counter()
            self._round(payload)
            found.append(time.perf_counter() - began)
        return found


if __name__ == "__main__":
    main()
