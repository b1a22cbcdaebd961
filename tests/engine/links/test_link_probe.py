"""Links measured in open sessions: what the emulated wire is like comes out, and peers that lie are told so."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import stages

from splitinfer.core.layout import StageSpec
from splitinfer.core.metrics.link_measurement import MOST_BYTES, Exchange, LinkMeasurement
from splitinfer.engine.coordinator.worker_group import WorkerGroup
from splitinfer.engine.links.connection import Connection
from splitinfer.engine.links.probe import NextStage, check_reply, payload
from splitinfer.engine.versions import own_versions
from splitinfer.errors import PeerError, ProtocolError
from splitinfer.wire import codec
from splitinfer.wire.messages import (
    Connect,
    Connected,
    Echo,
    Echoed,
    Expect,
    Fault,
    Hello,
    MeasureNext,
    Message,
    Welcome,
)
from splitinfer.wire.session import Session
from tests.emulation.links import EmulatedLink, LinkProfile, installed
from transports import Frame, connect, listen

WIRE = LinkProfile(latency=0.02, bytes_per_second=1e6)


class Coordinator(Connection):
    """One that speaks to a worker by hand, and has been welcomed."""

    @classmethod
    def at(cls, address: str, role: str = "coordinator", wire: LinkProfile | None = None) -> "Coordinator":
        link = connect(address, timeout=5)
        link = link if wire is None else EmulatedLink(link, wire)
        connection = cls(link, "worker", "w", "5e55", Session(opened=True))
        connection.send(Hello(role, "c", "5e55", own_versions()))
        assert isinstance(connection.hears(), Welcome)
        return connection

    def hears(self) -> Message:
        return self.receive(self.link.recv(10))

    def asks(self, message: Message, *parts: memoryview) -> Message:
        self.send(message, *parts)
        return self.hears()


@pytest.fixture
def two() -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(stages.worker("inproc")) for _ in range(2)]


def measured(addresses: list[str]) -> list[LinkMeasurement]:
    """What a coordinator finds with nothing loaded."""
    group = WorkerGroup(lambda _: None, lambda *_: None)
    try:
        for stage, address in enumerate(addresses, 1):
            group.connect(stage, StageSpec(f"w{stage}", stage, stage + 1, address), address, 5)
        assert len(group.prepare_to_measure()) == len(addresses)
        group.connect_stages()
        return group.measure_links()
    finally:
        group.close("measured")


def test_a_link_is_measured_as_slow_as_its_wire_is(two: list[str]) -> None:
    """A busy machine adds to the times what it likes, and takes nothing away."""
    with installed(WIRE):
        found = measured(two)
    assert [each.latency_p50 >= WIRE.latency for each in found] == [True, True]
    assert measured([]) == []


def test_directions_are_not_mixed_up(two: list[str]) -> None:
    """A wire that is slow only on the way there."""
    connection = Coordinator.at(two[0], wire=WIRE)
    found = NextStage(connection, lambda _: None).measure()
    connection.link.close()
    assert found.down < found.up


@pytest.mark.parametrize("asked", [0, 65536, MOST_BYTES])
def test_as_many_bytes_come_as_were_asked_for(two: list[str], asked: int) -> None:
    coordinator = Coordinator.at(two[0])
    coordinator.send(Echo(asked), *payload(17))
    answer = coordinator.link.recv(10)
    assert isinstance(codec.decode(answer.header), Echoed)
    check_reply(Exchange(17, asked), answer)
    with pytest.raises(ProtocolError, match="were to be echoed"):
        check_reply(Exchange(17, asked + 1), answer)
    coordinator.link.close()


@pytest.mark.parametrize(("asked", "parts", "reason"), [
    (Echo(1), (bytes(MOST_BYTES + 1),), "an echo came with"), (Echo(1), (b"a", b"b"), "an echo came with"),
    (MeasureNext(), (), "link to the next stage does not exist yet"),
], ids=["too much", "two parts", "no next stage"])  # fmt: skip
def test_a_question_that_cannot_be_answered_ends_the_session(
    two: list[str], asked: Message, parts: tuple[bytes, ...], reason: str
) -> None:
    """And who has heard so may come again at once."""
    answer = Coordinator.at(two[0]).asks(asked, *map(memoryview, parts))
    assert isinstance(answer, Fault)
    assert reason in answer.reason
    again = Coordinator.at(two[0])
    assert isinstance(again.asks(Echo(1)), Echoed)
    again.link.close()


def test_the_stage_before_gives_no_orders(two: list[str]) -> None:
    coordinator = Coordinator.at(two[0])
    coordinator.send(Expect(""))
    before = Coordinator.at(two[0], role="upstream")
    assert isinstance(before.asks(Echo(5)), Echoed)
    before.send(Connect(two[1], ""))
    answer = coordinator.hears()
    before.link.close()
    assert isinstance(answer, Fault)
    assert "sent a connect message" in answer.reason


class Impostor:
    """A next stage that welcomes, and answers the first question with what it is given; ``None`` ends the link."""

    def __init__(self, address: str, header: bytes | None, *parts: bytes) -> None:
        self._listener, self._heard = listen(address), threading.Event()
        self.address, self._answer = self._listener.address, None if header is None else Frame(header, parts)
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


LIES: dict[str, tuple[tuple[bytes | None, ...], str]] = {
    "nothing": ((None,), "impostor is gone"),
    "fewer bytes": ((codec.encode(Echoed()), b"few"), "64 bytes were to be echoed, and 3 came"),
    "another word": ((codec.encode(Connected()),), "a connected message, which cannot follow"),
    "no word": ((b"\xc1",), "a header that cannot be read"),
    "a fault": ((codec.encode(Fault("tired", False, False)),), "impostor cannot go on: tired"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_next_stage_that_answers_wrong_ends_the_session(two: list[str], name: str) -> None:
    answer, words = LIES[name]
    impostor = Impostor("tcp://127.0.0.1:0", *answer)
    coordinator = Coordinator.at(two[0])
    assert isinstance(coordinator.asks(Connect(impostor.address, "")), Connected)
    fault = coordinator.asks(MeasureNext())
    impostor.end()
    assert isinstance(fault, Fault)
    assert "could not measure the link to the next stage" in fault.reason
    assert words in fault.reason
    again = Coordinator.at(two[0])  # and the worker serves on
    assert isinstance(again.asks(Echo(1)), Echoed)
    again.link.close()


def test_a_worker_that_ends_while_it_is_asked_is_lost() -> None:
    impostor = Impostor("inproc://ends-when-asked", None)
    group = WorkerGroup(lambda _: None, lambda *_: None)
    group.connect(1, StageSpec("w", 1, 2, impostor.address), impostor.address, 5)
    with pytest.raises(PeerError, match=r"worker w .* is gone"):
        group.measure_links()
    impostor.end()
