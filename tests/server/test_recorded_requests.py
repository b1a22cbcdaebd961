"""What clients send is taken, and nothing in it is lost.

Agents were recorded, each in one task with one call of its shell: Codex 0.169, Claude Code 2.1.330, opencode 1.18.33
and Qwen Code 0.24.4; their texts and most of their tools are left out. The other bodies are as these clients write them
(Zed `crates/open_ai/src/open_ai.rs`; CodeCompanion in vllm-project/vllm #10463), or as their packages serialise.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from splitinfer.server.anthropic.messages import MessageRequest
from splitinfer.server.ask import AnswerRequest, Ask, Chat
from splitinfer.server.fields import read
from splitinfer.server.openai.chat import ChatRequest
from splitinfer.server.openai.responses import ResponseRequest
from splitinfer.text.turns import Form, fitting, in_order
from tests.text.templates import SHAPES, writer

RECORDED = {
    one["client"]: one
    for name in ("recorded_requests.json", "written_requests.json")
    for one in json.loads(Path(__file__).with_name(name).read_text("utf-8"))
}
MODELS: dict[str, type[AnswerRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponseRequest,
    "/v1/messages": MessageRequest,
}


def asked_of(path: str, body: dict[str, Any]) -> Ask:
    return read(MODELS[path], body).asks()[0]


def asked(client: str) -> tuple[Ask, Chat]:
    ask = asked_of(RECORDED[client]["path"], RECORDED[client]["body"])
    assert isinstance(ask.prompt, Chat)
    return ask, ask.prompt


ASSISTANT, TOOL = "assistant with a call", "tool"
EXPECTED: dict[str, tuple[list[str], list[str]]] = {
    "Codex asks": (["system", "user", "user"], ["exec_command", "multi_agent_v1__close_agent"]),
    "Codex hands the outcome back": (
        ["system", "user", "user", ASSISTANT, TOOL], ["exec_command", "multi_agent_v1__close_agent"],
    ),
    "opencode asks for a title": (["system", "user", "user"], []),
    "opencode asks": (["system", "user"], ["bash"]),
    "opencode hands the outcome back": (["system", "user", ASSISTANT, TOOL], ["bash"]),
    "Claude Code asks": (["system", "user", "system"], ["Agent", "Bash", "DeferredToolPlaceholder"]),
    "Claude Code hands the outcome back": (
        ["system", "user", "system", ASSISTANT, TOOL], ["Agent", "Bash", "DeferredToolPlaceholder"],
    ),
    "Qwen Code asks": (["system", "user"], ["agent", "get_goal", "run_shell_command"]),
    "Qwen Code hands the outcome back": (
        ["system", "user", ASSISTANT, TOOL], ["agent", "get_goal", "run_shell_command"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("client", EXPECTED)
def test_the_model_is_told_of_everything(client: str):
    ask, chat = asked(client)
    roles = [f"{one['role']} with a call" if "tool_calls" in one else one["role"] for one in chat.messages]
    assert (roles, [tool["function"]["name"] for tool in chat.tools]) == EXPECTED[client]
    assert all(one["content"] for one in chat.messages)
    assert not ask.one_call


@pytest.mark.parametrize("client", sorted(RECORDED.keys() - EXPECTED.keys()))
def test_what_others_send_is_taken(client: str):
    _, chat = asked(client)
    assert any(message["content"] == "Hello" for message in chat.messages)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("client", RECORDED)
def test_every_template_gets_all_of_it(client: str, shape: str):
    chat = asked(client)[1]
    form, text = fitting(Form(tuple(in_order(chat.messages)), tuple(chat.tools)), writer(shape))
    names = [tool["function"]["name"] for tool in chat.tools]
    contents = [json.dumps(one["content"].strip(), ensure_ascii=False)[1:-1] for one in chat.messages]
    found = json.dumps(text, ensure_ascii=False).replace("\\\\", "\\")
    assert not [one for one in (*names, *contents) if one not in found and one not in text]
    if (before := client.replace("hands the outcome back", "asks")) != client:
        asks = asked(before)[1]
        first, _ = fitting(Form(tuple(asks.messages), tuple(asks.tools)), writer(shape))
        assert form.messages[: len(first.messages)] == first.messages
