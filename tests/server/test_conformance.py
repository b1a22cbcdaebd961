"""Every document and every event that is sent, held against the official packages' types: strictly, so that a number
is no text, and without a field that those types do not know, but for those listed here.

A scripted model thinks, calls and answers, so that there are items of each kind.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import groupby
from typing import Any

import anthropic
import anthropic.types
import httpx2 as httpx
import openai
import pytest
import scripted
from anthropic.types import MessageTokensCount, RawMessageStreamEvent
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import BaseModel, TypeAdapter
from stages import pipeline

from splitinfer.llm import LLM

OWN = {
    "choices.message.reasoning", "choices.message.reasoning_content",  # both names, as clients know one or the other
    "choices.delta.reasoning", "choices.delta.reasoning_content",
    "store", "presence_penalty", "frequency_penalty",  # of a response, as Open Responses wants it
    "response.store", "response.presence_penalty", "response.frequency_penalty",
    "usage.service_tier",  # of the last event, as of a message
    "logprobs.bytes", "logprobs.top_logprobs.bytes",  # of an event, as of the item that it belongs to
    "context_length", "context_window", "max_model_len", "loaded", "layout", "default_parameters",  # of a model
    "type", "display_name", "created_at", "lifecycle", "max_input_tokens", "max_tokens",  # the same for Anthropic's
    "object", "created", "owned_by",  # and for OpenAI's
}  # fmt: skip
"""Fields that the official types lack."""

WEATHER = {"name": "weather", "description": "Tells it.", "parameters": {"type": "object", "properties": {}}}
WRITE, BROKEN_TOOL = {**WEATHER, "name": "write"}, {**WEATHER, "name": "broken"}
INSIDE = {**WEATHER, "name": "tell"}
ASKED = [{"role": "user", "content": "What is the weather in Oslo?"}]
CALLED = [scripted.call("weather", "Hm, the weather.", "I look.", city="Oslo"), "It is sunny in Oslo: 21 °C. 🌞"]
PAIR = [
    scripted.call("write", text="Two files. ", path="a.py", content="print('ä \\U0001f31e')\n\tx = 1\n" * 2)
    + scripted.call("write", path="b.py", lines=[1, None, {"deep": 2.5}])
]
BROKEN = ['So. <tool_call>{"name": "broken", "arguments": {"city": "Oslo", "days" 3}}</tool_call>']
CALLED_INSIDE = [scripted.call("w__tell", text="One moment.", city="Oslo")]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = scripted.save(tmp_path_factory.mktemp("scripted"), {
        "weather": CALLED, "w__tell": CALLED_INSIDE, "write": PAIR, "broken": BROKEN,
    })  # fmt: skip
    with pipeline(folder, [1, 1]) as running:
        yield running


def send(http: httpx.Client, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
    return http.get(path) if body is None else http.post(path, json=body)


def events(answer: httpx.Response) -> list[tuple[str, str]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in answer.text.split("\n\n") if block and not block.startswith(":")]
    assert answer.text.endswith("\n\n")
    fields = [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]
    return [(one.get("event", ""), one["data"]) for one in fields]


def checked(kind: Any, raw: str | bytes) -> Any:
    """What the official package makes of a document.

    Raises:
        ValidationError: it is none of that type.
    """
    made = _adapter(kind).validate_json(raw, strict=True)
    assert set(_unknown(made)) <= OWN
    return made


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _unknown(value: Any, where: str = "") -> Iterator[str]:
    if isinstance(value, BaseModel):
        for name in value.model_extra or {}:
            yield f"{where}{name}"
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name), f"{where}{name}.")
    elif isinstance(value, list):
        for one in value:
            yield from _unknown(one, where)


# -- OpenAI ----------------------------------------------------------------------------------------

CHATS: dict[str, dict[str, Any]] = {
    "cut": {"max_tokens": 2, "logprobs": True, "top_logprobs": 3},
    "two": {"n": 2, "seed": 1},
    "call": {"tools": [{"type": "function", "function": WEATHER}], "logprobs": True},
    "pair": {"tools": [{"type": "function", "function": WRITE}], "logprobs": True},
    "first of a pair": {"tools": [{"type": "function", "function": WRITE}], "parallel_tool_calls": False},
}


@pytest.mark.parametrize("more", CHATS.values(), ids=CHATS.keys())
def test_chats(http: httpx.Client, more: dict[str, Any]):
    body = {"model": "demo", "messages": ASKED, **more}
    whole = checked(ChatCompletion, send(http, "/v1/chat/completions", body).content)
    streamed = send(http, "/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, done = [data for _, data in events(streamed)]
    assert done == "[DONE]"
    made = [checked(ChatCompletionChunk, chunk) for chunk in chunks]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in made}) == 1
    for choice in whole.choices:
        _same_choice(choice, [one for chunk in made for one in chunk.choices if one.index == choice.index])
    assert (made[-1].choices, made[-1].usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert all("usage" in json.loads(chunk) for chunk in chunks)  # null but in the last one


def _same_choice(whole: Any, chunks: list[Any]) -> None:
    deltas = [chunk.delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == (whole.message.content or "")
    reasoning = whole.message.model_extra.get("reasoning") or ""
    assert "".join(delta.model_extra.get("reasoning") or "" for delta in deltas) == reasoning
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.finish_reason]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    begins = [call for call in calls if call.id is not None]
    assert [call.index for call in begins] == list(range(len(begins)))
    assert [call.index for call in calls] == sorted(call.index for call in calls)
    assert all(call.function.name is None and call.type is None for call in calls if call.id is None)
    told = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]
    assert [(one.function.name, _arguments(calls, one.index)) for one in begins] == told
    tokens = [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content]
    assert tokens == (whole.logprobs.content if whole.logprobs else [])


def _arguments(calls: list[Any], index: int) -> str:
    return "".join(call.function.arguments or "" for call in calls if call.index == index)


def test_completions(http: httpx.Client):
    for more in ({}, {"logprobs": 2, "max_tokens": 3}, {"n": 2, "echo": True, "prompt": ["Hello", "you"]}):
        body = {"model": "demo", "prompt": "Hello", **more}
        whole = checked(Completion, send(http, "/v1/completions", body).content)
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, done = [data for _, data in events(send(http, "/v1/completions", streamed))]
        assert done == "[DONE]"
        made = [checked(Completion, _with_reasons(chunk)) for chunk in chunks]
        assert (made[-1].choices, made[-1].usage.completion_tokens) == ([], whole.usage.completion_tokens)
        for choice in whole.choices:
            own = [one for chunk in made for one in chunk.choices if one.index == choice.index]
            assert "".join(one.text for one in own) == choice.text


def _with_reasons(chunk: str) -> str:
    """A chunk as the package's type has it, whose reason is never null; the API's are, until the last one."""
    return chunk.replace('"finish_reason":null', '"finish_reason":"stop"')


RESPONSES: dict[str, dict[str, Any]] = {
    "cut": {"input": ASKED, "max_output_tokens": 2},
    "told": {
        "input": ASKED, "instructions": "Be kind.", "max_output_tokens": 90, "temperature": 0.5,
        "tool_choice": "none", "top_p": 0.9, "metadata": {"a": "b"},
        "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}, "service_tier": "auto",
        "safety_identifier": "s", "prompt_cache_key": "k", "presence_penalty": 0.5, "max_tool_calls": 3, "user": "u",
        "parallel_tool_calls": False,
    },
    "probabilities": {"input": ASKED, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "call in a namespace": {
        "input": ASKED,
        "tools": [{"type": "namespace", "name": "w", "description": "", "tools": [{"type": "function", **INSIDE}]}],
    },
    "pair": {"input": ASKED, "tools": [{"type": "function", **WRITE}]},
    "call": {
        "input": ASKED, "tools": [{"type": "function", **WEATHER}], "include": ["reasoning.encrypted_content"],
    },
}  # fmt: skip


IDLE = ("service_tier", "safety_identifier", "prompt_cache_key", "max_tool_calls", "user")


@pytest.mark.parametrize("more", RESPONSES.values(), ids=RESPONSES.keys())
def test_responses(http: httpx.Client, more: dict[str, Any]):
    body = {"model": "demo", **more}
    document = send(http, "/v1/responses", body)
    whole = checked(Response, document.content)
    streamed = send(http, "/v1/responses", {**body, "stream": True})
    for said in (document, streamed):
        assert more.keys() & {*IDLE} <= set(said.headers.get("x-splitinfer-ignored", "").split(", "))
    found = events(streamed)
    made = [checked(ResponseStreamEvent, data) for _, data in found]
    sent = [json.loads(data) for _, data in found]
    for response in (document.json(), *(one["response"] for one in sent if "response" in one)):
        check_open_response(response)
    for name in RESOURCE.keys() & more.keys() - {"reasoning", "text", "tools", *IDLE}:
        assert document.json()[name] == more[name]
    assert [one.type for one in made] == [name for name, _ in found]
    assert [one.sequence_number for one in made] == list(range(len(made)))
    assert (made[0].type, made[-1].type) == ("response.created", f"response.{whole.status}")
    assert _anonymous(made[-1].response) == _anonymous(whole)
    _check_items(made[2:-1], made[-1].response.output)


def _anonymous(response: Response) -> Any:
    found = response.model_dump(exclude={"id", "created_at", "completed_at"})
    found["usage"].pop("input_tokens_details")
    for item in found["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return found


ORDER = {
    "function_call": ["function_call_arguments.delta", "function_call_arguments.done"],
    "message": ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"],
    "reasoning": ["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"],
}


def _check_items(seen: Iterable[Any], output: list[Any]) -> None:
    """Each item is added, grows, and is done, one after the other; each is then as the response has it."""
    by_item = [[event for event in seen if getattr(event, "output_index", None) == i] for i in range(len(output))]
    assert sum(map(len, by_item)) == len(list(seen))
    for item, own in zip(output, by_item, strict=True):
        kinds = [kind.removeprefix("response.") for kind, _ in groupby(event.type for event in own)]
        assert kinds == ["output_item.added", *ORDER[item.type], "output_item.done"]
        assert own[-1].item == item
        assert all(event.item_id == item.id for event in own[1:-1])
        grown = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert grown == (item.arguments if item.type == "function_call" else item.content[0].text)


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        (Model, "/v1/models/demo", None),
        (anthropic.types.ModelInfo, "/v1/models/demo", None),
        (InputTokenCountResponse, "/v1/responses/input_tokens", {"input": "Hello"}),
        (MessageTokensCount, "/v1/messages/count_tokens", {"model": "demo", "messages": ASKED}),
    ],
)
def test_what_is_counted_and_described(http: httpx.Client, kind: type, path: str, body: Any):
    checked(kind, send(http, path, body).content)


# -- Anthropic -------------------------------------------------------------------------------------

MESSAGES: dict[str, dict[str, Any]] = {
    "cut": {"max_tokens": 2},
    "stopped": {"stop_sequences": ["tool"]},
    "call": {"tools": [{"name": "weather", "description": "Tells it.", "input_schema": {"type": "object"}}]},
    "pair": {"tools": [{"name": "write", "input_schema": {"type": "object"}}]},
}


@pytest.mark.parametrize("more", MESSAGES.values(), ids=MESSAGES.keys())
def test_messages(http: httpx.Client, claude: anthropic.Anthropic, more: dict[str, Any]):
    body = {"model": "demo", "max_tokens": 100, "messages": ASKED, **more}
    whole = checked(anthropic.types.Message, send(http, "/v1/messages", body).content)
    found = [(name, data) for name, data in events(send(http, "/v1/messages", {**body, "stream": True}))]
    made = [checked(RawMessageStreamEvent, data) for name, data in found if name != "ping"]
    assert [json.loads(data)["type"] for _, data in found] == [name for name, _ in found]
    assert [made[0].type, *(one.type for one in made[-2:])] == ["message_start", "message_delta", "message_stop"]
    assert made[-2].delta.stop_reason == whole.stop_reason
    assert made[-2].usage.output_tokens == whole.usage.output_tokens
    with claude.messages.stream(**body) as stream:
        assert list(map(_said, stream.get_final_message().content)) == list(map(_said, whole.content))


def _said(block: Any) -> dict[str, Any]:
    return {name: getattr(block, name, None) for name in ("type", "text", "thinking", "name", "input")}


# -- calls that are not whole ----------------------------------------------------------------------


def _functions(tool: Mapping[str, Any]) -> dict[str, list[Any]]:
    """A tool in the words of each API, by its path."""
    return {
        "/v1/chat/completions": [{"type": "function", "function": tool}],
        "/v1/responses": [{"type": "function", **tool}],
        "/v1/messages": [{"name": tool["name"], "input_schema": tool["parameters"]}],
    }


def test_a_call_that_is_cut_off_ends_as_each_api_says_it(http: httpx.Client):
    whole = json.dumps({"path": "a.py", "content": "print('ä \U0001f31e')\n\tx = 1\n" * 2}, ensure_ascii=False)
    for path, tools in _functions(WRITE).items():
        asked = {"input": ASKED, "max_output_tokens": 12} if "resp" in path else {"messages": ASKED, "max_tokens": 12}
        streamed = send(http, path, {"model": "demo", "tools": tools, **asked, "stream": True})
        found = [data for name, data in events(streamed) if data != "[DONE]" and name != "ping"]
        if "chat" in path:
            made = [checked(ChatCompletionChunk, data).choices[0] for data in found]
            said = _arguments([call for one in made for call in one.delta.tool_calls or []], 0)
            assert made[-1].finish_reason == "length"
        elif "resp" in path:
            made = [checked(ResponseStreamEvent, data) for data in found]
            call = made[-1].response.output[-1]
            said = "".join(one.delta for one in made if one.type == "response.function_call_arguments.delta")
            assert (call.status, call.arguments, made[-1].type) == ("incomplete", said, "response.incomplete")
            assert all(one.type != "response.function_call_arguments.done" for one in made)
        else:
            made = [checked(RawMessageStreamEvent, data) for data in found]
            deltas = [one.delta for one in made if one.type == "content_block_delta"]
            said = "".join(one.partial_json for one in deltas if one.type == "input_json_delta")
            assert (made[-3].type, made[-2].delta.stop_reason) == ("content_block_stop", "max_tokens")
        assert whole.startswith(said)
        assert len(said) > 10


def test_a_call_that_is_none_ends_as_an_error(http: httpx.Client, client: openai.OpenAI, claude: anthropic.Anthropic):
    tools, sentence = _functions(BROKEN_TOOL), "the model's call of a tool is not valid"
    asked: Any = {"model": "demo", "stream": True}
    chunks = client.chat.completions.create(messages=ASKED, tools=tools["/v1/chat/completions"], **asked)
    with pytest.raises(openai.APIError, match=sentence) as chat:
        assert all(chunk.choices[0].finish_reason is None for chunk in chunks)
    assert chat.value.type == "server_error"
    made = [*client.responses.create(input=ASKED, tools=tools["/v1/responses"], **asked)]
    assert (made[-1].type, made[-1].response.error.code) == ("response.failed", "server_error")
    assert sentence in made[-1].response.error.message
    said = claude.messages.create(messages=ASKED, max_tokens=99, tools=tools["/v1/messages"], **asked)
    with pytest.raises(anthropic.APIStatusError, match=sentence) as message:
        assert all(one.type not in ("message_delta", "message_stop") for one in said)
    assert message.value.body["error"]["type"] == "api_error"
    document = client.chat.completions.create(model="demo", messages=ASKED, tools=tools["/v1/chat/completions"])
    assert BROKEN[0] == document.choices[0].message.content, "a document has it as text"


def test_the_clients_own_helpers_get_a_call_and_hand_its_outcome_back(
    client: openai.OpenAI, claude: anthropic.Anthropic
):
    tools: Any = _functions(WEATHER)
    asked: Any = {"model": "demo", "messages": ASKED, "tools": tools["/v1/chat/completions"]}
    with client.chat.completions.stream(**asked) as chunks:
        kinds = {event.type for event in chunks}
        message = chunks.get_final_completion().choices[0].message
    assert {"tool_calls.function.arguments.done", "content.delta"} <= kinds
    (call,) = message.tool_calls
    turns = [*ASKED, message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    told = client.chat.completions.create(**{**asked, "messages": turns}).choices[0]
    assert (told.message.content, told.finish_reason) == (CALLED[1], "stop")

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Tells it."""
        return f"sunny in {city}"

    runner = claude.beta.messages.tool_runner(model="demo", max_tokens=100, messages=ASKED, tools=[weather])
    assert runner.until_done().content[0].text == CALLED[1]


# -- Open Responses --------------------------------------------------------------------------------

NUMBER, TEXT, FLAG = (int, float), str, bool
NONE = type(None)
RESOURCE: dict[str, Any] = {
    "id": TEXT, "object": TEXT, "created_at": int, "completed_at": (int, NONE), "status": TEXT,
    "incomplete_details": (dict, NONE), "model": TEXT, "previous_response_id": (TEXT, NONE),
    "instructions": (TEXT, NONE), "output": list, "error": (dict, NONE), "tools": list, "tool_choice": (TEXT, dict),
    "truncation": TEXT, "parallel_tool_calls": FLAG, "text": dict, "top_p": NUMBER, "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER, "top_logprobs": int, "temperature": NUMBER, "reasoning": (dict, NONE),
    "usage": (dict, NONE), "max_output_tokens": (int, NONE), "max_tool_calls": (int, NONE), "store": FLAG,
    "background": FLAG, "service_tier": TEXT, "metadata": dict, "safety_identifier": (TEXT, NONE),
    "prompt_cache_key": (TEXT, NONE),
}  # fmt: skip
"""What a response must have (Open Responses, schema/responses.tsp, ResponseResource)."""
TOOL = {"type": TEXT, "name": TEXT, "description": (TEXT, NONE), "parameters": (dict, NONE), "strict": (FLAG, NONE)}


def check_open_response(response: dict[str, Any]) -> None:
    assert [name for name, kind in RESOURCE.items() if not isinstance(response.get(name, ...), kind)] == []
    for tool in response["tools"]:
        tool = tool["tools"][0] if tool["type"] == "namespace" else tool
        assert [name for name, kind in TOOL.items() if not isinstance(tool.get(name, ...), kind)] == []
    assert (response["completed_at"] is None) == (response["status"] != "completed")
