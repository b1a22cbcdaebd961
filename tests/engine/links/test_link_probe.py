"""Links measured in open sessions: what the emulated wire is like comes out, and peers that lie are told so."""

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import cast

import pytest
import stages

from splitinfer.core.layout import StageSpec
from splitinfer.core.metrics import link_measurement
from splitinfer.core.metrics.link_measurement import MOST_BYTES, Exchange, LinkMeasurement
from splitinfer.engine.coordinator import pipeline
from splitinfer.engine.coordinator.worker_group import WorkerGroup
from splitinfer.engine.links import probe as link_probe
from splitinfer.engine.links.connection import Connection
from splitinfer.engine.links.probe import NextStage, check_reply, payload, reply_to
from splitinfer.engine.versions import own_versions
from splitinfer.errors import PeerError, ProtocolError
from splitinfer.wire import codec
from splitinfer.wire.messages import Connect, Connected, Echo, Echoed, Expect, Fault, Hello, MeasureNext, Welcome
from splitinfer.wire.session import Session
from transports import Frame, connect, listen
from transports.emulated import EmulatedLink, LinkProfile, installed
from transports.inproc import InprocLink

WIRE = LinkProfile(latency=0.02, bytes_per_second=1e6)
Made = list[tuple[Exchange, float]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """The exchanges that are made, with the seconds of each. ``core.metrics`` makes figures of them, and is tested
    with made-up seconds: a busy machine adds to these what it likes, and takes nothing away."""
    found: Made = []

    def recorded() -> Generator[Exchange, float, LinkMeasurement]:
        asking = link_measurement.probe()
        exchange = next(asking)
        while True:
            seconds = yield exchange
            found.append((exchange, seconds))
            try:
                exchange = asking.send(seconds)
            except StopIteration as done:
                return cast(LinkMeasurement, done.value)

    monkeypatch.setattr(link_probe, "probe", recorded)
    return found


@contextmanager
def measured(
    monkeypatch: pytest.MonkeyPatch, folder: str, scheme: str, num_stages: int
) -> Iterator[list[list[LinkMeasurement]]]:
    """What is found when a pipeline opens, and the pipeline generates afterwards."""
    found: list[list[LinkMeasurement]] = []
    connect_stages = WorkerGroup.connect_stages

    def connect_and_measure(worker_group: WorkerGroup) -> None:
        connect_stages(worker_group)
        found.append(worker_group.measure_links())

    monkeypatch.setattr(pipeline.WorkerGroup, "connect_stages", connect_and_measure)
    with stages.pipeline(folder, [12 // num_stages] * num_stages, scheme) as llm:
        yield found
        assert len(stages.tokens_of(llm, [5, 6, 7], max_tokens=3)) == 3


@pytest.mark.parametrize("scheme", ["inproc", "tcp"])
def test_every_exchange_takes_what_its_wire_takes(scheme: str, monkeypatch: pytest.MonkeyPatch, made: Made) -> None:
    with installed(WIRE), measured(monkeypatch, "demo", scheme, 3) as found:
        assert [each.latency_p50 >= WIRE.latency for each in found[0]] == [True, True]
    assert [each for each in made if each[1] < 0.04 + (each[0].there + each[0].back) / 1e6] == []


def test_a_pipeline_of_one_stage_has_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    with measured(monkeypatch, "demo", "inproc", 1) as found:
        assert found == [[]]


class Coordinator(Connection):
    """One that speaks to a worker by hand, and has been welcomed."""

    @classmethod
    def at(cls, address: str) -> "Coordinator":
        link = connect(address, timeout=5)
        connection = cls(link, "worker", "w", "5e55", Session(opened=True))
        connection.send(Hello("coordinator", "c", "5e55", own_versions()))
        assert isinstance(connection.receive(link.recv(5)), Welcome)
        return connection

    def asks(self, message: Connect | Echo | MeasureNext | Expect, *parts: memoryview) -> Frame:
        self.send(message, *parts)
        return self.link.recv(10)


@pytest.fixture
def two() -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(stages.worker("inproc")) for _ in range(2)]


def test_links_are_measured_with_nothing_loaded(two: list[str]) -> None:
    worker_group = WorkerGroup(lambda _: None, lambda *_: None)
    try:
        for stage, address in enumerate(two, 1):
            worker_group.connect(stage, StageSpec(f"w{stage}", stage, stage + 1, address), address, 5)
        assert len(worker_group.prepare_to_measure()) == 2
        worker_group.connect_stages()
        assert len(worker_group.measure_links()) == 2
    finally:
        worker_group.close("measured")


def test_directions_are_not_mixed_up(two: list[str], made: Made) -> None:
    """A wire that is slow only on the way there."""
    link = EmulatedLink(connect(two[0], timeout=5), WIRE)
    connection = Connection(link, "worker", "w", "5e55", Session(opened=True))
    connection.send(Hello("coordinator", "c", "5e55", own_versions()))
    connection.receive(link.recv(5))
    NextStage(connection, lambda _: None).measure()
    link.close()
    assert max(exchange.there for exchange, _ in made) > 2**15 < max(exchange.back for exchange, _ in made)
    assert [each for each in made if each[1] < 0.02 + each[0].there / 1e6] == []


@pytest.mark.parametrize("asked", [0, 1, 65536, MOST_BYTES])
def test_as_many_bytes_come_as_were_asked_for(two: list[str], asked: int) -> None:
    coordinator = Coordinator.at(two[0])
    answer = coordinator.asks(Echo(asked), *payload(17))
    assert isinstance(codec.decode(answer.header), Echoed)
    assert sum(memoryview(part).nbytes for part in answer.parts) == asked
    check_reply(Exchange(17, asked), answer)
    with pytest.raises(ProtocolError, match="were to be echoed"):
        check_reply(Exchange(17, asked + 1), answer)
    coordinator.link.close()


def test_replies_share_their_memory() -> None:
    small, large = (reply_to(Echo(size), Frame(b"")) for size in (10, MOST_BYTES))
    assert small[0].obj is large[0].obj
    assert small[0].readonly


@pytest.mark.parametrize("parts", [(bytes(MOST_BYTES + 1),), (b"a", b"b")])
def test_a_question_with_too_much_ends_the_session(two: list[str], parts: tuple[bytes, ...]) -> None:
    coordinator = Coordinator.at(two[0])
    answer = coordinator.receive(coordinator.asks(Echo(1), *map(memoryview, parts)))
    assert isinstance(answer, Fault)
    assert "an echo came with" in answer.reason


def test_without_a_next_stage_there_is_nothing_to_measure(two: list[str]) -> None:
    coordinator = Coordinator.at(two[0])
    answer = coordinator.receive(coordinator.asks(MeasureNext()))
    assert isinstance(answer, Fault)
    assert "link to the next stage does not exist yet" in answer.reason


def test_the_stage_before_gives_no_orders(two: list[str]) -> None:
    coordinator = Coordinator.at(two[0])
    coordinator.send(Expect(""))
    with connect(two[0], timeout=5) as link:
        before = Connection(link, "worker", "w", "5e55", Session(opened=True))
        before.send(Hello("upstream", "before", "5e55", own_versions()))
        assert isinstance(before.receive(link.recv(5)), Welcome)
        before.send(Echo(5))
        assert isinstance(before.receive(link.recv(5)), Echoed)
        before.send(Connect(two[1], ""))
        answer = coordinator.receive(coordinator.link.recv(5))
    assert isinstance(answer, Fault)
    assert "before sent a connect message" in answer.reason


class Impostor:
    """A next stage that welcomes, and answers the first question with what it is given; ``None`` ends the link."""

    def __init__(self, header: bytes | None, *parts: bytes) -> None:
        self._listener = listen("tcp://127.0.0.1:0")
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

    _heard = threading.Event()

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
    impostor = Impostor(*answer)  # type: ignore[arg-type]
    coordinator = Coordinator.at(two[0])
    assert isinstance(coordinator.receive(coordinator.asks(Connect(impostor.address, ""))), Connected)
    fault = coordinator.receive(coordinator.asks(MeasureNext()))
    impostor.end()
    assert isinstance(fault, Fault)
    assert "could not measure the link to the next stage" in fault.reason
    assert words in fault.reason
    again = Coordinator.at(two[0])  # and the worker serves on
    assert isinstance(again.receive(again.asks(Echo(1))), Echoed)
    again.link.close()


def test_who_has_heard_that_the_session_is_over_may_come_again_at_once(
    two: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the worker still closes its link."""
    close = InprocLink.close
    monkeypatch.setattr(InprocLink, "close", lambda *told: (time.sleep(0.3), close(*told)))
    coordinator = Coordinator.at(two[0])
    assert isinstance(coordinator.receive(coordinator.asks(MeasureNext())), Fault)
    again = Coordinator.at(two[0])
    assert isinstance(again.receive(again.asks(Echo(1))), Echoed)
    again.link.close()


def test_a_next_stage_that_does_not_answer_is_not_waited_for_long(
    two: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_probe, "PATIENCE", 0.3)
    with listen("tcp://127.0.0.1:0") as listener:
        coordinator = Coordinator.at(two[0])
        coordinator.send(Connect(listener.address, ""))
        silent = listener.accept(5)
        silent.recv(5)
        silent.send(Frame(codec.encode(Welcome("silent", own_versions(), "cpu", 0))))
        assert isinstance(coordinator.receive(coordinator.link.recv(5)), Connected)
        fault = coordinator.receive(coordinator.asks(MeasureNext()))
    assert isinstance(fault, Fault)
    assert "silent did not answer within 0 s" in fault.reason


def test_a_worker_that_ends_while_it_is_asked_is_lost() -> None:
    with listen("inproc://ends-when-asked") as listener:

        def serve() -> None:
            with listener.accept(5) as link:
                link.recv(5)
                link.send(Frame(codec.encode(Welcome("w", own_versions(), "cpu", 0))))
                link.recv(5)

        thread = threading.Thread(target=serve)
        thread.start()
        worker_group = WorkerGroup(lambda _: None, lambda *_: None)
        worker_group.connect(1, StageSpec("w", 1, 2, listener.address), listener.address, 5)
        with pytest.raises(PeerError, match=r"worker w .* is gone"):
            worker_group.measure_links()
        thread.join(5)
