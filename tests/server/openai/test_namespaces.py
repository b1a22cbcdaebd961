"""Functions in namespaces: one name for the model, two for the client."""

import json
from typing import Any

import pytest

from splitinfer.server.answer import Piece, Usage
from splitinfer.server.ask import Chat
from splitinfer.server.openai.responses import Shape, response_ask
from splitinfer.server.openai.responses_writer import ResponseWriter
from splitinfer.server.problem import Problem
from splitinfer.text.answer import ToolCallPart


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": f"It is {name}.", **more}


CRM = {"type": "namespace", "name": "crm", "description": "Of customers.", "tools": [function("find"), function("add")]}


def asked(*tools: Any, **more: Any) -> tuple[Chat, Shape]:
    ask, shape = response_ask({"model": "m", "input": "Hello", "tools": list(tools), **more})
    assert isinstance(ask.prompt, Chat)
    return ask.prompt, shape


def test_the_model_is_told_of_each_function_by_one_name():
    chat, _ = asked(function("find"), CRM, {**CRM, "name": "mcp__files__", "description": ""})
    told = [tool["function"] for tool in chat.tools]
    assert [one["name"] for one in told] == ["find", "crm__find", "crm__add", "mcp__files__find", "mcp__files__add"]
    assert [one["description"] for one in told[1:4]] == ["Of customers.\n\nIt is find.", "It is add.", "It is find."]


def test_a_call_goes_out_with_both_names_and_comes_back_with_them():
    _, shape = asked(function("find"), CRM)
    writer = ResponseWriter("resp_1", 0, shape, lambda _: b"", lambda prefix: f"{prefix}_1")
    calls = Piece(0, (ToolCallPart("crm__add", '{"a": 1}'), ToolCallPart("find", "{}")), finish_reason="tool_calls")
    inside, plain = writer.document([calls], Usage(1, 0, 1))["output"]
    assert (inside["namespace"], inside["name"]) == ("crm", "add")
    assert (plain.get("namespace"), plain["name"]) == (None, "find")
    back, _ = asked(CRM, input=[inside, {"type": "function_call_output", "call_id": inside["call_id"], "output": "ok"}])
    assert back.messages[0]["tool_calls"][0]["function"] == {"name": "crm__add", "arguments": {"a": 1}}


def test_an_answer_repeats_the_tools_as_they_were_given():
    _, shape = asked(CRM, {"type": "web_search"})
    (repeated,) = shape.said["tools"]
    assert json.loads(json.dumps(repeated))["tools"][1]["name"] == "add"
    assert repeated["description"] == "Of customers."


@pytest.mark.parametrize(
    ("tool", "sentence"),
    [
        ({**CRM, "tools": "all"}, "tools[1].tools must be a list"),
        ({**CRM, "tools": [{"type": "function"}]}, "tools[1].tools[0].name must be text"),
        ({**CRM, "name": None}, "tools[1].name must be text"),
        (function("crm__find"), "two tools are called 'crm__find'"),
    ],
)
def test_what_is_wrong_is_said(tool: Any, sentence: str):
    with pytest.raises(Problem) as caught:
        asked(CRM, tool)
    assert str(caught.value).startswith(sentence)
