"""What links cost over the sockets below them.

This process and another one for each kind of link run the probe that ``plan`` and ``doctor`` run on real links
(``engine.links.probe``), beside the same over bare ZeroMQ. All are connected from the start and take turns trial by
trial, so ratios are of the same moments. Run as a program, this is the other process, which answers every probe.

The address ``bare`` stands for ZeroMQ without this package: a DEALER that connects, a ROUTER that listens, no framing,
no checksums, no heartbeats, and no thread between the socket and its reader.
"""

import contextlib
import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import zmq
from rich.console import RenderableType
from rich.table import Table

from scripts.comparing import machine
from splitinfer.bench.child_process import AskedProcess, Handle, serve
from splitinfer.bench.figures import ratios, summarize
from splitinfer.bench.report import range_of
from splitinfer.console import say
from splitinfer.core.metrics.link_measurement import LinkMeasurement
from splitinfer.engine.links import probe as probing
from splitinfer.engine.links.probe import Carrier, reply_to
from splitinfer.errors import ModelError, PeerError, ProtocolError
from splitinfer.probes.machine import describe
from transports import Frame, KeyPair, LinkOptions, Security, TransportError, connect, known, listen

PROBES = 20  # in a trial
BARE = "bare"
_PATH = str(Path(__file__).parents[2])  # where the other process finds this module
_SECONDS = 20.0  # to connect, and for one answer
_SWITCH = 0.0005  # seconds, as in a worker


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of link: where to listen, and whether it is encrypted."""

    name: str
    address: str
    curve: bool = False


class Pair:
    """The link, and the process at its other end.

    Raises:
        PeerError: there can be no link of this kind here.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind, self._other = kind, AskedProcess("scripts.comparing.links", {"PYTHONPATH": _PATH})
        self._link: Any = None
        processors = machine.free_processors()
        if processors:
            machine.pin(self._other.pid, processors[1 % len(processors)])
        try:
            with self._told():
                self._other.send({"address": kind.address, "curve": kind.curve})
                self._link = _connect(kind, self._other.receive())
        except BaseException:
            self.close()
            raise

    def probe(self, times: int) -> list[LinkMeasurement]:
        """Measure the link so many times."""
        with self._told():
            return [probing.measure(self._link) for _ in range(times)]

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
    return connect(there["address"], timeout=_SECONDS, options=LinkOptions(security=security))


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


def kinds() -> list[Kind]:
    """Bare ZeroMQ first, then all kinds of link that this installation has."""
    found = [
        Kind("bare ZeroMQ", BARE),
        Kind("tcp", "tcp://127.0.0.1:0"),
        Kind("tcp, encrypted", "tcp://127.0.0.1:0", curve=True),
    ]
    if "rdma" in known():
        found.append(Kind("rdma, ring", "rdma://127.0.0.1:0?backend=ring"))
    return found


def measure(num_trials: int) -> dict[str, Any]:
    """Measure so many times, and return the document.

    Raises:
        PeerError: ZeroMQ itself, or tcp, cannot be measured here.
    """
    on = describe()
    for processor in machine.free_processors()[:1]:
        machine.pin(os.getpid(), processor)
    with _pairs(kinds()) as (pairs, left_out):
        trials: dict[str, list[LinkMeasurement]] = {pair.kind.name: [] for pair in pairs}
        for trial in range(num_trials):
            say(f"trial {trial + 1} of {num_trials}")
            for pair in pairs:
                trials[pair.kind.name].append(_median(pair.probe(PROBES)))
    bare = pairs[0].kind.name
    return {
        "measured_on": on,
        "trials": num_trials,
        "left_out": left_out,
        "links": {name: _figures(found, trials[bare]) for name, found in trials.items()},
    }


@contextlib.contextmanager
def _pairs(wanted: Sequence[Kind]) -> Iterator[tuple[list[Pair], dict[str, str]]]:
    """The pairs that can be connected, and by name why the others cannot. The first two are required."""
    made, left_out = list[Pair](), dict[str, str]()
    try:
        for i, kind in enumerate(wanted):
            try:
                made.append(Pair(kind))
            except PeerError as error:
                if i < 2:
                    raise
                left_out[kind.name] = str(error)
        yield made, left_out
    finally:
        for pair in made:
            pair.close()


def _median(probes: Sequence[LinkMeasurement]) -> LinkMeasurement:
    """The median of each figure."""
    return LinkMeasurement(*(statistics.median(figure) for figure in zip(*map(astuple, probes), strict=True)))


def _figures(trials: Sequence[LinkMeasurement], bare: Sequence[LinkMeasurement]) -> dict[str, Any]:
    """The figures of a link beside those of bare ZeroMQ in the same trials."""
    latencies, theirs = ([each.latency_p50 for each in some] for some in (trials, bare))
    down, down_bare = ([each.down for each in some] for some in (trials, bare))
    return {
        "latency_p50": summarize(latencies),
        "latency_p99": summarize([each.latency_p99 for each in trials]),
        "down": summarize(down),
        "up": summarize([each.up for each in trials]),
        "latency_to_bare": ratios(latencies, theirs),
        "bandwidth_to_bare": ratios(down, down_bare),
    }


def tables(found: Mapping[str, Any]) -> list[RenderableType]:
    """A table of all links."""
    table = Table(
        "", "latency p50, µs", "p99", "to bare", "down, GB/s", "up", "down to bare",
        title="Links between two processes of this machine, one way", title_justify="left",
    )  # fmt: skip
    for name, link in found["links"].items():
        p50, p99, down, up = (link[one]["median"] for one in ("latency_p50", "latency_p99", "down", "up"))
        table.add_row(
            name, f"{p50 * 1e6:.1f}", f"{p99 * 1e6:.0f}", range_of(link["latency_to_bare"]), f"{down / 1e9:.2f}",
            f"{up / 1e9:.2f}", range_of(link["bandwidth_to_bare"]),
        )  # fmt: skip
    return [table, *(f"left out: {why}" for why in found["left_out"].values())]


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
    listener = listen(options["address"], options=LinkOptions(security=security))
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
