"""What a program that uses ``LLM`` sees when a worker dies, and what stays behind when it is done: nothing."""

import threading
import time
from pathlib import Path

import psutil
import pytest
from processes import until

import splitinfer
from splitinfer.engine.coordinator.local_workers import LocalWorker
from splitinfer.errors import PeerError, RequestError, SplitinferError, WorkerUnreachable
from splitinfer.llm import LLM, Settings
from splitinfer.wire.messages import Progress

LAYOUT = {"model": "demo", "stages": [{"name": "a", "layers": 6}, {"name": "b", "layers": 6, "address": "local"}]}
LONG = splitinfer.SamplingParams(max_tokens=3000, ignore_eos=True)


def test_a_worker_dies_under_requests():
    with LLM(LAYOUT, settings=Settings(rejoin_timeout=0.0)) as llm:
        reader, waiting = llm.submit("Once upon a time", LONG), llm.submit([5, 6, 7], LONG)
        events = iter(reader)
        for _ in range(5):
            next(events)
        (child,) = psutil.Process().children()
        child.kill()
        for request in (reader, waiting):
            began = time.monotonic()
            output = request.result()
            assert time.monotonic() - began < 3
            assert output.finish_reason == "error"
            assert output.error is not None
            assert "worker b" in output.error
        assert len(reader.output.token_ids) >= 5
        assert len(reader.output.token_times) == len(reader.output.token_ids)
        assert reader.output.text
        assert reader.result() is reader.output, "asked again, the same"
        with pytest.raises(SplitinferError, match="worker b"):
            llm.submit("again")
        with pytest.raises(SplitinferError, match="worker b"):
            llm.generate(["again", "and again"])
        llm.forget("nobody")
        reader.abort()
        llm.stats()
        began = time.monotonic()
        llm.close()
        assert time.monotonic() - began < 3
    until(lambda: not psutil.Process().children(), "no child is left", 3)


def test_requests_that_cannot_be():
    with LLM(LAYOUT, settings=Settings(context=100)) as llm:
        for prompt, words in (
            ([], "empty"),
            ("", "empty"),
            ([5] * 5000, r"5,000 tokens, but the context is 100, .*; the model has 4,096 \(see --context\)$"),
            ([5] * 100, "100 tokens"),
            ([5, 2048], "2048 is not in"),
            ([-1], "-1 is not in"),
            ([2**70], "is not in"),
        ):
            with pytest.raises(RequestError, match=words):
                llm.submit(prompt)
        for seq_id in (-1, 0, 10**30):
            llm._engine.abort(seq_id)
        llm.forget("nobody")
        ended = llm.submit([5, 6], splitinfer.SamplingParams(max_tokens=1))
        ended.result()
        ended.abort()
        full = llm.submit([5] * 94, LONG).result()
        assert (full.finish_reason, len(full.token_ids)) == ("length", 6)
    with pytest.raises(PeerError, match="closed"):
        llm.submit([5])
    llm.close()


def test_nothing_is_left_behind():
    def use() -> None:
        with LLM(LAYOUT) as llm:
            llm.generate("Once", splitinfer.SamplingParams(max_tokens=2))

    use()  # zmq and MLX make threads and descriptors of their own, once
    threads, descriptors = set(threading.enumerate()), psutil.Process().num_fds()
    for _ in range(3):
        use()
    until(lambda: set(threading.enumerate()) <= threads, "no thread is left", 5)
    until(lambda: psutil.Process().num_fds() <= descriptors, "no descriptor is left", 5)
    assert not [t.name for t in threading.enumerate() if t.name.split()[0] in {"engine", "acceptor", "transports"}]
    assert not psutil.Process().children()


def test_closing_while_it_generates_ends_the_readers():
    llm = LLM(LAYOUT)
    request = llm.submit("Once upon a time", LONG)
    next(iter(request))
    began = time.monotonic()
    llm.close()
    assert time.monotonic() - began < 3
    assert request.result().finish_reason == "abort"


def test_an_error_while_loading_leaves_nothing_behind():
    threads = set(threading.enumerate())

    def interrupt(_stage: str, _progress: Progress) -> None:
        raise RuntimeError("the caller's own mistake")

    with pytest.raises(SplitinferError, match="the caller's own mistake"):
        LLM(LAYOUT, notice=interrupt)
    until(lambda: not psutil.Process().children(), "no child is left", 5)
    until(lambda: set(threading.enumerate()) <= threads, "no thread is left", 5)


def test_a_local_worker_that_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("sys.executable", _script(tmp_path, "echo 'no such thing' >&2; exit 3"))
    silent = LocalWorker("b")
    with pytest.raises(WorkerUnreachable, match="the local worker b did not start: no such thing"):
        silent.address()
    silent.stop()
    monkeypatch.setattr("sys.executable", _script(tmp_path, "exit 3"))
    silent = LocalWorker("b")
    with pytest.raises(WorkerUnreachable, match="the local worker b did not start: exit code 3"):
        silent.address()
    silent.stop()


def test_a_local_worker_that_hangs_before_it_says_a_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("sys.executable", _script(tmp_path, "exec sleep 100"))
    monkeypatch.setattr("splitinfer.engine.coordinator.local_workers.START_TIMEOUT", 0.5)
    silent = LocalWorker("b")
    began = time.monotonic()
    with pytest.raises(WorkerUnreachable, match=r"the local worker b did not start: nothing received for 0\.5 s"):
        silent.address()
    silent.stop()
    assert time.monotonic() - began < 4


def _script(folder: Path, body: str) -> str:
    path = folder / f"python-{abs(hash(body))}"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)
