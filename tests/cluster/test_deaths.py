"""Processes that die or freeze where no request waits for them (``--rejoin-timeout 0``): one sentence, and nobody left.

``test_recovery.py`` and ``campaigns/deaths.py`` have what follows when requests wait for a worker.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import peers
import pytest
from interrupts import freeze
from processes import START_SECONDS, Running, are_gone, coordinator, until, worker, write_layout

from splitinfer.llm import LLM

pytestmark = pytest.mark.nightly

LONG = ("--raw", "--prompt", "Once upon a time", "--max-tokens", "8000", "--temp", "0.9", "--seed", "1")


@contextmanager
def generating(folder: Path, addresses: Sequence[str]) -> Iterator[Running]:
    """A coordinator in the middle of a long answer."""
    with coordinator(write_layout(folder, addresses), *LONG, "--rejoin-timeout", "0") as running:
        running.prints(".{60}")
        yield running


def ends_with_one_sentence(running: Running, words: str) -> None:
    children = running.children()
    assert running.wait(START_SECONDS) == 1
    (sentence,) = running.complaints
    assert sentence.startswith("splitinfer: ")
    assert re.search(words, sentence), sentence
    assert len(running.out) >= 60
    until(lambda: are_gone(children), "its children are gone")


def test_the_coordinator_freezes(tmp_path: Path):
    """The worker gives it up and serves the next; the frozen one hears so when it wakes."""
    with worker() as remote, generating(tmp_path, [remote.address]) as running:
        freeze(running.process)
        remote.sees("is gone")
        with LLM(write_layout(tmp_path, [remote.address])):
            running.process.resume()
            ends_with_one_sentence(running, remote.address)


def test_a_worker_dies_while_it_loads(tmp_path: Path):
    """Frozen as soon as it is greeted, so that the coordinator waits for it."""
    with worker() as remote:
        layout = write_layout(tmp_path, [remote.address])
        freeze(remote.process)
        with coordinator(layout, *LONG, "--connect-timeout", "2") as running:
            assert running.wait(START_SECONDS) == 1
            (sentence,) = running.complaints
            assert remote.address in sentence
            assert "2 s" in sentence
        remote.process.resume()
        assert len(peers.generate(remote.address, num_tokens=3)) == 3
