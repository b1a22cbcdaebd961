"""Messages: every field's fate, conversations for templates, and what an answer ends with."""

from types import SimpleNamespace
from typing import Any

import pytest

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.server.answer import Piece, Usage
from splitinfer.server.anthropic.messages import CountRequest, MessageRequest
from splitinfer.server.anthropic.writer import SIGNATURE, MessageWriter
from splitinfer.server.ask import Ask, AskedChat
from splitinfer.server.fields import read
from splitinfer.server.problem import Problem
from splitinfer.text.answer import ReasoningPart, TextPart, ToolCallPart

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {"name": "weather", "description": "Tells it.", "input_schema": {"type": "object"}}


def ask(**fields: Any) -> Ask:
    return read(MessageRequest, {"model": "m", "max_tokens": 9, "messages": HELLO, **fields}).asks()[0]


def chat(**fields: Any) -> AskedChat:
    return ask(**fields).prompt


def test_a_thread_is_refused_so_that_clients_do_without_one():
    with pytest.raises(Problem, match=r"^thread is not supported: nothing is stored here") as refused:
        ask(thread={"type": "create"})
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert refused.value.anthropic()["error"]["details"] == details


def test_sampling():
    got = ask(temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["END"]).params(Recommended({}), 100)
    assert (got.max_tokens, got.temperature, got.top_p, got.top_k, got.stop) == (9, 0.5, 0.9, 5, ("END",))
    got = ask(seed=3, min_p=0.1, stop="A", stop_sequences=["B"]).params(Recommended({}), 100)
    assert (got.seed, got.min_p, got.stop) == (3, 0.1, ("A", "B"))


def test_a_conversation_as_templates_take_it():
    text = {"type": "text", "text": "part"}
    given = chat(
        system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                {"type": "tool_result", "tool_use_id": "t3", "content": [{"type": "tool_reference", "tool_name": "w"}]},
                {"type": "text", "text": "And?"},
                {"type": "document", "title": "T", "source": {"type": "text", "data": "whole"}},
                {"type": "document", "source": {"type": "content", "content": [text]}},
                {"type": "search_result", "title": "S", "source": "u", "content": [text]}]},
        ],
    )  # fmt: skip
    calls = [
        {"id": name, "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for name, arguments in (("t1", {"city": "Oslo"}), ("t2", {}))
    ]
    assert list(given.messages) == [
        {"role": "system", "content": "Be kind.\n\nBe brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "sun"},
        {"role": "tool", "tool_call_id": "t2", "content": "error"},
        {"role": "tool", "tool_call_id": "t3", "content": "w"},
        {"role": "user", "content": "And?\nT\nwhole\npart\nS\nu\npart"},
    ]


def test_tools_are_told_in_the_form_that_templates_know():
    theirs = {"type": "web_search_20250305", "name": "web_search"}
    function = {"name": "weather", "description": "Tells it.", "parameters": {"type": "object"}}
    assert chat(tools=[WEATHER, theirs]).tools == ({"type": "function", "function": function},)
    assert ask(tools=[WEATHER], tool_choice={"type": "none"}).tools == ()
    assert ask(tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).one_call


# -- what the system says and changes in the middle of a conversation ------------------------------

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
A, B, C = ({"name": name, "description": "", "input_schema": {"type": "object"}} for name in "abc")


def talk(*messages: Any, **more: Any) -> AskedChat:
    return chat(messages=list(messages), tools=[A, B], **more)


def names(asked: AskedChat) -> list[str]:
    return [tool["function"]["name"] for tool in asked.tools]


def system(*blocks: Any, **more: Any) -> dict[str, Any]:
    return {"role": "system", "content": list(blocks), **more}


def change(kind: str, name: str) -> dict[str, Any]:
    return {"type": f"tool_{kind}", "tool": {"type": "tool_reference", "name": name}}


def addition(tool: Any) -> dict[str, Any]:
    return {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool}}


def test_its_words_stand_where_they_stood_and_those_for_one_question_are_gone_at_the_next():
    text = {"type": "text", "text": "It is May.", "cache_control": {"type": "ephemeral"}}
    said = [(one["role"], one["content"]) for one in talk(USER, system(text)).messages]
    assert said == [("user", "Hi"), ("system", "It is May.")]
    for clear_at, left in (("never", 4), ("next_user_message", 3)):
        brief = system({"type": "text", "text": "Be brief."}, clear_at=clear_at)
        assert [one["content"] for one in talk(USER, brief).messages] == ["Hi", "Be brief."]
        assert len(talk(USER, brief, ANSWER, USER).messages) == left


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
        found = talk(USER, *turns)
        assert names(found) == left
        assert [one["role"] for one in found.messages] == ["user"]  # a change says nothing


def test_the_last_effort_counts():
    low, high = (system({"type": "text", "text": "."}, output_config={"effort": effort}) for effort in ("low", "high"))
    config = {"effort": "medium"}
    assert talk(USER, output_config=config).options["reasoning_effort"] == "medium"
    assert talk(USER, high, ANSWER, USER, low, output_config=config).options["reasoning_effort"] == "low"


# -- answers ---------------------------------------------------------------------------------------

PIECES = [
    Piece(0, (ReasoningPart("H"),)),
    Piece(0, (ReasoningPart("m."), TextPart("It "))),
    Piece(0, (TextPart("is."), ToolCallPart("weather", '{"city": "Oslo"}'), ToolCallPart("weather", "{}", "own"))),
    Piece(0, (), finish_reason="tool_calls"),
]


def writer() -> MessageWriter:
    ids = iter(f"toolu_{i}" for i in range(9))
    return MessageWriter("msg_1", "m", lambda: next(ids))


def test_a_message_has_its_calls_and_counts_its_tokens():
    answer: Any = SimpleNamespace(usage=Usage(12, 8))
    assert b'"cache_read_input_tokens":8' in writer().begin(answer)
    message = writer().document(PIECES, Usage(12, 8, 5))
    assert [block["id"] for block in message["content"][2:]] == ["toolu_0", "own"]
    assert message["usage"] == {
        "input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 8, "output_tokens": 5,
        "output_tokens_details": {"thinking_tokens": 0}, "service_tier": "standard",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("last", "reason", "stop"),
    [
        (Piece(0, finish_reason="stop"), "end_turn", None),
        (Piece(0, finish_reason="length"), "max_tokens", None),
        (Piece(0, finish_reason="stop", stop="END"), "stop_sequence", "END"),
        (Piece(0, finish_reason="abort"), "max_tokens", None),
    ],
)
def test_reasons(last: Piece, reason: str, stop: str | None):
    message = writer().document([last], Usage(1))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)


def test_thinking_is_signed_as_clients_keep_no_other():
    message = writer()
    (*_, signed, _, _, _) = [data for piece in PIECES[:2] for data in message.events(piece)]
    assert signed["delta"] == {"type": "signature_delta", "signature": SIGNATURE}


def test_what_a_newer_client_says_of_display_shows_thinking_and_is_told():
    ignored: dict[str, None] = {}
    thinking = {"type": "adaptive", "display": "updates"}
    asked = read(MessageRequest, {"max_tokens": 9, "messages": HELLO, "thinking": thinking}, ignored)
    assert (asked.hides_thinking, [*ignored]) == (False, ["display"])


def test_what_concerns_the_answer_alone_is_no_matter_where_tokens_are_counted():
    ignored: dict[str, None] = {}
    body = {"messages": HELLO, "max_tokens": 9, "temperature": 1, "stop_sequences": ["a"]}
    assert read(CountRequest, body, ignored).chat() == chat()
    assert [*ignored] == ["max_tokens", "temperature", "stop_sequences"]


def test_thinking_may_be_left_out():
    thinking = {"type": "adaptive", "display": "omitted"}
    asked = read(MessageRequest, {"max_tokens": 9, "messages": HELLO, "thinking": thinking})
    message = MessageWriter("msg_1", "m", hides_thinking=asked.hides_thinking)
    streamed = [data for piece in PIECES for data in message.events(piece)]
    begun = [data["content_block"] for data in streamed if data["type"] == "content_block_start"]
    for blocks in (message.document(PIECES, Usage(1))["content"], begun):
        assert [block["type"] for block in blocks] == ["text", "tool_use", "tool_use"]
