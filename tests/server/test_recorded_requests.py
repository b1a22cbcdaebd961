"""What clients send is taken, and nothing in it is lost.

Agents were recorded, each in one task with one call of its shell: Codex 0.169, Claude Code 2.1.332 as its interactive
sessions ask, opencode 1.18.33 and Qwen Code 0.24.4; their texts and most of their tools are left out. The other bodies
are as these clients write them (Zed `crates/open_ai/src/open_ai.rs`; CodeCompanion in vllm-project/vllm #10463), or as
their packages serialise.
"""

import json
from pathlib import Path

import pytest

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.server.anthropic.messages import MessageRequest
from splitinfer.server.ask import AnswerRequest, Ask, AskedChat
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


def asked(client: str) -> tuple[Ask, AskedChat]:
    ask = read(MODELS[RECORDED[client]["path"]], RECORDED[client]["body"]).asks()[0]
    return ask, ask.prompt


EXPECTED: dict[str, tuple[list[str], list[str]]] = {
    "Codex": (["system", "user", "user"], ["exec_command", "multi_agent_v1__close_agent"]),
    "opencode": (["system", "user"], ["bash"]),
    "Claude Code": (["system", "user", "system"], ["Agent", "Bash", "DeferredToolPlaceholder"]),
    "Qwen Code": (["system", "user"], ["agent", "get_goal", "run_shell_command"]),
}


@pytest.mark.parametrize("agent", EXPECTED)
def test_the_model_is_told_of_everything(agent: str):
    for end, more in (("asks", []), ("hands the outcome back", ["assistant with a call", "tool"])):
        ask, chat = asked(f"{agent} {end}")
        roles = [f"{one['role']} with a call" if "tool_calls" in one else one["role"] for one in chat.messages]
        expected, tools = EXPECTED[agent]
        assert (roles, [tool["function"]["name"] for tool in chat.tools]) == ([*expected, *more], tools)
        assert all(one["content"] for one in chat.messages)
        assert not ask.one_call


@pytest.mark.parametrize("client", [name for name in RECORDED if not name.startswith((*EXPECTED,))])
def test_what_others_send_is_taken(client: str):
    ask, chat = asked(client)
    assert any(message["content"] == "Hello" for message in chat.messages)
    assert ask.params(Recommended({}), 1000)


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
