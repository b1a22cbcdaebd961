"""The socket of a running pipeline, and `splitinfer plan --live`, which asks there."""

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from splitinfer.cli import app
from splitinfer.core.costs.stage import StageCosts
from splitinfer.core.layout import Layout, lay_out
from splitinfer.errors import ConfigError, PeerError, RequestError, SplitinferError
from splitinfer.llm import live_socket
from splitinfer.llm.live_socket import LiveSocket, answer, ask, receive, stages_of
from splitinfer.llm.rebalance import LiveFigures
from splitinfer.machine.profile import LayerProfile, LinkProfile, MachineProfile, ModelProfile, Profiles
from splitinfer.placement.asked import Asked
from splitinfer.system.private_sockets import listening

KEY = "ab" * 32
STAGES = [("s0", 3, None), ("s1", 9, "tcp://there:1", {"key": KEY, "codec": "fp16"})]


class Pipeline:
    """A pipeline whose second machine is slower than its first."""

    def __init__(self) -> None:
        self.layout = Layout(lay_out(STAGES), "m", name="mine.yaml")
        self.refusal: SplitinferError | None = None

    def live_figures(self) -> LiveFigures:
        if self.refusal is not None:
            raise self.refusal
        model = ModelProfile("m", (LayerProfile("a", 10**7, 100),) * 12, hidden_row=100, context_length=4096)
        costs = StageCosts.line(1e-3, 2e-3)
        first = MachineProfile("s0", {"a": costs}, free_bytes=10**9)
        second = replace(first.slower(1.5), name="s1", address="tcp://there:1", key=KEY)
        profiles = Profiles(model, (first, second), (LinkProfile("s0", "s1", 1e-4),))
        asked = Asked(context=256, streams=4, prompt=16, answer=16, simulated=2)
        return LiveFigures(profiles, self.layout, asked, {"s0": 1.0, "s1": 1.5})

    def recut(self, cut: Layout) -> float:
        if self.refusal is not None:
            raise self.refusal
        self.layout = replace(self.layout, stages=cut.stages)
        return 1.25


Run = Callable[..., tuple[int, list[str], SplitinferError | None]]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(*given: str) -> tuple[int, list[str], SplitinferError | None]:
        found: list[tuple[int, SplitinferError | None]] = []

        def finish(call: Callable[[], int], _verbose: bool) -> None:
            try:
                found.append((call(), None))
            except SplitinferError as error:
                found.append((1, error))

        monkeypatch.setattr(sys.modules["splitinfer.cli.plan"], "finish", finish)
        done = CliRunner().invoke(app, ["plan", *given], catch_exceptions=False)
        return *found[0][:1], done.stdout.strip().splitlines(), found[0][1]

    return run


@pytest.fixture
def opened() -> Iterator[Pipeline]:
    pipeline = Pipeline()
    with closing(LiveSocket(pipeline)):
        yield pipeline


def test_compared_and_loaded(plan: Run, opened: Pipeline):
    code, lines, error = plan("--live", "--for", "throughput")
    assert (code, error) == (0, None)
    assert "From measurements so far" in lines[0]
    assert "s1 takes 1.5 times as long as it was measured to take." in lines[0]
    assert opened.layout.cut == "3-9", "nothing is loaded unasked"
    code, lines, error = plan("--live", "--apply", "--for", "throughput")
    assert (code, error) == (0, None)
    assert lines[1] == f"{opened.layout.cut} is in force; requests waited 1.2 s."
    assert opened.layout.stages[0].num_layers > 6
    assert (opened.layout.stages[1].key, opened.layout.stages[1].codec) == (KEY, "fp16")
    code, lines, error = plan("--live", "--apply", "--for", "throughput", "--json")
    document = json.loads(lines[0])
    assert document["cut"] == document["best"] == opened.layout.cut
    assert "paused" not in document, "it is the best already"


def test_mistakes_are_one_sentence_each(plan: Run):
    for given, words in (
        (["--live"], "no pipeline of yours runs on this machine, or it is still loading"),
        (["--live", "--pid", "1"], "process 1 runs no pipeline that can be asked; no process does"),
        (["--live", "--workers", "a"], "leave out --workers"),
        (["--live", "--measure"], "leave out --measure"),
        (["--apply"], "--apply and --pid are for a running pipeline; add --live"),
    ):
        code, lines, error = plan(*given)
        assert (code, lines) == (1, [])
        assert isinstance(error, ConfigError)
        assert words in str(error)


def test_what_the_pipeline_refuses_is_said(plan: Run, opened: Pipeline):
    opened.refusal = RequestError("no step has been computed yet")
    _, _, error = plan("--live")
    assert str(error) == "no step has been computed yet"


def test_a_cut_that_has_changed_meanwhile(opened: Pipeline):
    stages = stages_of(opened.layout)
    with pytest.raises(RequestError, match="has changed meanwhile"):
        answer(opened, {"ask": "recut", "from": stages[:1], "stages": stages})
    with pytest.raises(RequestError, match="no question"):
        answer(opened, {"ask": "else"})


def test_damaged_questions_leave_the_door_open(opened: Pipeline, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live_socket, "_LONGEST", 1000)
    for sent in (b"", b"{", b"[1]\n", b"not json\n", b"x" * 2000 + b"\n"):
        (connection,) = listening().values()
        with connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    (connection,) = listening().values()
    with connection, pytest.raises(PeerError, match="no question that this version"):
        ask(connection, {"ask": ["figures"]})


def test_a_pipeline_that_ends_before_it_answers():
    ours, theirs = socket.socketpair()
    reader = threading.Thread(target=lambda: (receive(theirs), theirs.close()))
    reader.start()
    with ours, pytest.raises(PeerError, match="ended before it had answered"):
        ask(ours, {"ask": "figures"})
    reader.join(60)
