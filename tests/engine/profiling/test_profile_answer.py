"""What a worker replies to a coordinator, or a peer of any kind, that asks for its profile."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import peers
import pytest
import stages
from peers import Peer
from tiny import Folder

from splitinfer.engine.profiling import measure
from splitinfer.engine.profiling.measure import described
from splitinfer.engine.profiling.stopwatch import OnStep
from splitinfer.errors import CannotFit
from splitinfer.machine.profile import MachineProfile
from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.models.folder.hub import open_model
from splitinfer.wire.messages import Fault, Profile, Profiled, Ready, Refuse, Welcome

COSTS = {"points": [[1, 0.001], [8, 0.002]]}
QUICK = MachineProfile.from_dict({"name": "x", "layers": {"a": COSTS}, "head": COSTS})
ASK = Profile("m", "auto", "exact", False)


@pytest.fixture
def model(tiny_folder: Folder) -> bytes:
    return described(open_folder(tiny_folder("llama")))


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[OnStep], MachineProfile]]:
    """What workers find when they measure themselves, one after the other."""
    made: list[Callable[[OnStep], MachineProfile]] = []
    monkeypatch.setattr(measure, "profile_here", lambda _name, _question, report, **_more: made.pop(0)(report))
    return made


def greeted(address: str) -> Peer:
    peer = Peer(address).say(peers.hello(session="one"))
    assert isinstance(peer.hear(), Welcome)
    return peer


def quick(_report: OnStep) -> MachineProfile:
    return QUICK


def no_room(_report: OnStep) -> MachineProfile:
    raise CannotFit("no room")


def test_between_other_questions_and_before_the_load(model: bytes, profiles: list[Any]):
    profiles += [quick, quick]
    with stages.worker("tcp") as there, greeted(there) as peer:
        for _ in range(2):
            reply = peer.say(ASK, model).hear()
            assert isinstance(reply, Profiled)
            assert MachineProfile.from_dict(json.loads(reply.profile)).as_dict() == QUICK.as_dict()
        assert isinstance(peer.say(peers.load()).hear(), Ready)
        peer.say(ASK, model)
        assert "a profile message that is not allowed in the phase 'run'" in peer.ending


@pytest.mark.parametrize(
    ("ask", "parts"),
    [
        (ASK, ()), (ASK, (b"{}", b"{}")), (ASK, (b"{",)), (Profile("m", "int3", "exact", False), (b"{}",)),
        (Profile("m" * 5000, "auto", "exact", False), (b"{}",)),
    ],
)  # fmt: skip
def test_what_no_coordinator_sends_ends_its_session_only(ask: Profile, parts: tuple[bytes, ...], model: bytes):
    with stages.worker("tcp") as there:
        with greeted(there) as peer:
            (fault,) = peer.say(ask, *parts).rest()
            assert isinstance(fault, Fault)
        with greeted(there) as peer:
            assert isinstance(peer.say(peers.load()).hear(), Ready)


def test_a_model_that_cannot_be_built_is_refused():
    strange = described(open_model("demo")).replace(b'model_type\\": \\"', b'model_type\\": \\"no')
    with stages.worker("tcp") as there, greeted(there) as peer:
        reply = peer.say(ASK, strange).hear()
        assert isinstance(reply, Refuse)
        assert "mlx-lm cannot build the model" in reply.reason


def test_a_coordinator_that_goes_away_ends_the_measuring(model: bytes, profiles: list[Any]):
    """The worker is heard of all the while, and serves the next one at once."""
    measuring, ended = threading.Event(), threading.Event()

    def endless(report: OnStep) -> MachineProfile:
        try:
            while True:
                measuring.set()
                report(1, 100)
                time.sleep(0.01)
        finally:
            ended.set()

    profiles.append(endless)
    with stages.worker("tcp") as there:
        with greeted(there) as peer:
            peer.say(ASK, model)
            assert measuring.wait(10)
            assert peer.link.silent_for < 2
        assert ended.wait(10)
        with greeted(there) as peer:
            assert isinstance(peer.say(peers.load()).hear(), Ready)


def test_a_loaded_stage_makes_room_only_where_it_must(model: bytes, profiles: list[Any]):
    profiles += [quick, no_room, quick]
    with stages.worker("tcp") as there:
        for left in (2, 0):
            with greeted(there) as peer:
                assert isinstance(peer.say(peers.load()).hear(), Ready)
            with greeted(there) as peer:
                assert isinstance(peer.say(ASK, model).hear(), Profiled)
            assert len(profiles) == left
