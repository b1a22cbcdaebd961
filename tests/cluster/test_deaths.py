"""Processes that die or freeze: one sentence, soon, and nobody left behind.

``test_rejoin.py`` and ``campaigns/deaths.py`` have what follows when requests wait for a worker; here they do not.
"""

import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import peers
import psutil
import pytest
from effort import long
from interrupts import freeze
from processes import Running, are_gone, coordinator, figure, until, worker, write_layout

from splitinfer.llm import LLM

LONG = ("--raw", "--prompt", "Once upon a time", "--max-tokens", "4000", "--temp", "0.9", "--seed", "1")
NOT_WAITING = ("--rejoin-timeout", "0")
SOON = 3.0  # seconds; what a dead connection takes is milliseconds, the rest is ending and a busy machine
FROZEN = 3.0 + 2.0  # the transport's limit of silence, and the same


@contextmanager
def generating(folder: Path, addresses: Sequence[str]) -> Iterator[Running]:
    """A coordinator in the middle of a long answer."""
    with coordinator(write_layout(folder, addresses), *LONG, *NOT_WAITING) as running:
        running.prints(".{60}")
        yield running


def ends_with_one_sentence(running: Running, struck: float, words: str, within: float) -> None:
    children = running.children()
    code = running.wait(within + 2)
    took = time.monotonic() - struck
    figure(f"[{words}] the coordinator ended {took:.2f} s after: {running.complaints}")
    assert code == 1
    assert took < within
    (sentence,) = running.complaints
    assert sentence.startswith("splitinfer: ")
    assert re.search(words, sentence), sentence
    assert len(running.out) >= 60
    until(lambda: are_gone(children), "its children are gone", 3)


def is_at_rest(process: psutil.Process) -> bool:
    """Whether a process uses next to no processor for a moment."""
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    time.sleep(0.5)  # there is no event to wait for: nothing is what should happen
    return sum(process.cpu_times()[:2]) - before < 0.3 * (time.monotonic() - began)


@pytest.mark.parametrize("victim", ["middle", long("last")])
def test_one_of_two_workers_is_killed_and_then_the_other(victim: str, tmp_path: Path):
    with worker(name="middle") as middle, worker(name="last") as last:
        dead, other = (middle, last) if victim == "middle" else (last, middle)
        with generating(tmp_path, [middle.address, last.address]) as running:
            struck = dead.signal(signal.SIGKILL)
            # Its neighbour may be the first to tell of it.
            ends_with_one_sentence(running, struck, f"{dead.address}|lost {victim}", SOON)
        other.sees("is gone|session ended")
        assert is_at_rest(other.process)
        assert len(peers.generate(other.address, num_tokens=3)) == 3
        if victim == "last":
            with generating(tmp_path, [other.address]) as alone:
                struck = other.signal(signal.SIGKILL)
                ends_with_one_sentence(alone, struck, other.address, SOON)


def test_a_local_worker_is_killed(tmp_path: Path):
    with generating(tmp_path, ["local", "local"]) as running:
        dead = running.children()[1]
        struck = time.monotonic()
        dead.kill()
        ends_with_one_sentence(running, struck, "worker ", SOON)


@pytest.mark.parametrize("is_local", [False, long(True)], ids=["remote", "local"])
def test_a_worker_freezes(is_local: bool, tmp_path: Path):
    with worker() as remote, generating(tmp_path, ["local" if is_local else remote.address]) as running:
        frozen = running.children()[0] if is_local else remote.process
        freeze(frozen)
        struck = time.monotonic()
        used = sum(running.process.cpu_times()[:2])
        until(lambda: not running.is_alive or time.monotonic() - struck > 2, "it waits", 5)
        if running.is_alive:
            assert sum(running.process.cpu_times()[:2]) - used < 0.5, "waiting should cost nothing"
        ends_with_one_sentence(running, struck, "nothing received", FROZEN + (SOON if is_local else 0))
        if not is_local:
            frozen.resume()
            remote.sees("is gone|session ended")  # as it is thawed while it listens, or while it sends


def test_the_coordinator_is_killed(tmp_path: Path):
    with worker() as remote:
        with generating(tmp_path, [remote.address, "local"]) as running:
            children = running.children()
            assert len(children) == 1
            struck = running.signal(signal.SIGKILL)
            remote.sees("is gone", 3)
            figure(f"the worker was free {time.monotonic() - struck:.2f} s after")
            until(lambda: are_gone(children), "local workers are gone", 3)
        assert is_at_rest(remote.process)
        assert len(peers.generate(remote.address, num_tokens=3)) == 3


def test_the_coordinator_freezes(tmp_path: Path):
    """The worker gives it up and serves the next; the frozen one hears so when it wakes."""
    with worker() as remote, generating(tmp_path, [remote.address]) as running:
        freeze(running.process)
        struck = time.monotonic()
        remote.sees("is gone", FROZEN)
        figure(f"the worker gave it up {time.monotonic() - struck:.2f} s after")
        with LLM(write_layout(tmp_path, [remote.address])):
            running.process.resume()
            ends_with_one_sentence(running, time.monotonic(), remote.address, SOON)


def test_a_worker_dies_while_it_loads(tmp_path: Path):
    """Frozen as soon as it is greeted, so that the coordinator waits for it."""
    with worker() as remote:
        layout = write_layout(tmp_path, [remote.address])
        freeze(remote.process)
        with coordinator(layout, *LONG, "--connect-timeout", "2") as running:
            assert running.wait(20) == 1
            (sentence,) = running.complaints
            assert remote.address in sentence
            assert "2 s" in sentence
        remote.process.resume()
        assert len(peers.generate(remote.address, num_tokens=3)) == 3
