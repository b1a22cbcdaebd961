"""What the system says and changes in the middle of a conversation."""

from typing import Any

import pytest

from splitinfer.server.anthropic.messages import MessageRequest
from splitinfer.server.ask import Chat
from splitinfer.server.fields import read

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
A, B, C = ({"name": name, "description": "", "input_schema": {"type": "object"}} for name in "abc")


def chat(*messages: Any, **more: Any) -> Chat:
    body = {"model": "m", "max_tokens": 9, "messages": list(messages), "tools": [A, B], **more}
    (ask,) = read(MessageRequest, body).asks()
    assert isinstance(ask.prompt, Chat)
    return ask.prompt


def names(asked: Chat) -> list[str]:
    return [tool["function"]["name"] for tool in asked.tools]


def system(*blocks: Any, **more: Any) -> dict[str, Any]:
    return {"role": "system", "content": list(blocks), **more}


def change(kind: str, name: str) -> dict[str, Any]:
    return {"type": f"tool_{kind}", "tool": {"type": "tool_reference", "name": name}}


def addition(tool: Any) -> dict[str, Any]:
    return {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool}}


def test_its_words_stand_where_they_stood_and_those_for_one_question_are_gone_at_the_next():
    text = {"type": "text", "text": "It is May.", "cache_control": {"type": "ephemeral"}}
    said = [(one["role"], one["content"]) for one in chat(USER, system(text)).messages]
    assert said == [("user", "Hi"), ("system", "It is May.")]
    for clear_at, left in (("never", 4), ("next_user_message", 3)):
        brief = system({"type": "text", "text": "Be brief."}, clear_at=clear_at)
        assert [one["content"] for one in chat(USER, brief).messages] == ["Hi", "Be brief."]
        assert len(chat(USER, brief, ANSWER, USER).messages) == left


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ([], ["a", "b"]),
        ([change("removal", "a")], ["b"]),
        ([change("removal", "a"), change("addition", "a")], ["b", "a"]),
        ([addition(C)], ["a", "b", "c"]),
        ([addition(C), change("removal", "c"), change("addition", "c")], ["a", "b", "c"]),
        ([change("addition", "a"), change("addition", "unheard"), change("removal", "unheard")], ["a", "b"]),
        ([addition({"type": "web_search_20250305", "name": "web_search"})], ["a", "b"]),
    ],
)
def test_the_model_is_told_of_the_tools_that_there_are_then(changes: list[Any], left: list[str]):
    for turns in ([system(*changes)], [system(one) for one in changes]):
        found = chat(USER, *turns)
        assert names(found) == left
        assert [one["role"] for one in found.messages] == ["user"]  # a change says nothing


def test_the_last_effort_counts():
    low, high = (system({"type": "text", "text": "."}, output_config={"effort": effort}) for effort in ("low", "high"))
    config = {"effort": "medium"}
    assert chat(USER, output_config=config).options["reasoning_effort"] == "medium"
    assert chat(USER, high, ANSWER, USER, low, output_config=config).options["reasoning_effort"] == "low"
