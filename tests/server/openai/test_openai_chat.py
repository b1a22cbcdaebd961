"""Chat completions: every field's fate, conversations for templates, and documents that the official types accept."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.engine.coordinator.requests import StreamEvent, TokenLogprobs
from splitinfer.server.answer import ChoiceReader, Piece
from splitinfer.server.ask import Ask, Chat
from splitinfer.server.fields import read
from splitinfer.server.openai.chat import ChatRequest, chat_ask
from splitinfer.server.openai.chat_writer import ChatWriter, Shape
from splitinfer.server.openai.completions import Completions, CompletionWriter
from splitinfer.server.openai.routes import _events
from splitinfer.server.problem import Problem
from splitinfer.server.spans import Usage
from splitinfer.server.stream import event as sse
from splitinfer.text.answer import ReasoningPart, TextPart, ToolCallPart

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def ask(**fields: Any) -> Ask:
    return chat_ask(read(ChatRequest, {"model": "m", "messages": HELLO, **fields}))[0]


def messages_of(given: list[dict[str, Any]]) -> Any:
    prompt = ask(messages=given).prompt
    assert isinstance(prompt, Chat)
    return prompt.messages


# -- fields ----------------------------------------------------------------------------------------


def params(**fields: Any) -> Any:
    return ask(**fields).params(Recommended({}), room=1000)


def test_sampling():
    got = params(
        temperature=0.5, top_p=0.9, top_k=-1, seed=-1, stop="END", max_tokens=7, logprobs=True, top_logprobs=3,
        presence_penalty=1, frequency_penalty=-1, logit_bias={"5": -100}, min_p=0.1,
    )  # fmt: skip
    assert (got.temperature, got.top_p, got.top_k, got.seed, got.stop) == (0.5, 0.9, 0, 2**64 - 1, ("END",))
    assert (got.max_tokens, got.logprobs, got.min_p) == (7, 3, 0.1)
    assert (got.presence_penalty, got.frequency_penalty, got.logit_bias) == (1, -1, ((5, -100.0),))


def test_what_is_not_given_is_the_models_or_the_apis():
    assert params().temperature == 1.0
    assert ask().params(Recommended({"temperature": 0.6}), 10).temperature == 0.6
    assert ask(temperature=0).params(Recommended({"temperature": 0.6}), 10).temperature == 0
    assert params().max_tokens == 1000
    assert params(max_tokens=32_000).max_tokens == 1000  # agents ask for more than there is room for
    assert params(max_tokens=5, max_completion_tokens=6).max_tokens == 6


def test_choices_have_seeds_of_their_own():
    asked = ask(n=3, seed=2**64 - 1)
    assert [asked.params(Recommended({}), 10, i).seed for i in range(asked.num_choices)] == [2**64 - 1, 0, 1]


def test_a_value_out_of_range_is_a_400_that_names_it():
    with pytest.raises(Problem, match="top_p must be over 0 and at most 1, not 2") as caught:
        params(top_p=2)
    assert (caught.value.status, caught.value.param) == (400, "top_p")


def test_tools_are_told_unless_none_shall_be_called():
    assert ask(tools=[WEATHER]).prompt.tools == (WEATHER,)  # type: ignore[union-attr]
    assert ask(tools=[WEATHER], tool_choice="none").prompt.tools == ()  # type: ignore[union-attr]
    assert ask(tools=[WEATHER], parallel_tool_calls=False).one_call


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        (
            {"reasoning_effort": "high", "verbosity": "low"},
            {"reasoning_effort": "high", "enable_thinking": True, "verbosity": "low"},
        ),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"enable_thinking": False, "x": 1}}, {"enable_thinking": False, "x": 1}),
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
            {"enable_thinking": False, "reasoning_effort": "low"},
        ),
    ],
)
def test_how_much_to_reason_reaches_the_template(fields: dict[str, Any], options: dict[str, Any]):
    prompt = ask(**fields).prompt
    assert isinstance(prompt, Chat)
    assert prompt.options == options


# -- conversations ---------------------------------------------------------------------------------


def test_a_conversation_as_templates_take_it():
    given = [
        {"role": "developer", "content": "Be brief."},
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
        {"role": "user", "content": "Weather?", "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Hm.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "w", "arguments": '{"city": "Oslo"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": {"city": "Oslo"}}}
    assert list(messages_of(given)) == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "Weather?", "name": "ann"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "sun", "tool_call_id": "c1"},
    ]


def told(**fields: Any) -> Chat:
    prompt = ask(**fields).prompt
    assert isinstance(prompt, Chat)
    return prompt


def test_a_choice_may_allow_some_of_the_tools():
    news = {"type": "function", "function": {"name": "news"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [WEATHER]}}
    assert told(tools=[news, WEATHER], tool_choice=choice).tools == (WEATHER,)
    with pytest.raises(
        Problem, match=r"^tool_choice.allowed_tools.tools\[0\].name must be the name .*, not 'weather'$"
    ):
        ask(tools=[news], tool_choice=choice)


def test_a_refusal_is_what_was_said():
    (message,) = messages_of([{"role": "assistant", "content": None, "refusal": "No."}])
    assert message == {"role": "assistant", "content": "No."}
    (message,) = messages_of([{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}])
    assert message == {"role": "assistant", "content": "No."}


# -- answers ---------------------------------------------------------------------------------------


def writer(**shape: Any) -> ChatWriter:
    ids = iter(f"call_{i}" for i in range(9))
    spelled = {1: b"Hi", 2: "€".encode()[:1], 3: b"!"}
    return ChatWriter("chatcmpl-1", 1_700_000_000, Shape("m", **shape), lambda t: spelled[t], lambda: next(ids))


PIECES = [
    Piece(0, (ReasoningPart("Hm."),)),
    Piece(0, (TextPart("It "), ToolCallPart("weather", '{"city": "Oslo"}'))),
    Piece(0, (ToolCallPart("weather", "{}", "own_id"),), finish_reason="tool_calls"),
]


@pytest.mark.parametrize("shape", [{}, {"includes_usage": True}, {"num_top": 1}])
def test_what_is_written_is_the_chunks_whatever_the_text(shape: dict[str, Any]):
    """Text alone is written without building its chunk again."""
    chat, plain = writer(streams=True, **shape), writer(streams=True, **shape)
    chat.shape = plain.shape = replace(chat.shape, model='"content":"" {"content":""}')
    texts = ['"content":""', "\\", '"\\"', "\n\x00\u2028 é 🙂", "\ud800", "Hi"]
    pieces = [Piece(i % 2, (TextPart(text),)) for i, text in enumerate(texts)]
    pieces += [Piece(0, (TextPart("x"),), (TokenLogprobs(1, -0.1),)), Piece(1, (TextPart("end"),), (), "stop"), *PIECES]
    for piece in pieces:
        assert chat.written(piece) == b"".join(sse(chunk) for chunk in plain.chunks(piece))


def test_a_document_is_that_of_the_official_type():
    whole = ChatCompletion.model_validate(
        json.loads(json.dumps(writer().document(PIECES, Usage(3, 0, 4)))), strict=True
    )
    message = whole.choices[0].message
    assert (message.content, message.reasoning_content) == ("It ", "Hm.")  # type: ignore[attr-defined]
    assert [call.id for call in message.tool_calls or ()] == ["call_0", "own_id"]
    assert (whole.choices[0].finish_reason, whole.usage and whole.usage.total_tokens) == ("tool_calls", 7)


def test_a_call_alone_has_no_content():
    document = writer().document([Piece(0, (ToolCallPart("w", "{}"),), finish_reason="tool_calls")], Usage(1))
    assert document["choices"][0]["message"]["content"] is None
    empty = writer().document([Piece(0, (), finish_reason="stop")], Usage(1))
    assert empty["choices"][0]["message"]["content"] == ""


def test_logprobs_have_text_and_bytes_also_of_half_a_character():
    probabilities = (TokenLogprobs(1, -0.1, ((1, -0.1), (3, -2.0))), TokenLogprobs(2, -0.5, ((2, -0.5), (1, -1.0))))
    (chunk,) = writer(streams=True, num_top=1).chunks(Piece(0, (TextPart("Hi"),), probabilities))
    checked = ChatCompletionChunk.model_validate(chunk, strict=True).choices[0].logprobs
    assert checked is not None
    assert checked.content is not None
    assert [(one.token, one.bytes, len(one.top_logprobs)) for one in checked.content] == [
        ("Hi", [72, 105], 1),
        ("\ufffd", [0xE2], 1),
    ]
    (without,) = writer(streams=True).chunks(Piece(0, (TextPart("Hi"),), probabilities))
    assert without["choices"][0]["logprobs"] is None


# -- one choice ------------------------------------------------------------------------------------


def event(text: str, reason: str | None = None, error: str | None = None) -> StreamEvent:
    return StreamEvent((1,), text, 0.0, reason, (TokenLogprobs(1, -1.0),), error)


class Calls:
    """A parser for which every C is a call, and _ is held back until the end."""

    def __init__(self) -> None:
        self.held = ""

    def feed(self, text: str) -> list[Any]:
        self.held += "_" * text.count("_")
        return [ToolCallPart("c", "{}") if letter == "C" else TextPart(letter) for letter in text if letter != "_"]

    def finish(self) -> list[Any]:
        return [TextPart(self.held)] if self.held else []


def test_probabilities_come_with_the_text_they_belong_to():
    reader = ChoiceReader(0, Calls())
    assert reader.read(event("_")) is None
    piece = reader.read(event("a"))
    assert piece is not None
    assert len(piece.logprobs) == 2
    last = reader.read(event("", "length"))
    assert last is not None
    assert (last.parts, last.finish_reason, reader.num_tokens) == ((TextPart("_"),), "length", 3)


@pytest.mark.parametrize(("reason", "said"), [("stop", "tool_calls"), ("length", "length"), ("error", "error")])
def test_an_answer_that_called_says_so(reason: str, said: str):
    reader = ChoiceReader(0, Calls())
    reader.read(event("C"))
    piece = reader.read(event("", reason))
    assert piece is not None
    assert piece.finish_reason == said


def test_one_call_ends_the_answer():
    reader = ChoiceReader(0, Calls(), one_call=True)
    piece = reader.read(event("aCbC"))
    assert piece is not None
    assert (piece.parts, piece.finish_reason) == ((TextPart("a"), ToolCallPart("c", "{}")), "tool_calls")
    assert reader.has_ended
    assert reader.read(event("x", "stop")) is None


class Marks:
    """A parser for which what stands in parentheses is reasoning."""

    def __init__(self) -> None:
        self.is_inside = False

    def feed(self, text: str) -> list[Any]:
        parts = list[Any]()
        for letter in text:
            if letter in "()":
                self.is_inside = letter == "("
            else:
                parts.append(ReasoningPart(letter) if self.is_inside else TextPart(letter))
        return parts

    def finish(self) -> list[Any]:
        return []


def test_tokens_of_reasoning_are_counted_with_the_marker_before_it():
    reader = ChoiceReader(0, Marks())
    for text in ("a", "(", "b", "c", ")", "d", ")"):
        reader.read(event(text))
    reader.read(event("", "stop"))
    assert (reader.num_reasoning_tokens, reader.num_tokens) == (3, 8)


def test_the_tier_is_said_to_who_asks_for_one():
    assert "service_tier" not in writer().document(PIECES, Usage(1))
    _, shape = chat_ask(read(ChatRequest, {"messages": HELLO, "service_tier": "priority"}))
    document = ChatWriter("chatcmpl-1", 1_700_000_000, shape, {}.__getitem__, fingerprint="fp_1").document(
        PIECES, Usage(1)
    )
    checked = ChatCompletion.model_validate(document, strict=True)
    assert (checked.service_tier, checked.system_fingerprint) == ("default", "fp_1")


def test_drafts_are_said_where_there_were_any():
    document = writer().document(PIECES, Usage(12, 8, 5, 3, tried=9, right=4))
    assert document["usage"]["splitinfer"] == {"drafts_tried": 9, "drafts_right": 4}
    ChatCompletion.model_validate(document, strict=True)
    assert "splitinfer" not in writer().document(PIECES, Usage(12, 8, 5, 3))["usage"]


def test_every_chunk_has_the_usage_so_far_where_that_is_asked_for():
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, shape = chat_ask(read(ChatRequest, {"messages": HELLO, "stream": True, "stream_options": options}))
    so_far = iter([Usage(3, 0, 1), Usage(3, 0, 2)])
    chat = ChatWriter("chatcmpl-1", 1, shape, {}.__getitem__, usage_now=lambda: next(so_far))
    written = [json.loads(chat.written(Piece(0, (TextPart(text),))).removeprefix(b"data: ")) for text in "ab"]
    assert [chunk["usage"]["completion_tokens"] for chunk in written] == [1, 2]
    text = CompletionWriter("cmpl-1", 1, Completions((), shape), {}.__getitem__, usage_now=lambda: Usage(3, 0, 1))
    assert text.chunk(Piece(0, (TextPart("a"),)))["usage"]["total_tokens"] == 4
    more = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    _, alone = chat_ask(read(ChatRequest, {"messages": HELLO, **more}))
    assert "usage" not in ChatWriter("chatcmpl-1", 1, alone, {}.__getitem__).first(0)


class Failing:
    """An answer whose pipeline fails."""

    usage, num_choices = Usage(1), 1

    async def batches(self) -> AsyncGenerator[list[Piece], None]:
        failed = Piece(0, (TextPart("ce"),), finish_reason="error", error="stage b is lost")
        yield [Piece(0, (TextPart("On"),)), failed]


@pytest.mark.parametrize("is_chat", [True, False])
def test_an_answer_that_fails_has_no_reason_to_finish(is_chat: bool):
    async def sent_by() -> bytes:
        answer: Any = Failing()
        shape = Shape("m", streams=True, includes_usage=True)
        if is_chat:
            events = _events(answer, ChatWriter("chatcmpl-1", 1, shape, {}.__getitem__))
        else:
            events = _events(answer, CompletionWriter("cmpl-1", 1, Completions((), shape), {}.__getitem__))
        return b"".join([part async for part in events])

    sent = [line.removeprefix("data: ") for line in asyncio.run(sent_by()).decode().splitlines() if line]
    assert sent.pop() == "[DONE]"
    *chunks, failed = [json.loads(line) for line in sent]
    assert failed["error"] == {
        "message": "stage b is lost", "type": "server_error", "param": None, "code": None,
    }  # fmt: skip
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]] == [None] * len(chunks)
    said = [c.get("text") or c.get("delta", {}).get("content") or "" for chunk in chunks for c in chunk["choices"]]
    assert "".join(said) == "Once"


def test_an_answer_that_was_ended_is_cut_off():
    document = writer().document([Piece(0, (TextPart("a"),), finish_reason="abort")], Usage(1))
    assert document["choices"][0]["finish_reason"] == "length"


def test_an_answer_names_the_model_also_where_the_request_does_not():
    assert chat_ask(read(ChatRequest, {"messages": HELLO}), "demo")[1].model == "demo"
    assert chat_ask(read(ChatRequest, {"messages": HELLO, "model": "m"}), "demo")[1].model == "m"
