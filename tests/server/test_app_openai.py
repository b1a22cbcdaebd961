"""Completions and responses as OpenAI's client meets them: real sockets, two stages."""

import json
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai.types.responses import Response

from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM
from splitinfer.server import answer as reading
from splitinfer.server.ask import Ask, Chat
from splitinfer.server.running import Server
from splitinfer.server.stream import EventStream
from splitinfer.text.answer import AnswerPart, ReasoningPart, TextPart, ToolCallPart

TALE = "Once upon a time"
ASKED = [{"role": "user", "content": TALE}]
GREEDY = {"model": "demo", "temperature": 0}


def continued(llm: LLM, *prompts: str, **params: Any) -> list[str]:
    answers = llm.generate([llm.encode(prompt) for prompt in prompts], SamplingParams(**params))
    return [answer.text for answer in answers]


def answered(llm: LLM, **params: Any) -> str:
    return llm.generate([llm.encode_chat(ASKED)], SamplingParams(**params))[0].text


# -- completions -----------------------------------------------------------------------------------


def test_several_prompts_are_continued(client: openai.OpenAI, llm: LLM):
    prompts = [TALE, "The dog"]
    answer = client.completions.create(**GREEDY, prompt=prompts, max_tokens=8, n=2, echo=True)
    expected = [prompt + text for prompt, text in zip(prompts, continued(llm, *prompts, max_tokens=8), strict=True)]
    assert [choice.text for choice in answer.choices] == [expected[0], expected[0], expected[1], expected[1]]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(llm.encode(prompt)) for prompt in prompts)
    assert answer.usage.completion_tokens == 4 * 8


def test_token_ids_are_continued_in_a_stream(client: openai.OpenAI, llm: LLM):
    options = {"include_usage": True}
    chunks = list(
        client.completions.create(
            **GREEDY, prompt=llm.encode(TALE), max_tokens=8, logprobs=1, stream=True, stream_options=options
        )
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.text for choice in choices)
    assert [text] == continued(llm, TALE, max_tokens=8)
    tokens = [one for choice in choices if choice.logprobs for one in choice.logprobs.tokens or ()]
    assert ("".join(tokens), len(tokens)) == (text, 8)
    assert choices[-1].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_one_prompt_that_cannot_be_ends_those_before_it(client: openai.OpenAI, server: Server, llm: LLM):
    def aborted() -> int:
        return llm.stats()["finished"].get("abort", 0)

    before = aborted()
    body = {"ignore_eos": True}
    with pytest.raises(openai.BadRequestError, match="token id 99999999 is not in the model's vocabulary"):
        client.completions.create(
            **GREEDY, prompt=[llm.encode(TALE), [99999999]], n=2, max_tokens=3000, extra_body=body
        )
    assert server.service.num_running == 0
    client.completions.create(**GREEDY, prompt=TALE, max_tokens=2)  # behind what ended those
    assert aborted() == before + 2


# -- responses -------------------------------------------------------------------------------------


def test_a_response_is_the_librarys_answer(client: openai.OpenAI, llm: LLM):
    response = client.responses.create(**GREEDY, input=TALE, max_output_tokens=20, store=False)
    assert (response.output_text, response.status) == (answered(llm, max_tokens=20), "incomplete")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(llm.encode_chat(ASKED)), 20)


def test_a_stream_is_the_same_response_and_never_silent(
    client: openai.OpenAI, llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(EventStream.__init__.__kwdefaults__, "ping_every", 0.0005)
    stop = answered(llm, max_tokens=60).split()[30]  # so that it ends as completed
    body = {"stop": [stop]}
    with client.responses.stream(**GREEDY, input=TALE, extra_body=body) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert sum(event.type == "response.in_progress" for event in events) > 1
    assert final.output_text == answered(llm, max_tokens=3000, stop=(stop,)) != ""
    raw = list(client.responses.create(**GREEDY, input=TALE, stream=True, max_output_tokens=5))
    assert (raw[0].type, raw[-1].type) == ("response.created", "response.incomplete")
    assert "".join(one.delta for one in raw if one.type == "response.output_text.delta") == answered(llm, max_tokens=5)


def test_what_would_need_a_store_is_refused(client: openai.OpenAI, server: Server):
    for fields in ({"store": True}, {"previous_response_id": "resp_1"}, {"background": True}, {"conversation": "c"}):
        with pytest.raises(openai.BadRequestError, match="nothing is stored here") as caught:
            client.responses.create(**GREEDY, input=TALE, **fields)
        assert caught.value.param == next(iter(fields))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_a_cancelled_response_is_incomplete(server: Server):
    path, headers = f"http://127.0.0.1:{server.port}", {"X-Request-Id": "mine-2"}
    body = {"model": "demo", "input": TALE, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{path}/v1/responses", json=body, headers=headers, timeout=60.0) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: response.created"
        assert httpx.delete(f"{path}/v1/requests/mine-2").json() == {"cancelled": True}
        *_, last = (line for line in lines if line)
    ended = json.loads(last.removeprefix("data: "))
    assert (ended["type"], ended["response"]["id"]) == ("response.incomplete", "resp_mine-2")


def test_input_is_counted(client: openai.OpenAI, llm: LLM):
    counted = client.responses.input_tokens.count(model="demo", input=TALE, instructions="Be kind.")
    assert counted.input_tokens == len(llm.encode_chat([{"role": "system", "content": "Be kind."}, *ASKED]))


# -- a tool, called by a parser in the place of a model that cannot --------------------------------

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}


class Calling:
    """Takes whatever the model writes for reasoning and a call."""

    def feed(self, text: str) -> list[AnswerPart]:
        return []

    def finish(self) -> list[AnswerPart]:
        return [ReasoningPart("Hm."), TextPart("I look."), ToolCallPart("weather", '{"city": "Oslo"}')]


@pytest.fixture
def chats(monkeypatch: pytest.MonkeyPatch) -> list[Chat]:
    """The conversations that reach the engine. The first answer of each is a call."""
    seen, parser_of = list[Chat](), reading._parser

    def parser(llm: LLM, ask: Ask, prompt: list[int]) -> Any:
        assert isinstance(ask.prompt, Chat)
        seen.append(ask.prompt)
        return parser_of(llm, ask, prompt) if ask.prompt.messages[-1]["role"] == "tool" else Calling()

    monkeypatch.setattr(reading, "_parser", parser)
    return seen


@pytest.mark.parametrize("streams", [False, True])
def test_a_tools_round_trip(client: openai.OpenAI, chats: list[Chat], streams: bool):
    asked: dict[str, Any] = {
        "model": "demo", "tools": [{"type": "web_search"}, WEATHER], "store": False,
        "include": ["reasoning.encrypted_content"], "extra_body": {"stop_token_ids": list(range(512))},
    }  # fmt: skip

    def create(given: list[Any]) -> Response:
        if not streams:
            return client.responses.create(**asked, input=given)
        with client.responses.stream(**asked, input=given) as stream:
            return stream.get_final_response()

    given: list[Any] = [{"role": "user", "content": "Weather?"}]
    first = create(given)
    *_, call = first.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), first.status) == ("weather", {"city": "Oslo"}, "completed")
    items = [item.model_dump(exclude_unset=True, exclude={"parsed_arguments"}) for item in first.output]
    for item in items:
        if item["type"] == "reasoning":
            del item["content"]  # as some clients do
    create([*given, *items, {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}])
    told = {"name": "weather", "parameters": {"type": "object"}, "strict": False}
    assert chats[0].tools == chats[1].tools == ({"type": "function", "function": told},)
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    assert list(chats[1].messages) == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "sun"},
    ]
