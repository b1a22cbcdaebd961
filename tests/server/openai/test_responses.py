"""Responses: what a request becomes, and items as conversations."""

import typing
from typing import Any

import pytest
from openai.types.responses.response_includable import ResponseIncludable

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.server.ask import Ask, AskedChat
from splitinfer.server.fields import read
from splitinfer.server.openai.responses import ResponseRequest, packed
from splitinfer.server.problem import Problem

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
TOLD = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}, "strict": False}}


def request(**fields: Any) -> ResponseRequest:
    return read(ResponseRequest, {"input": "Hello", **fields})


def ask(**fields: Any) -> Ask:
    return request(**fields).asks()[0]


def chat(**fields: Any) -> AskedChat:
    return ask(**fields).prompt


def test_a_choice_may_allow_some_of_the_functions():
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    given = {"tools": [{"type": "function", "name": "news", "parameters": {}}, WEATHER], "tool_choice": choice}
    assert ask(**given).tools == (TOLD,)
    assert request(**given).said(Recommended({}))["tool_choice"] == choice
    with pytest.raises(Problem, match=r"^tool_choice.tools\[0\].name must be the name of one"):
        ask(tools=[], tool_choice=choice)


def test_functions_in_namespaces_are_told_by_one_name_and_called_by_two():
    tools = [{"type": "namespace", "name": "mcp__docs__", "description": "d", "tools": [WEATHER, {"type": "custom"}]}]
    call = {"type": "function_call", "call_id": "c", "name": "weather", "namespace": "mcp__docs__", "arguments": "{}"}
    wanted = ask(tools=[*tools, WEATHER], input=[{"role": "user", "content": "?"}, call])
    assert [tool["function"]["name"] for tool in wanted.prompt.tools] == ["mcp__docs__weather", "weather"]
    assert wanted.prompt.messages[-1]["tool_calls"][0]["function"]["name"] == "mcp__docs__weather"


def test_sampling():
    given = {"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 7, "top_logprobs": 3, "seed": 1}
    wanted = request(**given, include=[*typing.get_args(ResponseIncludable)])
    got = wanted.asks()[0].params(Recommended({}), 100)
    assert (got.temperature, got.top_p, got.max_tokens, got.logprobs, got.seed) == (0.5, 0.9, 7, 3, 1)
    assert wanted.num_top == 3
    usual = ask().params(Recommended({}), 100)
    assert (usual.logprobs, usual.max_tokens) == (None, 100)


def test_functions_are_told_and_other_kinds_of_tools_left_out():
    tools = [{"type": "web_search"}, WEATHER, {"type": "custom", "name": "apply_patch", "format": {}}]
    assert chat(tools=tools).tools == (TOLD,)
    assert ask(tools=tools, tool_choice="none").tools == ()
    assert ask(tools=tools, parallel_tool_calls=False).one_call
    assert not ask(tools=tools).one_call


def test_items_as_templates_take_them():
    given = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "w", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "c2", "name": "w", "arguments": "{oops"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"},
        {"type": "message", "role": "assistant", "content": "Sun."},
        {"role": "user", "content": ""},
    ]  # fmt: skip

    def call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert list(chat(instructions="Be kind.", input=given).messages) == [
        {"role": "system", "content": "Be kind.\n\nBe brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.",
         "tool_calls": [call("c1", "w", {"city": "Oslo"}), call("c2", "w", "{oops")]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain"},
        {"role": "assistant", "content": "", "tool_calls": [call("c3", "patch", {"input": "*** Begin"})]},
        {"role": "tool", "tool_call_id": "c3", "content": "done"},
        {"role": "assistant", "content": "Sun."},
        {"role": "user", "content": ""},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({"content": [{"type": "reasoning_text", "text": "é"}], "encrypted_content": packed("other")}, "é"),
        ({"content": None, "encrypted_content": packed("é\n")}, "é\n"),
        ({"summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": "gAAAA of others"}, "short"),
        ({"summary": [], "encrypted_content": "splitinfer-1:no base64!"}, None),
        ({"summary": [], "encrypted_content": "splitinfer-1:/w=="}, None),
    ],
)
def test_reasoning_comes_back_in_either_form(fields: dict[str, Any], reasoning: str | None):
    items = [{"role": "user", "content": "?"}, {"type": "reasoning", "id": "rs", "summary": [], **fields}]
    (_, turn) = chat(input=items).messages
    assert turn.get("reasoning_content") == reasoning
