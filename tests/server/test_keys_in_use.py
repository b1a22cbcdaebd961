"""Keys while requests are under way: changed under a stream, limits under many at once, sessions."""

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from mutating import TALE
from processes import until

from splitinfer.llm import LLM
from splitinfer.server.gate import SESSION_COOKIE, Gate
from splitinfer.server.key_file import FollowedKeys, add_key, remove_key
from splitinfer.server.running import Listen, Server
from splitinfer.server.service import Service

LONG = {"messages": TALE, "max_tokens": 2000, "ignore_eos": True, "stream": True}
CHAT, AT_MOST = "/v1/chat/completions", 60.0


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


@pytest.fixture
def laptop(keys: Path) -> str:
    return add_key(keys, "laptop", concurrent=3)


@pytest.fixture
def server(llm: LLM, keys: Path, laptop: str) -> Iterator[Server]:
    assert laptop
    server = Server(Service(llm, "demo", Gate(keys=FollowedKeys(keys))), Listen(port=0))
    yield server
    server.close()


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=AT_MOST) as client:
        yield client


def shows(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_key_that_is_changed_under_a_stream(client: httpx.Client, server: Server, keys: Path, laptop: str):
    """What was admitted goes on to its end; nothing more is; the new key is at once, under the same limits."""
    with client.stream("POST", CHAT, json={**LONG, "max_tokens": 300}, headers=shows(laptop)) as response:
        lines = response.iter_lines()
        next(lines)
        remove_key(keys, "laptop")
        assert client.get("/v1/models", headers=shows(laptop)).status_code == 401
        assert client.get("/health").json()["running"] == 1
        again = add_key(keys, "laptop", concurrent=1)
        assert client.get("/v1/models", headers=shows(again)).status_code == 200
        assert client.post(CHAT, json=LONG, headers=shows(again)).status_code == 429, "the old one's stream counts"
        assert [line for line in lines if line][-1] == "data: [DONE]"
    until(lambda: server.service.num_running == 0, "it is over")
    short = {"messages": TALE, "max_tokens": 1}
    assert client.post(CHAT, json=short, headers=shows(again)).status_code == 200


def test_no_more_at_once_than_a_key_may_however_many_ask(client: httpx.Client, server: Server, laptop: str):
    statuses, all_asked, enough = list[int](), threading.Barrier(12), threading.Event()

    def ask() -> None:
        all_asked.wait(AT_MOST)
        with client.stream("POST", CHAT, json=LONG, headers=shows(laptop)) as response:
            statuses.append(response.status_code)
            enough.wait(AT_MOST)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    until(lambda: len(statuses) == 12, "all have their answer")
    assert sorted(statuses) == [200] * 3 + [429] * 9
    assert client.post(CHAT, json={**LONG, "n": 4}, headers=shows(laptop)).status_code == 400
    enough.set()
    for thread in threads:
        thread.join(AT_MOST)
    until(lambda: server.service.num_running == 0, "all are over")


def test_a_session_has_a_name_that_nobody_chose(client: httpx.Client, laptop: str):
    """Whoever could set a cookie before the key was shown must not know the session's name."""
    chosen = {"Cookie": f"{SESSION_COOKIE}=chosen"}
    assert client.get("/v1/models", headers=chosen).status_code == 401
    bought = client.post("/session", json={}, headers={**shows(laptop), **chosen})
    assert "chosen" not in bought.headers["set-cookie"]
    client.cookies.clear()
    assert client.get("/v1/models", headers=chosen).status_code == 401
