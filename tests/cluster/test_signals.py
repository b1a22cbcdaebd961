"""Ctrl-C and SIGTERM on either side, in every phase: it ends, says so by its exit code, and leaves nobody behind.

A worker that is told to end in the middle of a stream, and a server: ``test_recovery.py``. A chat, two signals at a
terminal, and a pipe that is closed: ``test_quick_start.py``; a chat beside a server: ``test_serve.py``.

130 is Ctrl-C and 143 SIGTERM, for the coordinator and for the worker, whatever they were doing. SIGTERM lets an
answer go on for a while (``DRAIN_SECONDS``); a second signal does not wait.
"""

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import tiny
from processes import START_SECONDS, Running, RunningWorker, are_gone, coordinator, until, worker, write_layout

TALE = ("--raw", "--prompt", "Once upon a time", "--temp", "0.9", "--seed", "1")
LONG = (*TALE, "--max-tokens", "8000")  # to the end of its context: several seconds
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
INT, TERM = signal.SIGINT, signal.SIGTERM


def ends(running: Running, number: int) -> None:
    """Send a signal, and see the process end by it."""
    children = running.children()
    running.signal(number)
    assert running.wait(START_SECONDS) == CODES[number]
    assert "Traceback" not in running.err
    until(lambda: are_gone(children), "its children are gone")


@pytest.fixture(scope="module")
def remote() -> Iterator[RunningWorker]:
    """One worker for all these coordinators; it outlives them."""
    with worker() as running:
        assert running.address
        yield running
        assert running.is_alive, running.err[-2000:]


@contextmanager
def phase(name: str, folder: Path, address: str) -> Iterator[Running]:
    """A coordinator that has come to a phase, with a remote and a local worker."""
    with ExitStack() as stack:
        match name:
            case "starting":
                running = stack.enter_context(coordinator(write_layout(folder, ["local", address]), *LONG))
                until(running.children, "the local worker is started")
            case "connecting":
                server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # it is there, and says nothing
                server.settimeout(START_SECONDS)
                layout = write_layout(folder, ["local", f"tcp://127.0.0.1:{server.getsockname()[1]}"])
                running = stack.enter_context(coordinator(layout, *LONG, "--connect-timeout", "60"))
                stack.enter_context(server.accept()[0])
            case "loading":
                # Big enough that it is still loading when the signal comes.
                model = tiny.save(folder / "big", "llama", num_hidden_layers=12, hidden_size=512, vocab_size=20_000)
                running = stack.enter_context(coordinator(write_layout(folder, [address], str(model)), *LONG))
                running.sees("stage a needs")
            case "answering":
                running = stack.enter_context(coordinator(write_layout(folder, ["local", address]), *LONG))
                running.prints(".{40}")
            case _:
                lost = stack.enter_context(worker())
                running = stack.enter_context(coordinator(write_layout(folder, [lost.address]), *LONG))
                running.prints(".{40}")
                lost.signal(signal.SIGKILL)
                running.sees("waiting up to")
        yield running


def nightly(name: str, number: int) -> object:
    return pytest.param(name, number, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("name", "number"),
    [("starting", INT), ("answering", INT), nightly("connecting", INT), nightly("loading", TERM),
     nightly("starting", TERM), nightly("answering", TERM), nightly("connecting", TERM), nightly("loading", INT),
     nightly("waiting", TERM)],
    ids=lambda value: value if isinstance(value, str) else signal.Signals(value).name,
)  # fmt: skip
def test_the_coordinator_is_told_to_end(number: int, name: str, tmp_path: Path, remote: RunningWorker):
    with phase(name, tmp_path, remote.address) as running:
        before = running.out
        ends(running, number)
        assert running.out.startswith(before)
        if number == TERM and name in ("answering", "waiting"):
            assert running.out.endswith("\n"), "it was printed to its end, as any answer"


@pytest.mark.parametrize("number", [INT, pytest.param(TERM, marks=pytest.mark.nightly)])
def test_an_idle_worker_is_told_to_end(number: int):
    with worker() as idle:
        assert idle.address
        ends(idle, number)
