"""One worker and many coordinators, one after another: nothing of them stays but the weights."""

from collections.abc import Callable
from pathlib import Path

import peers
import pytest
from peers import Peer, at, hello, load, new, step
from processes import RunningWorker, coordinator, figure, until, worker, write_layout

from splitinfer.llm import LLM
from splitinfer.wire.messages import Ready, Welcome


def aborts_requests(remote: RunningWorker, folder: Path) -> None:
    with LLM(write_layout(folder, [remote.address])) as llm:
        requests = [llm.submit([5, 6, 7, i]) for i in range(4)]
        next(iter(requests[0]))
        for request in requests:
            request.abort()


def leaves_with_requests_under_way(remote: RunningWorker, folder: Path) -> None:
    with LLM(write_layout(folder, [remote.address])) as llm:
        next(iter(llm.submit([5, 6, 7])))
        llm.submit([5] * 500)


def drops_the_link(remote: RunningWorker, is_loaded: bool) -> None:
    with Peer(remote.address) as peer:
        assert isinstance(peer.say(hello()).hear(), Welcome)
        peer.say(load(bounds=(0, 6 if is_loaded else 3, 12)))
        if is_loaded:
            assert isinstance(peer.hear(), Ready)
            peer.say(*step(at(1, 0, *[5] * 400), new=(new(1),)))
        peer.link.abort()


def is_killed(remote: RunningWorker, folder: Path) -> None:
    with coordinator(write_layout(folder, [remote.address]), "--raw", "--prompt", "Once", "--max-tokens", "4000") as c:
        c.prints(".{20}")


WAYS: dict[str, Callable[[RunningWorker, Path], object]] = {
    "completes": lambda remote, _: peers.generate(remote.address),
    "aborts requests": aborts_requests,
    "leaves with requests under way": leaves_with_requests_under_way,
    "leaves while it loads": lambda remote, _: drops_the_link(remote, is_loaded=False),
    "drops the link in a step": lambda remote, _: drops_the_link(remote, is_loaded=True),
}


@pytest.mark.nightly
def test_many_coordinators(tmp_path: Path):
    with worker() as remote:
        expected = peers.generate(remote.address)
        sizes: list[tuple[int, int, int]] = []
        for _ in range(4):
            for name, way in WAYS.items():
                way(remote, tmp_path)
                until(lambda: serves(remote), f"it is free after one that {name}", 10)
            sizes.append((remote.rss >> 20, remote.process.num_threads(), remote.process.num_fds()))
        is_killed(remote, tmp_path)
        assert peers.generate(remote.address) == expected
        until(lambda: remote.process.num_fds() <= sizes[0][2], "its descriptors are given back", 5)
        figure(f"after each {len(WAYS)} coordinators (MiB, threads, descriptors): {sizes}")
        assert sizes[-1][0] < sizes[0][0] + 40
        assert sizes[-1][1] <= sizes[0][1]


def serves(remote: RunningWorker) -> bool:
    """Whether it is nobody's."""
    with Peer(remote.address) as peer:
        return isinstance(peer.say(hello()).hear(), Welcome)
