"""`splitinfer serve` and `coord --serve` as processes: the requests of agents, a chat beside, a port that is taken.

What a server does when a worker is lost is in ``test_recovery.py``.
"""

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import scripted
from campaigns.asking import text_of
from processes import ROOT, Running, worker, write_layout

from splitinfer.demo import DEMO_MODELS

RECORDED = {
    each["client"]: each for each in json.loads((ROOT / "tests" / "server" / "recorded_requests.json").read_text())
}
TOOLS = {"Codex": "exec_command", "opencode": "bash", "Claude Code": "Bash", "Qwen Code": "run_shell_command"}
LAST_WORDS = "The tests passed."


@contextmanager
def serving(*args: str) -> Iterator[tuple[Running, httpx.Client]]:
    with Running(*args, "--kv-dir", "none", env={"SPLITINFER_API_KEY": "sesame"}) as running:
        url = running.sees(r"serving \S+ at (http://127.0.0.1:\d+)/v1, .* a key is needed")[1]
        with httpx.Client(base_url=url, headers={"Authorization": "Bearer sesame"}, timeout=120) as client:
            yield running, client


@pytest.fixture(scope="module")
def agents_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, httpx.Client]]:
    """A model that calls an agent's shell and, once it has the outcome, says its last words; cut in two."""
    folder = tmp_path_factory.mktemp("agents")
    scripts = {tool: [scripted.call(tool, command="make test"), LAST_WORDS] for tool in TOOLS.values()}
    model = scripted.save(folder / "scripted", scripts)
    layout = write_layout(folder, ["local"], str(model), layers=scripted.LAYERS)
    with serving("serve", "--layout", str(layout), "--port", "0", "--context", "16384") as running:
        yield running


def events(client: httpx.Client, request: str) -> list[dict[str, Any]]:
    """What a recorded request is answered, which all agents want as a stream."""
    recorded = RECORDED[request]
    with client.stream("POST", recorded["path"], json=recorded["body"]) as response:
        assert response.status_code == 200, response.read()
        return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]


def arguments(event: dict[str, Any]) -> str:
    """What an event adds to the arguments of a call."""
    match event:
        case {"choices": [{"delta": {"tool_calls": calls}}]}:
            return "".join(call["function"].get("arguments") or "" for call in calls)
        case {"type": "response.function_call_arguments.delta", "delta": text} | {"delta": {"partial_json": text}}:
            return str(text)
    return ""


@pytest.mark.parametrize("client", TOOLS)
def test_an_agent_is_given_a_call_and_after_its_outcome_an_answer(
    client: str, agents_server: tuple[Running, httpx.Client]
):
    """Two turns, as they were recorded: the second one carries what the tool had to say."""
    running, connection = agents_server
    called = events(connection, f"{client} asks")
    first = json.dumps(called)
    assert f'"name": "{TOOLS[client]}"' in first
    assert json.loads("".join(map(arguments, called))) == {"command": "make test"}
    assert any(end in first for end in ('"tool_calls"', '"tool_use"', '"function_call"')), first
    assert "".join(map(text_of, events(connection, f"{client} hands the outcome back"))) == LAST_WORDS
    assert "sesame" not in running.err


@pytest.mark.nightly
def test_the_chat_and_the_server_share_an_engine(tmp_path: Path):
    layout = str(write_layout(tmp_path, ["local"]))
    with serving("coord", "--layout", layout, "--chat", "--temp", "0", "--serve", "0") as (running, client):
        running.types("Hello\n")
        running.prints(r"\w")
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        assert client.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 4
        running.signal(signal.SIGINT)
        assert running.wait(10) == 130


def test_two_layouts_take_turns_on_one_worker(tmp_path: Path):
    """As ``--also`` has it, whoever asks for them."""
    with worker() as there:
        one = write_layout(tmp_path, [there.address], "demo", 12)
        other = write_layout(tmp_path, [there.address], str(DEMO_MODELS["demo-draft"]), 2)
        with serving("serve", "--port", "0", "--layout", str(one), "--also", f"small={other}") as (running, client):
            said = []
            for model in ("demo", "small", "demo"):
                body = {"model": model, "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
                said.append(client.post("/v1/completions", json=body).json()["choices"][0]["text"])
            assert said[0] == said[2] != said[1]
            assert "small is unloaded" in running.err


def test_a_port_in_use_is_told_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Running("serve", "--layout", "demo", "--port", str(port)) as running:
            assert running.wait(30) == 1
    (sentence,) = running.complaints
    assert sentence.endswith(f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another port")
    assert "needs" not in running.err, "it was loaded"
