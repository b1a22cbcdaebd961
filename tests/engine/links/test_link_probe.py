"""A probe of its own measures a link: what the emulated wire is like comes out, and peers that lie are found."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from struct import pack

import peers
import pytest
import stages

from splitinfer.core.layout import StageSpec
from splitinfer.core.metrics.link_measurement import MOST_BYTES, LinkMeasurement
from splitinfer.engine.coordinator.worker_group import WorkerGroup
from splitinfer.engine.links.connection import Connection
from splitinfer.engine.links.probe import ask, measure, probe_next, reply_to
from splitinfer.engine.versions import own_versions
from splitinfer.engine.worker import handshake
from splitinfer.errors import PeerError, ProtocolError
from splitinfer.keyring import Keyring
from splitinfer.wire import codec
from splitinfer.wire.codec import Session
from splitinfer.wire.messages import (
    Connected,
    Fault,
    Hello,
    Message,
    NextStage,
    Probe,
    Progress,
    Ready,
    Refuse,
    Welcome,
)
from tests.emulation.links import EmulatedLink, LinkProfile, installed
from transports import Frame, LinkClosed, connect, listen

WIRE = LinkProfile(latency=0.02, bytes_per_second=1e6)
SESSION = "5e55"


class Peer(Connection):
    """One that speaks to a worker by hand."""

    @classmethod
    def at(cls, address: str, role: str = "coordinator", *, session: str = SESSION) -> "Peer":
        connection = cls(connect(address, timeout=5), role, "w", session, Session(opened=True))
        connection.send(Hello(role, "c", session, own_versions()))
        connection.first = connection.hears()
        return connection

    first: Message

    def hears(self) -> Message:
        return self.receive(self.link.recv(10))

    def asks(self, message: Message) -> Message:
        self.send(message)
        return self.hears()

    def is_served(self) -> bool:
        answer = self.asks(peers.load())
        while isinstance(answer, Progress):
            answer = self.hears()
        return isinstance(answer, Ready)


@pytest.fixture
def two() -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(stages.worker("inproc")) for _ in range(2)]


def no_key() -> None:
    raise AssertionError("no link here is encrypted")


def group_of(addresses: list[str]) -> WorkerGroup:
    group = WorkerGroup(Keyring().own)
    for stage, address in enumerate(addresses, 1):
        group.connect(stage, StageSpec(f"w{stage}", stage, stage + 1, address), address, 5)
    return group


def test_a_link_is_measured_as_slow_as_its_wire_is(two: list[str]) -> None:
    """A busy machine adds to the times what it likes, and takes nothing away."""
    with installed(WIRE):
        group = group_of(two)
        found: list[LinkMeasurement] = [group.probe(group.workers[0]).figures]
        found.append(group.probe_between(*group.workers).figures)
        group.close("measured")
    assert [each.latency_p50 >= WIRE.latency for each in found] == [True, True]


def test_directions_are_not_mixed_up(two: list[str]) -> None:
    """A wire that is slow only on the way there."""
    coordinator, prober = Peer.at(two[0]), Peer.at(two[0], "probe")
    found = measure(EmulatedLink(prober.link, WIRE))
    coordinator.link.close()
    assert found.down < found.up


def test_who_says_nothing_is_dropped(two: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_HELLO_SECONDS", 0.1)
    with connect(two[0], timeout=5) as silent, pytest.raises(LinkClosed, match="no message came in time"):
        silent.recv(20)


@pytest.mark.parametrize("wanted", [0, 65536, MOST_BYTES])
def test_as_many_bytes_come_as_were_asked_for(two: list[str], wanted: int) -> None:
    coordinator, prober = Peer.at(two[0]), Peer.at(two[0], "probe")
    assert ask(prober.link, 17, wanted) > 0
    assert coordinator.is_served(), "beside it"
    coordinator.link.close()


@pytest.mark.parametrize(("session", "role"), [("guessed", "probe"), ("guessed", "upstream"), (SESSION, "king")])
def test_who_does_not_belong_to_the_session_measures_nothing(two: list[str], session: str, role: str) -> None:
    coordinator = Peer.at(two[0])
    assert isinstance(Peer.at(two[0], role, session=session).first, Refuse)
    assert coordinator.is_served()
    coordinator.link.close()


FRAMES = {
    "no header": Frame(b""),
    "a long header": Frame(b"\0" * 5),
    "a message": Frame(codec.encode(Connected())),
    "too much comes": Frame(pack("<I", 1), (bytes(MOST_BYTES + 1),)),
    "too much is wanted": Frame(pack("<I", MOST_BYTES + 1)),
    "two parts": Frame(pack("<I", 1), (b"a", b"b")),
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_that_is_no_probes_is_not_answered(name: str) -> None:
    with pytest.raises(ProtocolError, match="a probe came with"):
        reply_to(FRAMES[name])


def test_a_bad_probe_ends_the_session(two: list[str]) -> None:
    """And who has heard so may come again at once."""
    coordinator, prober = Peer.at(two[0]), Peer.at(two[0], "probe")
    prober.link.send(FRAMES["two parts"])
    fault = coordinator.hears()
    assert isinstance(fault, Fault)
    assert "a probe came with" in fault.reason
    with pytest.raises(LinkClosed):
        prober.link.recv(10)
    again = Peer.at(two[0])
    assert isinstance(again.first, Welcome)
    again.link.close()


class Impostor:
    """A next stage that welcomes, and answers the first probe with what it is given; ``None`` ends the link."""

    def __init__(self, answer: Frame | None) -> None:
        self._listener, self._heard = listen("tcp://127.0.0.1:0"), threading.Event()
        self.address, self._answer = self._listener.address, answer
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with self._listener, self._listener.accept(10) as link:
            link.recv(10)
            link.send(Frame(codec.encode(Welcome("impostor", own_versions(), "cpu", 0))))
            link.recv(10)
            if self._answer is not None:
                link.send(self._answer)
                link.deliver_to(lambda item: None)
                self._heard.wait(10)

    def end(self) -> None:
        self._heard.set()
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "could not measure the link to impostor: it closed the link"),
        (Frame(b"", (b"few",)), "64 bytes were to come back, and 3"),
    ],
    ids=["nothing", "fewer bytes"],
)
def test_a_next_stage_that_answers_wrong_ends_the_session(two: list[str], answer: Frame | None, words: str) -> None:
    def by_a_worker(to: NextStage) -> str:
        coordinator = Peer.at(two[0])
        fault = coordinator.asks(Probe(to))
        assert isinstance(fault, Fault)
        again = Peer.at(two[0])  # the worker serves on
        assert isinstance(again.first, Welcome)
        again.link.close()
        return fault.reason

    def by_the_coordinator(to: NextStage) -> str:
        with pytest.raises(PeerError) as raised:
            probe_next(to, "studio", SESSION, no_key)
        return str(raised.value)

    ways: list[Callable[[NextStage], str]] = [by_a_worker, by_the_coordinator]
    for way in ways:
        impostor = Impostor(answer)
        assert words in way(NextStage(impostor.address, ""))
        impostor.end()
