"""Why nothing can be connected to, told by real sockets: refused, no route, nothing comes back, no such name."""

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from held_port import held_port

import transports
from transports.unreachable import Unreachable, probe

REPOSITORY = Path(__file__).parents[2]


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


NETWORK = """
import errno, json, subprocess, transports
def ip(words):
    subprocess.run(["ip", *words.split()], check=True)
ip("link set lo up")
ip("route add unreachable 10.77.0.1")
ip("route add prohibit 10.77.0.2")
found = {}
for host in ("10.77.0.1", "10.77.0.2", "10.77.0.3"):
    try:
        transports.connect(f"tcp://{host}:5577", timeout=0.2)
    except transports.LinkTimeout as problem:
        found[host] = [problem.unreachable.error, str(problem)]
print(json.dumps(found))
"""


def test_networks_without_a_way(tmp_path: Path):
    """In a network of its own: a route that says unreachable, one that forbids, and none."""
    words = ("unshare", "--map-root-user", "--net", sys.executable, "-c", NETWORK)
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
        )
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if "unshare:" in done.stderr or "CalledProcessError" in done.stderr:
        pytest.skip(f"no network of its own here: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    numbers = {host: number for host, (number, _) in found.items()}
    assert numbers == {"10.77.0.1": errno.EHOSTUNREACH, "10.77.0.2": errno.EACCES, "10.77.0.3": errno.ENETUNREACH}
    assert found["10.77.0.1"][1].endswith("No route to host (10.77.0.1)")
