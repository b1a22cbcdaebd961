"""A probe of its own measures a link: what the emulated wire is like comes out, and peers that lie are found."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from struct import pack

import peers
import pytest
import stages
from peers import Peer

from splitinfer.core.layout import StageSpec
from splitinfer.core.metrics.link_measurement import MOST_BYTES, LinkMeasurement
from splitinfer.engine.fleet.fleet import Fleet
from splitinfer.engine.links.probe import ask, measure, probe_next, reply_to
from splitinfer.engine.versions import own_versions
from splitinfer.engine.worker import handshake
from splitinfer.errors import PeerError, ProtocolError
from splitinfer.keyring import Keyring
from splitinfer.wire import headers
from splitinfer.wire.messages import (
    Connected,
    Fault,
    Message,
    NextStage,
    Probe,
    Ready,
    Refuse,
    Welcome,
)
from tests.emulation.links import EmulatedLink, LinkProfile, installed
from transports import Frame, LinkClosed, connect, listen

WIRE = LinkProfile(latency=0.02, bytes_per_second=1e6)
SESSION = "5e55"


def greeted(address: str, role: str = "coordinator", session: str = SESSION) -> tuple[Peer, Message]:
    """A peer of a worker, and what the worker says to it."""
    peer = Peer(address).say(peers.hello(role, session=session))
    return peer, peer.hear()


def is_served(peer: Peer) -> bool:
    return isinstance(peer.say(peers.load()).hear(), Ready)


@pytest.fixture
def two() -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(stages.worker("inproc")) for _ in range(2)]


def group_of(addresses: list[str]) -> Fleet:
    group = Fleet(Keyring().own)
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
    (coordinator, _), (prober, _) = greeted(two[0]), greeted(two[0], "probe")
    found = measure(EmulatedLink(prober.link, WIRE))
    coordinator.link.close()
    assert found.down < found.up


def test_who_says_nothing_is_dropped(two: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_HELLO_SECONDS", 0.1)
    with connect(two[0], timeout=5) as silent, pytest.raises(LinkClosed, match="no message came in time"):
        silent.recv(20)


@pytest.mark.parametrize("wanted", [0, 65536, MOST_BYTES])
def test_as_many_bytes_come_as_were_asked_for(two: list[str], wanted: int) -> None:
    (coordinator, _), (prober, _) = greeted(two[0]), greeted(two[0], "probe")
    assert ask(prober.link, 17, wanted) > 0
    assert is_served(coordinator), "beside it"
    coordinator.link.close()


@pytest.mark.parametrize(("session", "role"), [("guessed", "probe"), ("guessed", "upstream"), (SESSION, "king")])
def test_who_does_not_belong_to_the_session_measures_nothing(two: list[str], session: str, role: str) -> None:
    coordinator, _ = greeted(two[0])
    assert isinstance(greeted(two[0], role, session)[1], Refuse)
    assert is_served(coordinator)
    coordinator.link.close()


FRAMES = {
    "no header": Frame(b""),
    "a long header": Frame(b"\0" * 5),
    "a message": Frame(headers.encode(Connected())),
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
    (coordinator, _), (prober, _) = greeted(two[0]), greeted(two[0], "probe")
    prober.link.send(FRAMES["two parts"])
    fault = coordinator.hear()
    assert isinstance(fault, Fault)
    assert "a probe came with" in fault.reason
    with pytest.raises(LinkClosed):
        prober.link.recv(10)
    again, answer = greeted(two[0])
    assert isinstance(answer, Welcome)
    again.link.close()


@contextmanager
def impostor(answer: Frame | None) -> Iterator[NextStage]:
    """A next stage that welcomes, and answers the first probe with what it is given; ``None`` ends the link."""
    heard = threading.Event()

    def serve() -> None:
        with listener.accept(10) as link:
            link.recv(10)
            link.send(Frame(headers.encode(Welcome("impostor", own_versions(), "cpu", 0))))
            link.recv(10)
            if answer is not None:
                link.send(answer)
                link.deliver_to(lambda item: None)
                heard.wait(10)

    with listen("tcp://127.0.0.1:0") as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield NextStage(listener.address, "")
        heard.set()
        thread.join(10)


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
        fault = greeted(two[0])[0].say(Probe(to)).hear()
        assert isinstance(fault, Fault)
        again, welcome = greeted(two[0])  # the worker serves on
        assert isinstance(welcome, Welcome)
        again.link.close()
        return fault.reason

    def by_the_coordinator(to: NextStage) -> str:
        with pytest.raises(PeerError) as raised:
            probe_next(to, "studio", SESSION, lambda: pytest.fail("no link here is encrypted"))
        return str(raised.value)

    ways: list[Callable[[NextStage], str]] = [by_a_worker, by_the_coordinator]
    for way in ways:
        with impostor(answer) as to:
            assert words in way(to)
