"""Responses as they are sent; `test_conformance.py` has the order of their events."""

import json
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.engine.loop.requests import TokenLogprobs
from splitinfer.server.answer import Piece, Usage
from splitinfer.server.fields import read
from splitinfer.server.openai.responses import ResponseRequest, packed
from splitinfer.server.openai.responses_writer import ResponseWriter
from splitinfer.text.answer import ReasoningPart, TextPart, ToolCallPart

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ONE = Usage(1)
SPELLED = {1: b"Hi", 2: "€".encode()[:1]}
PIECES = [
    Piece(0, (ReasoningPart("H"),)),
    Piece(0, (ReasoningPart("m."), TextPart("It "))),
    Piece(0, (TextPart("is."), ToolCallPart("weather", '{"city": "Oslo"}'), ToolCallPart("weather", "{}", "own"))),
    Piece(0, (), finish_reason="tool_calls"),
]


def writer(**fields: Any) -> ResponseWriter:
    numbers = iter(range(99))
    asked = read(ResponseRequest, {"input": "Hello", **fields})
    said = asked.said(Recommended({"temperature": 0.6, "top_p": 0.8, "top_k": 20}))
    new_id = lambda prefix: f"{prefix}_{next(numbers)}"  # noqa: E731
    head = "resp_1", 1_700_000_000, "m", asked, said
    return ResponseWriter(*head, SPELLED.__getitem__, new_id, clock=lambda: 1_700_000_009)


def sent(response: ResponseWriter, pieces: list[Piece], usage: Usage = ONE) -> list[dict[str, Any]]:
    """The events as a client reads them; each is checked to be of the official type."""
    answer: Any = None
    raw = response.begin(answer) + b"".join(map(response.written, pieces)) + response.end(pieces[-1], usage)
    read = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: ")]
    for event in read:
        assert EVENT.validate_python(event, strict=True).type == event["type"]
    return read


@pytest.mark.parametrize(
    ("last", "status", "details", "error"),
    [
        (Piece(0, finish_reason="stop"), "completed", None, None),
        (Piece(0, finish_reason="length"), "incomplete", {"reason": "max_output_tokens"}, None),
        (Piece(0, finish_reason="abort"), "incomplete", None, None),
        (Piece(0, finish_reason="error", error="lost"), "failed", None, {"code": "server_error", "message": "lost"}),
    ],
)
def test_endings(last: Piece, status: str, details: Any, error: Any):
    end = sent(writer(stream=True), [Piece(0, (TextPart("It"),)), last])[-1]
    response = end["response"]
    assert (end["type"], response["status"]) == (f"response.{status}", status)
    assert (response["incomplete_details"], response["error"]) == (details, error)
    assert [item["status"] for item in response["output"]] == ["completed" if status == "completed" else "incomplete"]


@pytest.mark.parametrize(
    ("pieces", "kinds"),
    [
        ([Piece(0, finish_reason="stop")], ["message"]),
        ([Piece(0, (ReasoningPart("Hm."),), finish_reason="stop")], ["reasoning", "message"]),
        ([Piece(0, (ToolCallPart("w", "{}"),), finish_reason="tool_calls")], ["function_call"]),
        ([Piece(0, finish_reason="length")], []),
        ([Piece(0, (TextPart("a"), ReasoningPart("b"), TextPart("c")), finish_reason="stop")],
         ["message", "reasoning", "message"]),
    ],
)  # fmt: skip
def test_what_ends_by_itself_has_a_message_or_a_call(pieces: list[Piece], kinds: list[str]):
    output = sent(writer(stream=True), pieces)[-1]["response"]["output"]
    assert [item["type"] for item in output] == kinds


def test_a_response_says_how_it_was_made_and_has_reasoning_packed_where_that_was_asked_for():
    asked = {"temperature": 0.5, "presence_penalty": None, "service_tier": "flex"}
    plain = writer(**asked).document(PIECES, ONE)
    used = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "service_tier")
    assert [plain[name] for name in used] == [0.5, 0.8, 0.0, 0.0, "default"]
    assert "top_k" not in plain
    assert "encrypted_content" not in plain["output"][0]
    assert [call["call_id"] for call in plain["output"][2:]] == ["call_3", "own"]
    assert writer().document(PIECES, Usage(12, 8, 5, 2))["usage"] == {
        "input_tokens": 12, "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 17,
    }  # fmt: skip
    packs = writer(include=["reasoning.encrypted_content"]).document(PIECES, ONE)
    assert packs["output"][0]["encrypted_content"] == packed("Hm.")


def test_probabilities_come_with_text_only():
    one, two = TokenLogprobs(1, -0.1, ((1, -0.1), (2, -2.0))), TokenLogprobs(2, -0.5, ((2, -0.5),))
    pieces = [
        Piece(0, (ReasoningPart("Hm."),), (one,)),
        Piece(0, (ReasoningPart("."), TextPart("Hi"), ToolCallPart("w", "{}")), (one, two)),
        Piece(0, (), finish_reason="tool_calls"),
    ]
    made = writer(include=["message.output_text.logprobs"], top_logprobs=1, stream=True)
    (delta,) = (event for event in sent(made, pieces) if event["type"] == "response.output_text.delta")
    hi = {"token": "Hi", "logprob": -0.1, "bytes": [72, 105]}
    half = {"token": "\ufffd", "logprob": -0.5, "bytes": [0xE2]}
    assert delta["logprobs"] == [{**hi, "top_logprobs": [hi]}, {**half, "top_logprobs": [half]}]
    assert [event["logprobs"] for event in sent(writer(stream=True), pieces) if "logprobs" in event] == [[], []]
