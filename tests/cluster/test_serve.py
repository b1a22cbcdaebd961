"""`splitinfer serve` and `coord --serve` as processes: what they say, a lost worker in a stream, SIGTERM, Ctrl-C."""

import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
from processes import Running, until, write_layout

KEY = {"Authorization": "Bearer sesame"}


@contextmanager
def serving(folder: Path, *args: str) -> Iterator[tuple[Running, httpx.Client]]:
    layout = str(write_layout(folder, ["local"]))
    running = Running(*args, "--layout", layout, "--kv-dir", "none", env={"SPLITINFER_API_KEY": "sesame"})
    try:
        said = running.sees(r"serving demo at (http://127.0.0.1:\d+)/v1, context 4,096 tokens, a key is needed")
        with httpx.Client(base_url=said[1], headers=KEY, timeout=60) as client:
            yield running, client
    finally:
        running.end()


class Stream(threading.Thread):
    """A long answer that is read beside; ``text`` so far."""

    def __init__(self, client: httpx.Client, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self._client, self._num_tokens = client, num_tokens
        self.start()

    def run(self) -> None:
        messages = [{"role": "user", "content": "Once upon a time"}]
        body = {"messages": messages, "max_tokens": self._num_tokens, "ignore_eos": True, "temperature": 0}
        with self._client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
            self.lines += (line for line in response.iter_lines() if line.startswith("data: "))

    @property
    def chunks(self) -> list[str]:
        found = [json.loads(line[6:]) for line in list(self.lines) if line != "data: [DONE]"]
        return [chunk["choices"][0]["delta"].get("content", "") for chunk in found if chunk.get("choices")]


def test_a_stream_outlives_a_lost_worker_and_sigterm(tmp_path: Path):
    with serving(tmp_path, "serve", "--port", "0", "--drain-seconds", "20") as (running, client):
        assert httpx.get(client.base_url.join("/v1/models")).status_code == 401
        undisturbed = Stream(client, 150)
        undisturbed.join(60)
        stream = Stream(client, 150)
        until(lambda: len(stream.lines) > 10, "it streams")
        running.children()[0].kill()
        until(lambda: client.get("/health").json()["status"] == "waiting", "its loss shows")
        health = client.get("/health")
        if health.status_code == 503:
            assert health.json()["reason"].startswith("requests wait for stage b")
        until(lambda: client.get("/health").status_code == 200, "it is back")
        running.signal(signal.SIGTERM)
        until(lambda: client.get("/health").json()["status"] == "draining", "it drains")
        stream.join(60)
        assert running.wait(30) == 143
    assert stream.lines[-1] == "data: [DONE]"
    assert "".join(stream.chunks) == "".join(undisturbed.chunks)
    assert "Once upon" not in running.err
    assert "sesame" not in running.err
    assert "POST /v1/chat/completions 200, " in running.err


def test_the_chat_and_the_server_share_an_engine(tmp_path: Path):
    with serving(tmp_path, "coord", "--chat", "--temp", "0", "--serve", "0") as (running, client):
        running.types("Hello\n")
        running.prints(r"\w")
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        assert client.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 4
        running.signal(signal.SIGINT)
        assert running.wait(10) == 130


def test_a_port_in_use_is_told_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        running = Running("serve", "--layout", "demo", "--port", str(port))
        try:
            assert running.wait(30) == 1
        finally:
            running.end()
    (sentence,) = running.complaints
    assert sentence.endswith(f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another port")
    assert "needs" not in running.err, "it was loaded"


def test_beyond_this_machine_keys_are_needed():
    running = Running("serve", "--layout", "demo", "--host", "0.0.0.0")
    try:
        assert running.wait(30) == 1
    finally:
        running.end()
    (sentence,) = running.complaints
    assert "whoever reaches 0.0.0.0 could use this server" in sentence
