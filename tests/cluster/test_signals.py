"""Ctrl-C and SIGTERM on either side, in every phase: it ends soon, says so by its exit code, and leaves nobody.

130 is Ctrl-C and 143 SIGTERM, for the coordinator and for the worker, whatever they were doing.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import tiny
from processes import Running, are_gone, coordinator, figure, until, worker, write_layout

LONG = ("--raw", "--prompt", "Once upon a time", "--max-tokens", "4000", "--temp", "0.9", "--seed", "1")
SOON = 3.0
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
both = pytest.mark.parametrize("number", CODES, ids=lambda number: signal.Signals(number).name)


def ends(running: Running, number: int) -> None:
    children = running.children()
    struck = running.signal(number)
    code = running.wait(SOON + 5)
    took = time.monotonic() - struck
    figure(f"ended {took:.2f} s after {signal.Signals(number).name}: {code} {running.complaints[-1:]}")
    assert code == CODES[number]
    assert took < SOON
    assert "Traceback" not in running.err
    until(lambda: are_gone(children), "its children are gone", SOON)


@contextmanager
def phase(name: str, folder: Path, address: str) -> Iterator[Running]:
    """A coordinator that has come to a phase, with a remote and a local worker."""
    with ExitStack() as stack:
        match name:
            case "connecting":
                layout = write_layout(folder, ["local", "tcp://127.0.0.1:9"])
                running = stack.enter_context(coordinator(layout, *LONG, "--connect-timeout", "60"))
                until(running.children, "the local worker is started")
            case "loading":
                # Big enough that it is still loading when the signal comes.
                model = tiny.save(folder / "big", "llama", num_hidden_layers=12, hidden_size=512, vocab_size=20_000)
                layout = write_layout(folder, [address], str(model))
                running = stack.enter_context(coordinator(layout, *LONG))
                running.sees("stage a needs")
            case "answering":
                running = stack.enter_context(coordinator(write_layout(folder, ["local", address]), *LONG))
                running.prints(".{40}")
            case _:
                running = stack.enter_context(coordinator(write_layout(folder, [address]), "--chat"))
                running.types("Hello\n")
                running.prints(r"\w")
        yield running


@both
@pytest.mark.parametrize("name", ["connecting", "loading", "answering", "chatting"])
def test_the_coordinator_is_told_to_end(number: int, name: str, tmp_path: Path, remote: str):
    with phase(name, tmp_path, remote) as running:
        ends(running, number)


@pytest.fixture(scope="module")
def remote() -> Iterator[str]:
    """One worker for all these coordinators."""
    with worker() as running:
        yield running.address


@both
@pytest.mark.parametrize("is_serving", [False, True], ids=["idle", "serving"])
def test_a_worker_is_told_to_end(number: int, is_serving: bool, tmp_path: Path):
    with worker() as remote, ExitStack() as stack:
        address = remote.address
        if is_serving:
            running = stack.enter_context(coordinator(write_layout(tmp_path, [address]), *LONG))
            running.prints(".{40}")
        ends(remote, number)
        if is_serving:
            assert running.wait(SOON) == 1
            (sentence,) = running.complaints
            assert address in sentence
            assert "the worker was stopped" in sentence


def test_a_local_worker_is_told_to_end(tmp_path: Path):
    """Somebody ends the child instead of the coordinator."""
    with coordinator(write_layout(tmp_path, ["local"]), *LONG) as running:
        running.prints(".{40}")
        (child,) = running.children()
        child.send_signal(signal.SIGTERM)
        assert running.wait(SOON + 2) == 1
        (sentence,) = running.complaints
        assert "the worker was stopped" in sentence
        until(lambda: are_gone([child]), "it is gone", SOON)


def test_impatient_ctrl_c(tmp_path: Path, remote: str):
    """Again and again, while it is ending."""
    with phase("answering", tmp_path, remote) as running:
        children, struck = running.children(), time.monotonic()
        while running.is_alive and time.monotonic() - struck < SOON:
            running.signal(signal.SIGINT)
            time.sleep(0.02)
        assert running.wait(SOON) == 130
        assert "Traceback" not in running.err
        until(lambda: are_gone(children), "its children are gone", SOON)


def test_closing_the_pipe_that_reads_the_answer(tmp_path: Path, remote: str):
    """``splitinfer coord ... | head`` ends without a word."""
    with coordinator(write_layout(tmp_path, [remote]), *LONG) as running:
        running.prints(".{40}")
        running.stop_reading()
        assert running.wait(20) == 0
        assert running.complaints == []
