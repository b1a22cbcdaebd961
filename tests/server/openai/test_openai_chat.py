"""Chat completions: what a request becomes, and what is written of an answer, piece by piece."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.engine.loop.requests import StreamEvent, TokenLogprobs
from splitinfer.llm.answer_parts import Apart
from splitinfer.server.answer import Answer, Choice, Piece, Usage, written
from splitinfer.server.anthropic.messages import CountRequest
from splitinfer.server.ask import Ask, AskedChat
from splitinfer.server.fields import read
from splitinfer.server.openai.chat import ChatRequest
from splitinfer.server.openai.chat_writer import ChatWriter
from splitinfer.server.openai.completions import CompletionRequest, CompletionWriter
from splitinfer.server.openai.responses import InputRequest
from splitinfer.server.problem import Problem
from splitinfer.server.stream import event as sse
from splitinfer.text.answer import AnswerFormat, ReasoningPart, TextPart, ToolCallPart
from tests.text.test_answer import CALL, OSLO, QWEN, TOOLS

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def request(**fields: Any) -> ChatRequest:
    return read(ChatRequest, {"messages": HELLO, **fields})


def asked(**fields: Any) -> Ask:
    (ask,) = request(**fields).asks()
    return ask


def chat(**fields: Any) -> AskedChat:
    return asked(**fields).prompt


# -- fields ----------------------------------------------------------------------------------------


def params(defaults: dict[str, Any] | None = None, **fields: Any) -> Any:
    return asked(**fields).params(Recommended(defaults or {}), room=1000)


def test_sampling():
    got = params(
        temperature=0.5, top_p=0.9, top_k=-1, seed=-1, stop="END", max_tokens=7, logprobs=True, top_logprobs=3,
        presence_penalty=1, frequency_penalty=-1, logit_bias={"5": -100}, min_p=0.1,
    )  # fmt: skip
    assert (got.temperature, got.top_p, got.top_k, got.seed, got.stop) == (0.5, 0.9, 0, None, ("END",))
    assert (got.max_tokens, got.logprobs, got.min_p) == (7, 3, 0.1)
    assert (got.presence_penalty, got.frequency_penalty, got.logit_bias) == (1, -1, ((5, -100.0),))
    ask = asked(n=3, seed=2**64 - 1)
    seeds = [ask.params(Recommended({}), 10, i).seed for i in range(ask.num_choices)]
    assert seeds == [2**64 - 1, 0, 1], "each choice has its own"


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"seed": -2}, "seed", None),
        ({"seed": 2**32 - 1}, "seed", None),  # llama.cpp's word for none
        ({"top_p": 0}, "top_p", 1e-30),
        ({"thinking_budget": -1}, "thinking_budget", None),
        ({"reasoning": {"max_tokens": -1}}, "thinking_budget", None),
        ({"max_tokens": -2}, "max_tokens", 1000),
    ],
)
def test_values_by_which_other_servers_say_nothing(fields: dict[str, Any], name: str, value: Any):
    assert getattr(params(**fields), name) == value


def test_what_is_not_given_is_the_models_or_the_apis():
    assert [params().temperature, params({"temperature": 0.6}).temperature] == [1.0, 0.6]
    assert params({"temperature": 0.6}, temperature=0).temperature == 0
    assert [params(max_tokens=most).max_tokens for most in (None, 32_000, 5)] == [1000, 1000, 5]  # agents ask for more
    assert params(max_tokens=5, max_completion_tokens=6).max_tokens == 6


def test_which_tools_may_be_called_changes_no_prompt():
    news = {"type": "function", "function": {"name": "news"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [WEATHER]}}
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, may, must in (
        ("auto", (news, WEATHER), False),
        ("none", (), False),
        ("required", (news, WEATHER), True),
        (allowed, (WEATHER,), False),
        (named, (WEATHER,), True),
    ):
        ask = asked(tools=[news, WEATHER], tool_choice=choice)
        assert ask.prompt == chat(tools=[news, WEATHER])
        assert (ask.tools, ask.must_call) == (may, must)
    assert asked(tools=[WEATHER], parallel_tool_calls=False).one_call
    with pytest.raises(Problem, match=r"^tool_choice.tools\[0\].name must be .*, not 'weather'$"):
        asked(tools=[news], tool_choice=allowed)


def test_a_schema_may_stand_beside_json_object():
    form = {"type": "json_object", "schema": {"type": "array"}}
    named = {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}
    assert params(response_format=form).grammar == params(response_format=named).grammar
    assert params(response_format={"type": "json_object"}).grammar != params(response_format=form).grammar


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, {}), ({"arguments": None}, {}), ({"arguments": "null"}, {}), ({"arguments": ""}, {}),
        ({"arguments": {"a": 1}}, {"a": 1}), ({"arguments": '{"a": "\\ud800"}'}, {"a": "\ufffd"}),
        ({"arguments": '{"a": "\\ud83d\\ude00 \\\\ud800"}'}, {"a": "\U0001f600 \\ud800"}),
        *(({"arguments": text}, text) for text in (
            '{"a": ', "[1]", '{"a": ' + "[" * 64 + "]" * 64 + "}", '{"a": NaN}', '{"a": 1e999}')),
    ],
)  # fmt: skip
def test_arguments_may_be_what_a_model_wrote(given: dict[str, Any], told: Any):
    turn = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "w", **given}}]}
    result = {"role": "tool", "tool_call_id": "a", "content": None}
    calls, empty = chat(messages=[turn, result]).messages
    assert calls["tool_calls"][0]["function"]["arguments"] == told
    assert empty["content"] == ""


def test_a_conversation_as_templates_take_it():
    call = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": '{"city": "Oslo"}'}}
    given = [
        {"role": "developer", "content": "Be brief."},
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
        {"role": "user", "content": "Weather?", "name": "ann"},
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    told = {**call, "function": {"name": "w", "arguments": {"city": "Oslo"}}}
    assert list(chat(messages=given).messages) == [
        {"role": "system", "content": "Be brief.\n\nBe \nkind."},
        {"role": "user", "content": "Weather?", "name": "ann"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [told]},
        {"role": "tool", "content": "sun", "tool_call_id": "c1"},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": "No."},
    ]


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_parts_are_joined_alike_in_all_apis(role: str):
    """The assistant's were one text of the model's; others' are lines."""
    parts, go = [{"type": "text", "text": text} for text in ("hello", "world")], {"role": "user", "content": "go"}
    result = {"tool_use_id": "1", "type": "tool_result", "content": parts}
    turns = [{"role": "user", "content": [result]}] if role == "tool" else [{"role": role, "content": parts}]
    more: dict[str, Any] = {"system": parts} if role == "system" else {}
    claude = read(CountRequest, {"messages": [*([] if more else turns), go], **more}).chat().messages
    one = {"role": role, "content": parts, **({"tool_call_id": "1"} if role == "tool" else {})}
    item = {"type": "function_call_output", "call_id": "1", "output": parts} if role == "tool" else one
    responses = read(InputRequest, {"input": [item, go]}).chat().messages
    told = [told[0]["content"] for told in (chat(messages=[one, go]).messages, claude, responses)]
    assert told == ["helloworld" if role == "assistant" else "hello\nworld"] * 3


# -- answers ---------------------------------------------------------------------------------------


def writer(model: str = "m", **fields: Any) -> ChatWriter:
    ids = iter(f"call_{i}" for i in range(9))
    spelled = {1: b"Hi", 2: "€".encode()[:1], 3: b"!"}
    head = "chatcmpl-1", 1_700_000_000, model, request(**fields)
    return ChatWriter(*head, lambda t: spelled[t], Answer(1), new_id=lambda: next(ids))


PIECES = [
    Piece(0, (ReasoningPart("Hm."),)),
    Piece(0, (TextPart("It "), ToolCallPart("weather", '{"city": "Oslo"}'))),
    Piece(0, (ToolCallPart("weather", "{}", "own_id"),), finish_reason="tool_calls"),
]


@pytest.mark.parametrize("fields", [{}, {"stream_options": {"include_usage": True}}, {"top_logprobs": 1}])
def test_what_is_written_is_the_chunks_whatever_the_text(fields: dict[str, Any]):
    """Text alone is written without building its chunk again."""
    quick, plain = (writer('"content":"" {"content":""}', stream=True, **fields) for _ in range(2))
    texts = ['"content":""', "\\", '"\\"', "\n\x00\u2028 é 🙂", "\ud800", "Hi"]
    pieces = [Piece(i % 2, (TextPart(text),)) for i, text in enumerate(texts)]
    pieces += [Piece(0, (TextPart("x"),), (TokenLogprobs(1, -0.1),)), Piece(1, (TextPart("end"),), (), "stop"), *PIECES]
    for piece in pieces:
        assert quick.written(piece) == b"".join(sse(chunk) for chunk in plain.chunks(piece))


def test_a_document_has_all_that_was_said():
    sent = json.dumps(writer().document(PIECES, Usage(12, 8, 5, 3, tried=9, right=4)))
    whole: Any = ChatCompletion.model_validate(json.loads(sent), strict=True)
    message = whole.choices[0].message
    assert (message.content, message.reasoning_content) == ("It ", "Hm.")
    assert [call.id for call in message.tool_calls or ()] == ["call_0", "own_id"]
    assert (whole.choices[0].finish_reason, whole.usage.total_tokens) == ("tool_calls", 17)
    assert whole.usage.splitinfer == {"drafts_tried": 9, "drafts_right": 4}


def test_logprobs_have_text_and_bytes_also_of_half_a_character():
    probabilities = (TokenLogprobs(1, -0.1, ((1, -0.1), (3, -2.0))), TokenLogprobs(2, -0.5, ((2, -0.5), (1, -1.0))))
    (chunk,) = writer(stream=True, top_logprobs=1).chunks(Piece(0, (TextPart("Hi"),), probabilities))
    checked = ChatCompletionChunk.model_validate(chunk, strict=True).choices[0].logprobs
    assert [(one.token, one.bytes, len(one.top_logprobs)) for one in checked.content or ()] == [
        ("Hi", [72, 105], 1),
        ("\ufffd", [0xE2], 1),
    ]


class Failing:
    usage, num_choices = Usage(1), 1

    async def batches(self) -> AsyncGenerator[list[Piece], None]:
        yield [Piece(0, (TextPart("On"),)), Piece(0, (TextPart("ce"),), (), "error", error="stage b is lost")]


COUNTED = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    "made",
    [
        writer(**COUNTED),
        CompletionWriter(
            "cmpl-1", 1, "m", read(CompletionRequest, {"prompt": "", **COUNTED}), {}.__getitem__, Answer(1)
        ),
    ],
    ids=["chat", "text"],
)
def test_an_answer_that_fails_has_no_reason_to_finish(made: Any):
    async def sent() -> list[str]:
        answer: Any = Failing()
        return [line async for part in written(answer, made) for line in part.decode().splitlines() if line]

    *chunks, failed, done = [line.removeprefix("data: ") for line in asyncio.run(sent())]
    assert done == "[DONE]"
    error = json.loads(failed)["error"]
    assert (error["message"], error["type"]) == ("stage b is lost", "server_error")
    choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    assert {choice["finish_reason"] for choice in choices} == {None}
    assert "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices) == "Once"


# -- one choice ------------------------------------------------------------------------------------


def event(text: str, reason: str | None = None) -> StreamEvent:
    return StreamEvent((1,), text, 0.0, reason, (TokenLogprobs(1, -1.0),))


NO_REQUEST: Any = None


class Told:
    """A choice, and what tells its text apart before it."""

    def __init__(self, *, stops: Sequence[str] = (), **more: Any) -> None:
        self.choice = Choice(0, NO_REQUEST, **more)
        self.apart = Apart(AnswerFormat(lambda _: QWEN, lambda _: "").parser((), TOOLS), stops)

    def read(self, came: StreamEvent) -> Piece | None:
        found = [self.apart.feed(came.text)]
        found += [self.apart.finish(is_cut=came.finish_reason != "stop")] if came.finish_reason else []
        parts = tuple(part for one in found for part in one.parts)
        return self.choice.read(replace(came, text="".join(one.text for one in found), parts=parts))


@pytest.mark.parametrize(
    ("texts", "reason", "one_call", "parts", "said"),
    [
        ([CALL], "stop", False, [OSLO], "tool_calls"),
        ([CALL], "length", False, [OSLO], "length"),
        ([CALL], "error", False, [OSLO], "error"),
        ([f"a{CALL}b{CALL}", "x"], "stop", True, [TextPart("a"), OSLO], "tool_calls"),  # one ends the answer
        (["<thi", "a"], "stop", False, [TextPart("<thia")], "stop"),
    ],
)
def test_how_an_answer_is_read(texts: list[str], reason: str, one_call: bool, parts: list[Any], said: str):
    read = Told(one_call=one_call)
    pieces = [piece for piece in (*map(read.read, map(event, texts)), read.read(event("", reason))) if piece]
    assert [part for piece in pieces for part in piece.parts] == parts
    assert (pieces[-1].finish_reason, read.choice.has_ended) == (said, True)
    if not one_call:
        assert len(pieces[0].logprobs) == len(texts), "probabilities come with the text they belong to"


def test_tokens_of_reasoning_are_counted_with_the_marker_before_it():
    read = Told()
    for text in ("a", "<think>", "b", "c", "</think>", "d", "e"):
        read.read(event(text))
    read.read(event("", "stop"))
    assert (read.choice.num_reasoning_tokens, read.choice.num_tokens) == (3, 8)
