"""A link between this process and another one of this machine, to be measured; and, run as a program, the end that
listens, and answers every probe (``engine.links.probe``).

The address ``bare`` stands for ZeroMQ without this package: a DEALER that connects, a ROUTER that listens, no framing,
no checksums, no heartbeats, and no thread between the socket and its reader.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq

from splitinfer.bench import machine
from splitinfer.bench.child_process import ChildProcess, Handle, serve
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
    """The link, and the process at its other end.

    Raises:
        PeerError: there can be no link of this kind here.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind, self._other = kind, ChildProcess(__name__)
        self._link: Any = None
        processors = machine.free_processors()
        if processors:
            machine.pin(self._other.pid, processors[1 % len(processors)])
        try:
            with self._told():
                there = self._other.ask({"address": kind.address, "curve": kind.curve, "checksum": kind.checksum})
                self._link = _connect(kind, there)
        except BaseException:
            self.close()
            raise

    def probe(self, times: int) -> list[LinkMeasurement]:
        """Measure the link so many times."""
        with self._told():
            return [measure(self._link) for _ in range(times)]

    def close(self) -> None:
        """End the link and the process."""
        if self._link is not None:
            self._link.close()
        self._other.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (TransportError, ProtocolError, zmq.ZMQError, ValueError, RuntimeError) as error:
            raise PeerError(f"{self.kind.name}: {type(error).__name__}: {error}") from error
        except ModelError as error:  # the other process has ended
            raise PeerError(f"{self.kind.name}: {error}") from error


def _connect(kind: Kind, there: Mapping[str, Any]) -> Carrier:
    if kind.address == BARE:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.LINGER = 0
        socket.RCVTIMEO = int(_SECONDS * 1000)
        socket.connect(there["address"])
        return _Bare(socket)
    security = Security(KeyPair.make(), there["key"]) if kind.curve else None
    options = LinkOptions(checksum_parts=kind.checksum, security=security)
    return connect(there["address"], timeout=_SECONDS, options=options)


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

    def close(self) -> None:
        self.socket.close()


# -- inside the child ----------------------------------------------------------------------------


@contextlib.contextmanager
def _listening(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Handle]]:
    if options["address"] == BARE:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        socket.LINGER = 0
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        _answer(lambda: _Bare(socket))
        yield {"address": f"tcp://127.0.0.1:{port}", "key": None}, lambda _: {}
        return
    pair = KeyPair.make() if options["curve"] else None
    security = None if pair is None else Security(pair, None, lambda _: True)
    listener = listen(options["address"], options=LinkOptions(checksum_parts=options["checksum"], security=security))
    _answer(lambda: listener.accept(_SECONDS))
    yield {"address": listener.address, "key": pair and pair.public}, lambda _: {}


def _answer(accept: Callable[[], Carrier]) -> None:
    """Answer all probes, on a thread of its own."""

    def until_it_ends() -> None:
        with contextlib.suppress(TransportError, zmq.ZMQError):
            link = accept()
            while True:
                link.send(reply_to(link.recv()))

    threading.Thread(target=until_it_ends, name="answers", daemon=True).start()


if __name__ == "__main__":
    sys.setswitchinterval(_SWITCH)
    serve(_listening)
