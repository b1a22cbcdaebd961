"""Coordinators and workers that do not go together: each hears why, and the worker waits for the next."""

import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import peers
import pytest
import stages
from peers import Peer, hello, load
from processes import RunningWorker, coordinator, figure, worker, write_layout

from splitinfer.errors import LayoutError, Refused, WorkerUnreachable
from splitinfer.llm import LLM, Settings
from splitinfer.wire.messages import PROTOCOL_VERSION, Ready, Refuse, Welcome

ONCE = ("--raw", "--prompt", "Once", "--max-tokens", "4")


@pytest.fixture(scope="module")
def remote() -> Iterator[RunningWorker]:
    with worker(name="studio") as running:
        assert running.address
        yield running


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("protocol", 99, f"protocol {PROTOCOL_VERSION} here, protocol 99 there"),
        ("splitinfer", "9.9", "splitinfer .* here, splitinfer 9.9 there"),
        ("mlx", "0.1", "mlx .* here, mlx 0.1 there"),
        ("mlx_lm", "0.1", "mlx-lm .* here, mlx-lm 0.1 there"),
    ],
)
def test_another_version(field: str, value: object, words: str, remote: RunningWorker):
    with Peer(remote.address) as peer:
        answer = peer.say(hello(name=f"old-{field}", **{field: value})).hear()
        assert isinstance(answer, Refuse)
        assert re.search(words, answer.reason)
        assert re.search(words, peer.ending)
    remote.sees(f"refused old-{field} .*{words}", 5)


def test_a_second_coordinator_hears_who_is_first(remote: RunningWorker, tmp_path: Path):
    layout = write_layout(tmp_path, [remote.address])
    with LLM(layout) as llm:
        with coordinator(layout, *ONCE) as second:
            assert second.wait(20) == 1
        (sentence,) = second.complaints
        name = re.escape(socket.gethostname())
        assert re.search(rf"refused: the worker is busy with {name} \(tcp://127\.0\.0\.1:\d+\)", sentence)
        assert remote.address in sentence
        remote.sees("refused .*busy with", 5)
        assert llm.generate("Once")[0].finish_reason in {"stop", "length"}, "the first goes on"


def test_other_weights(tiny_folder: Callable[..., Path], tmp_path: Path):
    ours, theirs = tiny_folder("llama"), tiny_folder("llama", seed=1)
    with worker("--model", str(theirs)) as other:
        layout = write_layout(tmp_path, [other.address], str(ours), layers=4)
        with coordinator(layout, *ONCE) as running:
            assert running.wait(20) == 1
        (sentence,) = running.complaints
        assert "has other weights" in sentence
        assert re.search(r"model-0000\d-of-00002.safetensors has different weights", sentence)
        other.sees("refused .* has other weights", 5)
        with LLM(write_layout(tmp_path, [other.address], str(theirs), layers=4)) as llm:
            prompt = stages.prompt(9)
            assert stages.tokens_of(llm, prompt, max_tokens=8) == stages.plain_greedy(theirs, prompt, 8)


def test_a_model_that_the_worker_does_not_have(tiny_folder: Callable[..., Path], tmp_path: Path):
    with worker("--model", str(tmp_path / "nowhere")) as other:
        with pytest.raises(Refused, match=r"refused: .*nowhere"):
            LLM(write_layout(tmp_path, [other.address], str(tiny_folder("llama")), layers=4))
        other.sees("refused .*nowhere", 5)


def test_layers_that_do_not_add_up(remote: RunningWorker, tmp_path: Path):
    with pytest.raises(LayoutError, match=r"holds 10 layers \(5 \+ 5\), but the model has 12"):
        LLM(write_layout(tmp_path, [remote.address], layers=10))


def test_somebody_else_in_the_worker_s_place(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = f"tcp://127.0.0.1:{stranger.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(WorkerUnreachable) as found:
            LLM(write_layout(tmp_path, [address]), settings=Settings(connect_timeout=1.5))
        took = time.monotonic() - began
        figure(f"gave up after {took:.2f} s: {found.value}")
        assert 1.5 <= took < 10  # opening the model is in it, too, and whatever else the machine does
        assert address in str(found.value)
        assert "2 s" in str(found.value)


def test_a_worker_that_is_not_there(tmp_path: Path):
    with coordinator(write_layout(tmp_path, ["tcp://127.0.0.1:9"]), *ONCE, "--connect-timeout", "0.5") as running:
        assert running.wait(20) == 1
    (sentence,) = running.complaints
    assert "tcp://127.0.0.1:9" in sentence
    assert running.out == ""


@pytest.mark.fast
def test_a_worker_that_starts_late(tmp_path: Path):
    """Whoever is started first waits for the other."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    layout = write_layout(tmp_path, [f"tcp://127.0.0.1:{port}"])
    with coordinator(layout, *ONCE, "--connect-timeout", "30") as running, worker("--port", str(port)):
        assert running.wait(30) == 0


def test_a_port_in_use(remote: RunningWorker):
    port = remote.address.rpartition(":")[2]
    with worker("--port", port) as second:
        assert second.wait(20) == 1
    (sentence,) = second.complaints
    assert sentence == f"splitinfer: tcp://127.0.0.1:{port} is in use; is a worker running already? " + (
        "Choose another with --port"
    )


def test_a_host_that_is_not_ours():
    with worker("--host", "203.0.113.7") as running:
        assert running.wait(20) == 1
    (sentence,) = running.complaints
    assert sentence.startswith("splitinfer: cannot listen on tcp://203.0.113.7:")
    assert (sentence.count("203.0.113.7"), "rdma" in sentence) == (1, False)


def test_a_worker_of_another_stage_hears_only_its_own_pipeline(remote: RunningWorker):
    """Somebody who knows the port, but not the session, cannot feed hidden states into it."""
    with Peer(remote.address) as owner:
        assert isinstance(owner.say(hello(session="secret")).hear(), Welcome)
        assert isinstance(owner.say(load()).hear(), Ready)
        with Peer(remote.address) as stranger:
            answer = stranger.say(hello(role="upstream", session="guess")).hear()
            assert isinstance(answer, Refuse)
        assert owner.link.closed is None
    assert len(peers.generate(remote.address, num_tokens=3)) == 3
