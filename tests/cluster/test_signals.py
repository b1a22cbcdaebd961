"""Ctrl-C and SIGTERM on either side, in every phase: it ends soon, says so by its exit code, and leaves nobody.

130 is Ctrl-C and 143 SIGTERM, for the coordinator and for the worker, whatever they were doing. SIGTERM lets an
answer go on for a while.
"""

import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import tiny
from effort import long
from processes import START_SECONDS, Running, are_gone, coordinator, figure, until, worker, write_layout

from splitinfer.cli.draining import DRAIN_SECONDS
from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM

TALE = ("--raw", "--prompt", "Once upon a time", "--temp", "0.9", "--seed", "1")
LONG = (*TALE, "--max-tokens", "8000")
NOT_WAITING = ("--rejoin-timeout", "0")
SOON = 3.0
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def ends(running: Running, number: int, within: float = SOON) -> None:
    children = running.children()
    struck = running.signal(number)
    code = running.wait(within + 5)
    took = time.monotonic() - struck
    figure(f"ended {took:.2f} s after {signal.Signals(number).name}: {code} {running.complaints[-1:]}")
    assert code == CODES[number]
    assert took < within
    assert "Traceback" not in running.err
    until(lambda: are_gone(children), "its children are gone", SOON)


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
                layout = write_layout(folder, [address], str(model))
                running = stack.enter_context(coordinator(layout, *LONG))
                running.sees("stage a needs")
            case "answering":
                running = stack.enter_context(coordinator(write_layout(folder, ["local", address]), *LONG))
                running.prints(".{40}")
            case _:
                running = stack.enter_context(coordinator(write_layout(folder, [address]), "--chat", "--temp", "0"))
                running.types("Hello\n")
                running.prints(r"\w")
        yield running


@pytest.mark.parametrize(
    ("name", "number"),
    [("starting", signal.SIGINT), ("connecting", signal.SIGINT),
     ("loading", signal.SIGTERM), ("answering", signal.SIGINT),
     ("chatting", signal.SIGINT),
     long("starting", signal.SIGTERM), long("answering", signal.SIGTERM), long("chatting", signal.SIGTERM),
     long("connecting", signal.SIGTERM), long("loading", signal.SIGINT)],
    ids=lambda value: value if isinstance(value, str) else signal.Signals(value).name,
)  # fmt: skip
def test_the_coordinator_is_told_to_end(number: int, name: str, tmp_path: Path, remote: str):
    drains = number == signal.SIGTERM and name in ("answering", "chatting")
    with phase(name, tmp_path, remote) as running:
        ends(running, number, SOON + DRAIN_SECONDS * drains)


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_sigterm_lets_a_short_answer_end(as_json: bool, tmp_path: Path, remote: str):
    layout, short = write_layout(tmp_path, ["local", remote]), (*TALE, "--max-tokens", "50")
    with LLM(write_layout(tmp_path, [remote])) as llm:
        undisturbed = llm.generate(TALE[2], SamplingParams(temperature=0.9, seed=1, max_tokens=50))[0].text + "\n"
    # A document is written at the end; that the answer is under way shows in nothing but the time.
    with coordinator(layout, *short, *(["--json"] if as_json else [])) as running:
        if as_json:
            running.sees("stage b needs")
            time.sleep(0.7)
        else:
            running.prints(".{20}")
        ends(running, signal.SIGTERM, SOON + DRAIN_SECONDS)
        if as_json and not running.out:
            pytest.skip("told before the answer began")
        assert (json.loads(running.out)["text"] + "\n" if as_json else running.out) == undisturbed


def test_sigterm_cuts_a_long_answer_and_keeps_its_text(tmp_path: Path, remote: str):
    with coordinator(write_layout(tmp_path, ["local", remote]), *LONG) as running:
        running.prints(".{40}")
        before = len(running.out)
        began = time.monotonic()
        ends(running, signal.SIGTERM, SOON + DRAIN_SECONDS)
        assert time.monotonic() - began >= DRAIN_SECONDS
        assert len(running.out) > before
        assert running.out.endswith("\n"), "it was printed to its end, as any answer"
        assert running.complaints == []


@pytest.mark.parametrize("number", [signal.SIGTERM, long(signal.SIGINT)], ids=["SIGTERM", "SIGINT"])
def test_the_second_signal_does_not_wait(number: int, tmp_path: Path, remote: str):
    with phase("answering", tmp_path, remote) as running:
        running.signal(signal.SIGTERM)
        written = len(running.out)
        until(lambda: len(running.out) > written + 40, "it goes on")
        ends(running, number)


def test_sigterm_after_an_answer_ends_the_chat(tmp_path: Path, remote: str):
    """Nobody closes its standard input: it is interrupted there, and has no further turn."""
    with coordinator(write_layout(tmp_path, [remote]), "--chat", "--max-tokens", "60", "--temp", "0") as running:
        running.types("Hello\n")
        running.prints(r"\w")
        running.types("And then?\n")
        ends(running, signal.SIGTERM, SOON + DRAIN_SECONDS)


@pytest.fixture(scope="module")
def remote() -> Iterator[str]:
    """One worker for all these coordinators."""
    with worker() as running:
        yield running.address


@pytest.mark.parametrize(
    ("is_serving", "number"),
    [(False, signal.SIGINT), (False, signal.SIGTERM), (True, signal.SIGTERM), long(True, signal.SIGINT)],
    ids=lambda value: ["idle", "serving"][value] if isinstance(value, bool) else signal.Signals(value).name,
)
def test_a_worker_is_told_to_end(number: int, is_serving: bool, tmp_path: Path):
    with worker() as remote, ExitStack() as stack:
        address = remote.address
        if is_serving:
            running = stack.enter_context(coordinator(write_layout(tmp_path, [address]), *LONG, *NOT_WAITING))
            running.prints(".{40}")
        ends(remote, number)
        if is_serving:
            assert running.wait(SOON) == 1
            (sentence,) = running.complaints
            assert address in sentence
            assert "the worker was stopped" in sentence


def test_a_local_worker_is_told_to_end(tmp_path: Path):
    """Somebody ends the child instead of the coordinator."""
    with coordinator(write_layout(tmp_path, ["local"]), *LONG, *NOT_WAITING) as running:
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
