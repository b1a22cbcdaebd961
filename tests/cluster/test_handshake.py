"""Coordinators and workers that do not go together: each hears why, and the worker waits for the next."""

import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import stages
from peers import Peer, hello
from processes import START_SECONDS, RunningWorker, worker, write_layout

from splitinfer.errors import Refused, WorkerUnreachable
from splitinfer.llm import LLM, Settings
from splitinfer.wire.messages import PROTOCOL_VERSION, Refuse


@pytest.fixture(scope="module")
def remote() -> Iterator[RunningWorker]:
    with worker(name="studio") as running:
        assert running.address
        yield running


def test_another_version(remote: RunningWorker):
    words = rf"protocol {PROTOCOL_VERSION} on \w+, protocol 99 on old"
    with Peer(remote.address) as peer:
        answer = peer.say(hello(name="old", protocol=99)).hear()
        assert isinstance(answer, Refuse)
        assert re.search(words, answer.reason)
        assert re.search(words, peer.ending)
    remote.sees(f"refused old .*{words}")


def test_a_second_coordinator_hears_who_is_first(remote: RunningWorker, tmp_path: Path):
    layout = write_layout(tmp_path, [remote.address])
    with LLM(layout) as llm:
        with pytest.raises(Refused) as refused:
            LLM(layout)
        name = re.escape(socket.gethostname())
        assert re.search(rf"refused: the worker is busy with {name} \(tcp://127\.0\.0\.1:\d+\)", str(refused.value))
        assert remote.address in str(refused.value)
        remote.sees("refused .*busy with")
        assert llm.generate("Once")[0].finish_reason in {"stop", "length"}, "the first goes on"


def test_other_weights(tiny_folder: Callable[..., Path], tmp_path: Path):
    ours, theirs = tiny_folder("llama"), tiny_folder("llama", seed=1)
    with worker("--model", str(theirs)) as other:
        with pytest.raises(Refused, match=r"has other weights.*model-\d+-of-00002.safetensors has different weights"):
            LLM(write_layout(tmp_path, [other.address], str(ours), layers=4))
        other.sees("refused .* has other weights")
        with LLM(write_layout(tmp_path, [other.address], str(theirs), layers=4)) as llm:
            prompt = stages.prompt(9)
            assert stages.tokens_of(llm, prompt, max_tokens=8) == stages.plain_greedy(theirs, prompt, 8)


def test_somebody_else_in_the_worker_s_place(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = f"tcp://127.0.0.1:{stranger.getsockname()[1]}"
        with pytest.raises(WorkerUnreachable, match=rf"{address}.*2 s"):
            LLM(write_layout(tmp_path, [address]), settings=Settings(connect_timeout=1.5))


@pytest.mark.parametrize("is_ours", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_place_where_a_worker_cannot_listen(is_ours: bool, remote: RunningWorker):
    port = remote.address.rpartition(":")[2]
    taken = rf"splitinfer: tcp://127.0.0.1:{port} is in use; is a worker running already\? Choose another with --port"
    not_ours = r"splitinfer: cannot listen on tcp://203\.0\.113\.7:((?!203|rdma).)*"
    with worker(*(("--port", port) if is_ours else ("--host", "203.0.113.7"))) as running:
        assert running.wait(START_SECONDS) == 1
    (said,) = running.complaints
    assert re.fullmatch(taken if is_ours else not_ours, said)
