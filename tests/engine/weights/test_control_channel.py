"""The control link, asked for weights by a worker that loads."""

import pytest

from splitinfer.engine.links.connection import Connection
from splitinfer.engine.worker import weights
from splitinfer.engine.worker.weights import ControlChannel
from splitinfer.wire.headers import Session
from transports import LinkClosed, LinkTimeout, connect, listen


@pytest.fixture
def connection() -> Connection:
    with listen("inproc://control-channel") as listener:
        link = connect(listener.address, timeout=5.0)
        return Connection(link, "coordinator", "studio", "1", Session(opened=False))


def test_a_coordinator_that_lives_and_does_not_answer_is_given_up(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(weights, "_ANSWER_SECONDS", 0.01)
    with pytest.raises(LinkTimeout, match=r"the coordinator studio .* did not answer"):
        ControlChannel(connection).receive()


def test_a_coordinator_that_is_gone(connection: Connection):
    channel = ControlChannel(connection)
    assert not channel.takes(connection, LinkClosed("the end")), "the loop has to know, too"
    with pytest.raises(LinkClosed, match="the end"):
        channel.receive()
