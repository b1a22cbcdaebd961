"""The front page's promise, with real processes: whatever is lost in the middle of a stream, its text stays the same.

    client -> splitinfer serve (stage a) -> splitinfer worker (b) -> a local worker (c), and KV on disk everywhere

All tests share one pipeline. Each strikes in the middle of a stream and leaves the pipeline whole, but for the last.
"""

import json
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import left_over
import psutil
import pytest
import yaml
from held_port import held_port
from interrupts import freeze
from processes import Running, RunningWorker, are_gone, local_workers, until

from splitinfer.kvstore.files import Folder

Chat = list[dict[str, str]]
TALE: Chat = [{"role": "user", "content": "Once upon a time"}]
LONG_TALE: Chat = [{"role": "user", "content": "Once there was a poor woodcutter who lived in the forest. " * 36}]
NUM_TOKENS, STRUCK_AFTER = 80, 8
ANSWER = {"temperature": 0.8, "seed": 7, "ignore_eos": True}
BLOCK = 256  # tokens of KV in a file


_HOLDS_LOCK = """
import ctypes, runpy, signal, sys
for seconds in (5, 10, 14):
    signal.signal(signal.SIGRTMIN + seconds, lambda number, _: ctypes.PyDLL(None).sleep(number - signal.SIGRTMIN))
runpy.run_module("splitinfer", run_name="__main__")
"""
"""`splitinfer`, whose interpreter's lock is held for some seconds by a signal: ``PyDLL`` keeps it."""


class Pipeline:
    """The processes, and what a client asks of them."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self.port, self._client = folder, port, httpx.Client()
        self._layout = folder / "layout.yaml"
        addresses = ({}, {"address": f"tcp://127.0.0.1:{port}"}, {"address": "local"})
        stages = [{"name": name, "layers": 4} | where for name, where in zip("abc", addresses, strict=True)]
        self._layout.write_text(yaml.safe_dump({"model": "demo", "stages": stages}))
        self.start_worker()
        self.start_server()
        self.undisturbed = "".join(self.stream())

    def start_server(self) -> None:
        self.server = Running(
            "serve", "--layout", str(self._layout), "--port", "0", "--kv-dir", str(self._folder / "kv"),
            "--drain-seconds", "60",
        )  # fmt: skip
        url = self.server.sees(r"serving demo at (http://127.0.0.1:\d+)/v1")[1]
        self._client.close()
        self._client = httpx.Client(base_url=url, timeout=120)
        left_over.keep()

    def start_worker(self) -> None:
        kv = str(self._folder / "kv of b")
        words = ("worker", "--no-announce", "--name", "b", "--port", str(self.port), "--kv-dir", kv)
        self.worker = RunningWorker(*words, code=_HOLDS_LOCK)
        left_over.keep()

    @property
    def local_worker(self) -> psutil.Process:
        return local_workers(self.server.process)["c"]

    def stream(self) -> Iterator[str]:
        """The pieces of a long answer."""
        body = {"messages": TALE, "max_tokens": NUM_TOKENS, "stream": True, **ANSWER}
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield "".join(choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"])

    def answer(self, messages: Chat) -> tuple[str, int]:
        """A short answer, and how many tokens of its prompt were not computed."""
        body = {"messages": messages, "max_tokens": 24, **ANSWER}
        said = self._client.post("/v1/chat/completions", json=body).json()
        return said["choices"][0]["message"]["content"], said["usage"]["prompt_tokens_details"]["cached_tokens"]

    def counter(self, name: str) -> float:
        found = re.search(rf"^splitinfer.{name}_total(?:{{.*?}})? (\S+)", self._client.get("/metrics").text, re.M)
        assert found is not None, f"no counter {name}"
        return float(found[1])

    def until_it_waits(self, stage: str) -> None:
        """Until the loss shows, while the stream is not over."""
        until(lambda: self.health()["status"] == "waiting", "its loss shows")
        health = self.health()
        assert (health["running"], str(health["waits_for"]).partition(",")[0]) == (1, f"stage {stage}")

    def until_it_drains(self) -> None:
        until(lambda: self.health()["status"] == "draining", "it drains")

    def health(self) -> dict[str, object]:
        found: dict[str, object] = self._client.get("/health").json()
        return found

    def num_blocks(self) -> int:
        """Blocks of KV on disk, of all three stages."""
        return sum(len(Folder(self._folder / name).all_files()) for name in ("kv", "kv of b"))

    @contextmanager
    def in_a_stream(self, num_lost: int = 1) -> Iterator[None]:
        """The block runs in the middle of a stream, whose text must not show it; afterwards all stages are back. So
        many times a stage was lost."""
        rejoins, stream = self.counter("rejoins"), self.stream()
        begun = [next(stream) for _ in range(STRUCK_AFTER)]
        yield
        assert "".join([*begun, *stream]) == self.undisturbed
        assert self.counter("rejoins") == rejoins + num_lost

    def close(self) -> None:
        self._client.close()
        children = [self.server.process, self.worker.process, *self.server.children()]
        self.server.end()
        self.worker.end()
        until(lambda: are_gone(children), "nobody is left")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with held_port() as port:  # nobody else gets it while the worker is gone
        made = Pipeline(tmp_path_factory.mktemp("pipeline"), port)
        yield made
        made.close()


@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [(signal.SIGKILL, -9, "is gone"), (signal.SIGTERM, 143, "the worker was stopped"),
     pytest.param(signal.SIGINT, 130, "the worker was stopped", marks=pytest.mark.nightly)],
    ids=["SIGKILL", "SIGTERM", "SIGINT"],
)  # fmt: skip
def test_a_worker_that_ends_is_started_again_at_the_same_place(number: int, code: int, reason: str, pipeline: Pipeline):
    with pipeline.in_a_stream():
        pipeline.worker.signal(number)
        pipeline.until_it_waits("b")
        assert pipeline.worker.wait(30) == code
        pipeline.server.sees(
            f"{reason}.* start it there again with: splitinfer worker --host 127.0.0.1 --port {pipeline.port}"
        )
        pipeline.start_worker()
    pipeline.server.sees("all stages are back")


@pytest.mark.parametrize(
    "seconds", [0, 5, pytest.param(10, marks=pytest.mark.nightly), pytest.param(14, marks=pytest.mark.nightly)]
)
def test_a_silent_worker_is_not_lost_while_its_machine_answers(seconds: int, pipeline: Pipeline):
    """It is frozen, or holds its interpreter's lock for so long."""
    with pipeline.in_a_stream(num_lost=0):
        if seconds:
            pipeline.worker.signal(signal.SIGRTMIN + seconds)
        else:
            freeze(pipeline.worker.process)
        waits = "b, which does not answer; its machine does"
        until(lambda: pipeline.health()["waits_for"] == waits, "its silence shows", 10)
        if not seconds:
            pipeline.worker.process.resume()


@pytest.mark.parametrize("strike", [pytest.param(freeze, marks=pytest.mark.nightly), psutil.Process.kill])
def test_a_lost_local_worker_is_replaced(strike: Callable[[psutil.Process], None], pipeline: Pipeline):
    lost, elsewhere = pipeline.local_worker, pipeline.worker.pid
    with pipeline.in_a_stream():
        strike(lost)
    assert are_gone([lost])
    assert pipeline.local_worker.pid != lost.pid
    assert pipeline.worker.is_alive
    assert pipeline.worker.pid == elsewhere


def test_a_killed_coordinator_finds_the_last_turn_on_disk(pipeline: Pipeline):
    before = pipeline.num_blocks()
    said, _ = pipeline.answer(LONG_TALE)
    next_turn = [*LONG_TALE, {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    expected, _ = pipeline.answer(next_turn)
    until(lambda: pipeline.num_blocks() >= before + 2 * 3, "two blocks of each stage are written")
    children = pipeline.server.children()
    pipeline.server.signal(signal.SIGKILL)
    pipeline.server.wait(30)
    until(lambda: are_gone(children), "its local worker is gone")
    pipeline.worker.sees(r"coordinator .* is gone|session ended")
    pipeline.start_server()
    text, num_cached = pipeline.answer(next_turn)
    assert text == expected
    assert num_cached >= 2 * BLOCK
    assert pipeline.counter("kept_tokens_read") >= 2 * BLOCK
    assert pipeline.worker.is_alive


def test_sigterm_lets_the_stream_end(pipeline: Pipeline):
    """The last: the server is gone, and its worker elsewhere waits for the next."""
    stream = pipeline.stream()
    begun = [next(stream) for _ in range(STRUCK_AFTER)]
    children = pipeline.server.children()
    pipeline.server.signal(signal.SIGTERM)
    pipeline.until_it_drains()
    assert "".join([*begun, *stream]) == pipeline.undisturbed
    assert pipeline.server.wait(30) == 143
    assert TALE[0]["content"] not in pipeline.server.err, "prompts are nobody's business"
    until(lambda: are_gone(children), "its local worker is gone")
    assert pipeline.worker.is_alive
