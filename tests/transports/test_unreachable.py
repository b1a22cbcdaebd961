"""Why nothing can be connected to, told by real sockets: refused, nothing comes back, no such name."""

import contextlib
import errno
import socket
from collections.abc import Iterator

import pytest
from held_port import held_port

import transports
from transports.unreachable import Unreachable, probe


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as port:
        yield port


def why(address: str, timeout: float = 0.2) -> transports.LinkTimeout:
    with pytest.raises(transports.LinkTimeout) as caught:
        transports.connect(address, timeout=timeout)
    return caught.value


def test_a_port_on_which_nothing_listens(port: int):
    found = why(f"tcp://127.0.0.1:{port}")
    assert found.unreachable == Unreachable("127.0.0.1", errno.ECONNREFUSED)
    assert str(found) == f"no answer from tcp://127.0.0.1:{port} within 0.2 s: Connection refused (127.0.0.1)"


def test_a_name_without_an_address():
    found = why("tcp://no-such-machine.invalid:5577")
    assert found.unreachable is not None
    assert (found.unreachable.host, found.unreachable.is_name) == ("no-such-machine.invalid", True)
    assert found.unreachable.error == socket.EAI_NONAME
    assert "cannot resolve the host of tcp://no-such-machine.invalid:5577: " in str(found)
    assert "Errno" not in str(found)


def test_packets_that_vanish():
    """The system drops a connection's first packet while too many wait to be accepted."""
    with socket.socket() as listener, contextlib.ExitStack() as waiting:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            knocking = waiting.enter_context(socket.socket())
            knocking.setblocking(False)
            knocking.connect_ex(listener.getsockname())
        found = why(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
    assert found.unreachable == Unreachable("127.0.0.1", errno.ETIMEDOUT)


def test_of_several_addresses_the_most_telling_counts(port: int):
    assert probe([("255.255.255.255", port), ("127.0.0.1", port)], 1) == Unreachable("127.0.0.1", errno.ECONNREFUSED)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert probe([("127.0.0.1", port), listener.getsockname()], 1) == Unreachable("127.0.0.1", 0)
    assert probe([], 1) is None
