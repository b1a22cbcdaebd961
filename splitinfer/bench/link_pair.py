"""Two processes of this machine and a link between them, to be measured; and, run as a program, one end of it.

One JSON line in, one out:

    {"listen": "tcp://127.0.0.1:0", "curve": false, "checksum": true} -> {"address": ..., "key": ...}
    {"connect": ..., "key": ..., "checksum": true}                    -> {}
    {"probe": 3}                                                      -> {"figures": [three measurements]}

The listening end answers every probe from then on (``engine.links.probe``). The address ``bare`` stands for ZeroMQ
without this package: a DEALER that connects, a ROUTER that listens, no framing, no checksums, no heartbeats, and no
thread between the socket and its reader. A failed command is answered with {"error": ...}.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

import zmq

from splitinfer.bench import machine
from splitinfer.bench.child_process import ChildProcess, serve_commands
from splitinfer.core.metrics.link_measurement import LinkMeasurement
from splitinfer.engine.links.probe import Carrier, measure, reply_to
from splitinfer.errors import ModelError, PeerError, ProtocolError
from transports import Frame, KeyPair, LinkOptions, Security, TransportError, connect, listen

BARE = "bare"
_SECONDS = 20.0  # to connect, and for one answer
_SWITCH = 0.0005  # seconds, as in a worker


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

    def probe(self, times: int) -> list[LinkMeasurement]:
        """Measure the link so many times."""
        return [LinkMeasurement(*each) for each in self._ask(self._ends[0], {"probe": times})["figures"]]

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


@dataclass(slots=True)
class _Bare:
    """A socket of ZeroMQ. ``sender``: the name of the peer that a ROUTER answers."""

    socket: "zmq.Socket[bytes]"
    sender: list[bytes] = field(default_factory=list)

    def send(self, frame: Frame, /) -> None:
        self.socket.send_multipart([*self.sender, frame.header, *frame.parts], copy=False)

    def recv(self, _timeout: float | None = None, /) -> Frame:
        received = self.socket.recv_multipart(copy=False)
        if self.socket.type == zmq.ROUTER:
            self.sender = [received.pop(0).bytes]
        return Frame(received[0].bytes, tuple(part.buffer for part in received[1:]))


class End:
    """The end of a link that this process is told to be."""

    def __init__(self) -> None:
        self._link: Carrier | None = None
        self._open: list[Any] = []  # must live as long as this process

    def handle(self, options: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command and return its answer."""
        try:
            if "listen" in options:
                return self._listen(str(options["listen"]), curve=bool(options["curve"]), checksum=options["checksum"])
            if "connect" in options:
                self._link = self._connect(str(options["connect"]), options["key"], checksum=options["checksum"])
                return {}
            return {"figures": self._probe(int(options["probe"]))}
        except (TransportError, ProtocolError, zmq.ZMQError, ValueError, RuntimeError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _listen(self, address: str, *, curve: bool, checksum: bool) -> dict[str, Any]:
        if address == BARE:
            return {"address": self._listen_bare(), "key": None}
        pair = KeyPair.make() if curve else None
        security = None if pair is None else Security(pair, None, lambda _: True)
        options = LinkOptions(checksum_parts=checksum, security=security)
        listener = listen(address, options=options)
        self._open.append(listener)
        self._answer(lambda: listener.accept(_SECONDS))
        return {"address": listener.address, "key": None if pair is None else pair.public}

    def _listen_bare(self) -> str:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        socket.LINGER = 0
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        self._answer(lambda: _Bare(socket))
        return f"{BARE}:tcp://127.0.0.1:{port}"

    def _answer(self, accept: Callable[[], Carrier]) -> None:
        """Answer all probes, on a thread of its own."""

        def until_it_ends() -> None:
            with contextlib.suppress(TransportError, zmq.ZMQError):
                link = accept()
                while True:
                    link.send(reply_to(link.recv()))

        threading.Thread(target=until_it_ends, name="answers", daemon=True).start()

    def _connect(self, address: str, key: str | None, *, checksum: bool) -> Carrier:
        if address.startswith(f"{BARE}:"):
            return self._connect_bare(address.removeprefix(f"{BARE}:"))
        security = None if key is None else Security(KeyPair.make(), key)
        options = LinkOptions(checksum_parts=checksum, security=security)
        return connect(address, timeout=_SECONDS, options=options)

    def _connect_bare(self, address: str) -> Carrier:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.LINGER = 0
        socket.RCVTIMEO = int(_SECONDS * 1000)
        socket.connect(address)
        return _Bare(socket)

    def _probe(self, times: int) -> list[tuple[float, ...]]:
        if self._link is None:
            raise ValueError("there is no link to measure")
        return [astuple(measure(self._link)) for _ in range(times)]


if __name__ == "__main__":
    sys.setswitchinterval(_SWITCH)
    serve_commands(End().handle)
