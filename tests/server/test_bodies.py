"""What a body may be, of any route, through the whole application without a model: one table of what is refused, in
which words and in whose form; whatever else stands anywhere, it is taken or refused, and is no fault of the server's.

A row: a route; what its body has beside the least of it, or its bytes; and words that the refusal must have.
"""

import asyncio
import copy
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import typing_extensions
from anthropic.types import MessageCountTokensParams, message_create_params
from asgi import answer, posted, scope_of, told
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import input_token_count_params, response_create_params
from raw_http import Said
from starlette.requests import Request
from stub_model import Model
from valid_requests import BODIES, JSON, Asked, places

from splitinfer.errors import WorkerLost
from splitinfer.server.anthropic.messages import MessageRequest
from splitinfer.server.body import Bodies, parsed, read_json
from splitinfer.server.gate import Gate
from splitinfer.server.guard import Guard
from splitinfer.server.openai.chat import ChatRequest
from splitinfer.server.openai.completions import CompletionRequest
from splitinfer.server.openai.responses import ResponseRequest
from splitinfer.server.running import make_app
from splitinfer.server.service import Service

CHAT, TEXT, RESPONSE, INPUT = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/input_tokens"
MESSAGE, COUNT, TOKENS, DETOKENS = "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"
TEMPLATE = "/apply-template"
HI: list[Any] = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "w"}}
LEAST: dict[str, Any] = {
    CHAT: {"messages": HI}, TEXT: {"prompt": "Once"}, RESPONSE: {"input": "Hello"}, INPUT: {"input": "Hello"},
    MESSAGE: {"messages": HI, "max_tokens": 9}, COUNT: {"messages": HI}, TOKENS: {}, DETOKENS: {}, TEMPLATE: {},
}  # fmt: skip


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def items(*more: Any) -> dict[str, Any]:
    return {"input": list(more)}


def system(**block: Any) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "system", "content": [block]}]}


VALUES: list[tuple[str, Any, str]] = [  # of another type, out of their range, or missing
    (CHAT, {"temperature": "hot"}, "temperature"),
    (CHAT, {"temperature": 10**400}, "temperature"),
    (CHAT, {"top_p": 2}, "top_p 1"),
    (CHAT, {"n": 0}, "n 1"),
    (CHAT, {"max_completion_tokens": 1.5}, "max_completion_tokens"),
    (CHAT, {"max_tokens": 0}, "max_tokens 1"),
    (CHAT, {"seed": 2**64}, "seed 18446744073709551615"),
    (CHAT, {"stop": [1]}, "stop[0]"),
    (CHAT, {"logit_bias": {"a": 1}}, "logit_bias"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs 20"),
    (CHAT, {"stream_options": {"include_usage": 1}}, "stream_options.include_usage true"),
    (CHAT, {"stream": "yes"}, "stream"),
    (CHAT, {"tool_choice": "required"}, "tool_choice no tools"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice 'a'"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format schema"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type json_schema"),
    (CHAT, {"response_format": {"type": "json_object"}, "grammar": "root ::= x"}, "one form response_format, grammar"),
    (TEXT, {"guided_regex": "x", "structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice, guided_regex"),
    (TEXT, {"guided_choice": ["a", ""]}, "guided_choice texts"),
    (TEXT, {"guided_json": "{"}, "guided_json JSON"),
    (TEXT, {"guided_json": 5}, "guided_json must be an object or text, not 5"),
    (TEXT, {"structured_outputs": {"regex": ["a"]}}, "structured_outputs.regex text"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": []}, "messages empty"),
    (CHAT, {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role assistant"),
    (CHAT, user({"type": "image_url", "image_url": 1}), "messages[0].content[0].image_url"),
    (CHAT, {"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize request itself"),
    ("/chat/completions", b'{"messages": 1}', "messages"),
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {"prompt": ["a", 5]}, "prompt[1]"),
    (TEXT, {"prompt": [[1, "a"]]}, "prompt[0]"),
    (TEXT, {"max_tokens": 0}, "max_tokens echo"),
    (RESPONSE, {"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    (RESPONSE, {"tool_choice": {"type": "function", "name": "weather"}}, "tool_choice 'weather'"),
    (RESPONSE, {"metadata": "a"}, "metadata object"),
    (RESPONSE, items(), "input empty"),
    (RESPONSE, items({"type": "function_call_output", "output": ""}), "input[0].call_id"),
    (RESPONSE, items({"type": "reasoning", "content": [{}]}), "input[0].content[0].text"),
    (MESSAGE, {"max_tokens": None}, "max_tokens"),
    (MESSAGE, {"top_k": -2}, "top_k -1"),
    (MESSAGE, user({"type": "image"}), "messages[0].content[0].source"),
    (MESSAGE, {"tool_choice": {"type": "any"}}, "tool_choice tools"),
    (MESSAGE, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    (MESSAGE, {"thinking": {"type": "deep"}}, "thinking.type adaptive"),
    (MESSAGE, system(type="tool_addition"), "messages[1].content[0].tool"),
    (TOKENS, {}, "either prompt or messages"),
    (DETOKENS, {"tokens": [1, "2"]}, "tokens[1]"),
]  # fmt: skip
BEGUN = {"messages": [*HI, {"role": "assistant", "content": "There"}], "continue_final_message": True}
UNSUPPORTED: list[tuple[str, Any, str]] = [  # would change an answer; below is what has no field
    (CHAT, {"continue_final_message": True}, "last message go on, it must be the assistant's"),
    (CHAT, {**BEGUN, "add_generation_prompt": True}, "continue_final_message needs add_generation_prompt false"),
    (CHAT, {**BEGUN, "response_format": {"type": "json_object"}}, "cannot be held to a form"),
    (CHAT, {"add_generation_prompt": False}, "add_generation_prompt is not supported"),
    (CHAT, {"options": {"temperature": 0, "num_ctx": 8192}}, "options not supported"),
    (CHAT, {"tools": [{"type": "custom"}]}, "tools[0].type 'custom' 'function'"),
    (CHAT, {"messages": [{"role": "critic", "name": "f", "content": "x"}]}, "'critic' tool"),
    (CHAT, user({"type": "input_audio"}), "'input_audio' text"),
    (CHAT, {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag tools"),
    (TEXT, {"structured_outputs": {"whitespace_pattern": " ?"}}, "structured_outputs.whitespace_pattern"),
    (TEXT, {"best_of": 3, "n": 2}, "best_of n"),
    (TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs stream"),
    (TEXT, {"suffix": "x", "echo": True}, "suffix echoed"),
    (RESPONSE, {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    (RESPONSE, items(*HI, {"type": "compaction_trigger"}), "'compaction_trigger'"),
    (RESPONSE, {"tool_choice": {"type": "web_search"}}, "'web_search' required"),
    (RESPONSE, items({"type": "item_reference", "id": "1"}), "'item_reference' stored"),
    (MESSAGE, {"messages": [*HI, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, "last message calls"),
    (MESSAGE, {"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "task_budget"),
    (MESSAGE, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124' custom"),
    (MESSAGE, user({"type": "document", "source": {"type": "base64"}}), "'base64' text"),
    (MESSAGE, user({"type": "tool_use", "id": "t", "name": "n", "input": {}}), "'tool_use' tool_result"),
    (MESSAGE, system(type="tool_removal", tool={"type": "mcp_tool_reference"}), "'mcp_tool_reference'"),
    (TOKENS, {"messages": HI, "chat_template": "x"}, "chat_template own"),
    ("/infill", {"input_prefix": "a"}, "input_suffix given"),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "mirostat": 2}, "mirostat not supported"),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "max_tokens": 2}, "its name here is n_predict"),
]  # fmt: skip
LONG = "ab cd " * 400_000
BOUNDS: list[tuple[str, Any, str]] = [
    (CHAT, {"n": 128}, "n 16"),
    (CHAT, {"stop": ["a"] * 17}, "stop 16"),
    (CHAT, {"stop": ["a" * 1_000_000]}, "stop 4096"),
    (CHAT, {"stop_token_ids": [1] * 30_000}, "stop_token_ids 1024"),
    (CHAT, {"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {str(i): 1 for i in range(30_000)}}, "logit_bias 1,024"),
    (CHAT, {"model": "x" * 513}, "model 512"),
    (RESPONSE, {"metadata": {"k": "v" * 20_000}}, "metadata 16,384"),
    (CHAT, {"messages": HI * 4097}, "messages 4,096"),
    (CHAT, {"tools": [TOOL] * 1025}, "tools 1,024"),
    (CHAT, {"messages": [{"role": "user", "content": [1] * 50_000}]}, "messages[0].content[0]"),
    (TEXT, {"prompt": ["a"] * 65, "n": 2}, "prompt 128"),
    (RESPONSE, {"input": HI * 16_385}, "input 16,384"),
    (RESPONSE, {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}] * 1025}]}, "tools 1,024"),
    (COUNT, {"tools": [{"type": "web_search"}] * 1025}, "tools 1,024"),
    (DETOKENS, {"tokens": [5] * 5000}, "5,000 4,096"),
    (TOKENS, {"prompt": LONG}, "over 8,192 tokens 4,096"),
    (INPUT, {"input": LONG}, "over 8,192 tokens"),
    (COUNT, user({"type": "text", "text": LONG}), "prompt is too long: over 8,192 tokens"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "w", "description": LONG}}]}, "over 8,192 tokens"),
    (CHAT, {"chat_template_kwargs": {LONG: True}}, "over 8,192 tokens"),
]  # fmt: skip
NO_JSON: list[tuple[bytes, str]] = [
    (b"", "not JSON"),
    (b"[]", "JSON object"),
    (b"{", "not JSON"),
    (b'{"a": NaN}', "NaN"),
    (b'{"a": 1e999}', "1e999"),
    (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
    (b'{"a": "\xff"}', "not JSON"),
    ('{"a": 1}'.encode("utf-16"), "not JSON"),
    (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "nested"),
    (b'{"a": ' + b"[" * 100_000, "nested"),
    (b'{"a": [' + b"[]," * (1 << 20) + b"[], 1]}", "1,048,576 commas"),
]
OTHERS: list[tuple[int, str, Any, tuple[tuple[str, str], ...], str]] = [  # with their status and headers
    (413, CHAT, b'{"a": "' + b"x" * (32 << 20) + b'"}', (), "33,554,432 bytes"),
    (413, MESSAGE, b'{"a": "' + b"x" * (32 << 20) + b'"}', (), "33,554,432 bytes"),
    (415, CHAT, LEAST[CHAT], (("Content-Encoding", "gzip"),), "gzip"),
    (400, CHAT, LEAST[CHAT], (JSON, ("Content-Type", "text/plain")), "content-type twice"),
    (400, CHAT, LEAST[CHAT], (("Origin", "https://attacker.example"), ("Origin", "http://localhost")), "origin twice"),
    (400, MESSAGE, LEAST[MESSAGE], (("X-Api-Key", "a"), ("X-Api-Key", "b")), "x-api-key twice"),
    (400, CHAT, LEAST[CHAT], (("X-Splitinfer-Priority", "high"),), "x-splitinfer-priority 100"),
    (400, MESSAGE, LEAST[MESSAGE], (("X-Splitinfer-Timeout", "Infinity"),), "x-splitinfer-timeout"),
    (404, "/v1/embeddings", {"input": "x"}, (), "/v1/embeddings"),
    (404, "/v1/messages/batches", {"requests": []}, (), "/v1/messages/batches"),
]
REFUSED = [
    *((400, route, body, (), words) for route, body, words in (*VALUES, *UNSUPPORTED, *BOUNDS)),
    *((400, route, raw, (), words) for raw, words in NO_JSON for route in (CHAT, MESSAGE)),
    *OTHERS,
]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def application(model: Model) -> Guard:
    return make_app(Service(model, "demo"))  # type: ignore[arg-type]


def check(said: Said, route: str) -> str:
    """The sentence of an error, if it is one; its form is that of the route's API."""
    assert said.headers["x-request-id"].startswith("req_")
    if said.status < 400:
        return ""
    assert said.status < 500
    assert "application/json" in said.headers["content-type"]
    assert len(str(said.json)) <= 5000
    fields = {"type", "message"} if route.startswith(MESSAGE) else {"message", "type", "param", "code"}
    assert set(said.json["error"]) - ({"details"} if route.startswith(MESSAGE) else set()) == fields
    assert not route.startswith(MESSAGE) or said.json["type"] == "error"
    assert said.json["error"]["message"] > ""
    return said.json["error"]["message"]


@pytest.mark.parametrize(("status", "route", "body", "headers", "words"), REFUSED)
def test_what_is_wrong_is_refused_in_words(
    application: Guard, model: Model, status: int, route: str, body: Any, headers: Any, words: str
):
    before = model.num_letters
    said = told(application, route, body if isinstance(body, bytes) else {**LEAST.get(route, {}), **body}, *headers)
    sentence = check(said, route)
    assert said.status == status
    assert [word for word in words.split() if word not in sentence] == [], sentence
    assert "\n" not in sentence
    assert model.num_letters - before < 100_000, "it was tokenized as a whole"


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, {"messages": HI * 4096, "tools": [TOOL] * 1024, "model": "x" * 512}),
        (RESPONSE, {"input": HI * 4096, "metadata": {f"{i:064}": "v" * 512 for i in range(16)}}),
        (TEXT, {"prompt": "a" * 5_000_000}),  # one token of this model
        (TEXT, {"prompt": [7] * 100_000}),  # the engine says by how much it is too long
        (CHAT, {"messages": HI, "max_tokens": 10**9, "temperature": 2, "top_k": -1, "seed": -1}),
    ],
)
def test_what_is_as_large_as_may_be_is_taken(application: Guard, route: str, body: Any):
    said = told(application, route, body)
    assert (said.status, said.json["error"]["code"], said.headers["retry-after"]) == (429, "queue_full", "1"), said.json


# -- whatever stands anywhere ------------------------------------------------------------------------

STRANGE: list[Any] = [None, True, -(10**400), 1.5, "x", [], ["x"], {"type": []}]
FUNCTION = {"name": "w", "description": "d", "parameters": {"type": "object"}, "strict": True}
BLOCK = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
MORE: dict[str, dict[str, Any]] = {
    CHAT: {"stream": True, "stream_options": {"include_usage": True}, "enable_thinking": True, "messages": [
        *BODIES[CHAT]["messages"], {"role": "assistant", "content": None, "reasoning": "x"}]},
    TEXT: {"best_of": 2, "stream": True, "stream_options": {"include_usage": True}},
    RESPONSE: {
        "reasoning": {"effort": "low", "summary": "auto"}, "truncation": "disabled", "store": False, "tools": [
            {"type": "function", **FUNCTION}, {"type": "web_search"},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]}],
        "input": [
            *BODIES[RESPONSE]["input"], {"type": "custom_tool_call", "call_id": "c", "name": "w", "input": "x"}]},
    MESSAGE: {
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "messages": [
            *BODIES[MESSAGE]["messages"],
            {"role": "assistant", "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "t", "name": "w", "input": {"a": 1}, "caller": {"type": "direct"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": [
                    BLOCK, {"type": "tool_reference", "tool_name": "w"}]},
                {"type": "search_result", "source": "s", "title": "t", "content": [BLOCK]},
                {"type": "document", "title": "t", "source": {"type": "text", "data": "x", "media_type": "text/plain"}},
                {"type": "document", "source": {"type": "content", "content": [BLOCK]}}]},
            {"role": "system", "content": "x"}]},
}  # fmt: skip


def strange_bodies(body: dict[str, Any]) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    for path in places(body):
        for value in STRANGE:
            made = inside = copy.deepcopy(body)
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = value
            yield path, value, made


@pytest.mark.parametrize("route", [CHAT, TEXT, RESPONSE, MESSAGE, TOKENS])
def test_strange_values_are_taken_or_refused(application: Guard, route: str):
    """A request that is taken gets as far as the queue of the engine, which is full."""
    body, refused = BODIES[route] | MORE.get(route, {}), 0

    async def ask_all() -> None:
        nonlocal refused
        assert (await answer(application, posted(route, body))).status in (200, 429)
        for path, value, made in strange_bodies(body):
            said = await answer(application, posted(route, made))
            assert said.status in (200, 400, 429), (path, value, said)
            assert check(said, route) or said.status == 200, (path, value)
            refused += said.status == 400

    asyncio.run(ask_all())
    assert refused > 30


@pytest.mark.parametrize(
    ("kind", "route"),
    [
        (chat_params.CompletionCreateParamsStreaming, CHAT),
        (completion_create_params.CompletionCreateParamsStreaming, TEXT),
        (response_create_params.ResponseCreateParamsStreaming, RESPONSE),
        (input_token_count_params.InputTokenCountParams, INPUT),
        (message_create_params.MessageCreateParamsStreaming, MESSAGE),
        (MessageCountTokensParams, COUNT),
    ],
)
def test_every_field_of_the_official_clients_may_be_null(application: Guard, kind: type, route: str):
    """The API itself requires none but those of the least body."""
    names = typing_extensions.get_type_hints(kind)
    assert told(application, route, dict.fromkeys(names) | LEAST[route]).status in (200, 429)


# -- fields that no model of a request has: refused, or without effect -----------------------------

MODELS = {CHAT: ChatRequest, TEXT: CompletionRequest, RESPONSE: ResponseRequest, MESSAGE: MessageRequest}
IDLE = [  # those of other servers do nothing without a field that is refused, or change no word
    "user", "audio", "function_call", "raw", "safety_identifier", "prompt_cache_key", "service_tier", "prediction",
    "store", "max_tool_calls", "background", "truncation", "context_management", "client_metadata", "cache_control",
    "betas", "n_probs", "mirostat_tau", "dynatemp_exponent", "dry_base", "xtc_threshold", "thinking_forced_open",
    "grammar_lazy", "grammar_triggers", "preserved_tokens", "speculative.n_max", "priority",
    "length_penalty", "penalize_nl", "return_token_ids", "draft_model", "num_ctx",
    "a_field_of_next_year",
]  # fmt: skip
ODD: list[Any] = [None, True, False, 0, -1, 10**400, 0.5, "", "odd", [], ["odd", 1], {}, {"a": {"b": [1]}}]


@pytest.mark.parametrize("route", MODELS)
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_what_changes_no_answer_is_answered_whatever_it_is(application: Guard, route: str, value: Any):
    assert told(application, route, LEAST[route] | dict.fromkeys(IDLE, value)).status == 429


@pytest.mark.parametrize("route", MODELS)
def test_what_would_change_the_answer_is_refused_unless_it_asks_for_nothing(application: Guard, route: str):
    model = MODELS[route]
    for name, one in ((name, one) for name, one in model.refused.items() if name not in model.known):
        for value in (None, *one.neutral):
            said = told(application, route, LEAST[route] | {name: value})
            assert (said.status, "x-splitinfer-ignored" in said.headers) == (429, False), (name, value, said.json)
        said = told(application, route, LEAST[route] | {name: "odd"})
        assert (said.status, said.json["error"]["message"]) == (400, f"{name} is not supported: {one.why}")


def test_their_names_come_back_in_a_header_and_stand_in_the_log_once(caplog: pytest.LogCaptureFixture):
    application, route = make_app(Service(Model(), "demo")), CHAT  # type: ignore[arg-type]
    caplog.set_level(logging.INFO, "splitinfer.server.guard")
    inside = {"messages": [{**HI[0], "timestamp": 1}], "stream_options": {"include_obfuscation": True}}
    for _ in range(2):
        said = told(application, route, {"user": "u", "temperature": 0.5, "store": False, **inside})
        assert said.headers["x-splitinfer-ignored"] == "user, store, include_obfuscation, timestamp"
    assert [line for line in caplog.messages if "no effect" in line] == [
        f"requests have the field {name}, which has no effect here"
        for name in ("user", "store", "include_obfuscation", "timestamp")
    ]
    plain = told(application, route, LEAST[route] | {"temperature": 0.5, "user": None})
    assert "x-splitinfer-ignored" not in plain.headers
    both = told(application, COUNT, LEAST[COUNT] | {"metadata": {}, "stream": True})
    assert (both.status, both.headers["x-splitinfer-ignored"]) == (200, "metadata, stream")


def test_no_name_leaves_the_header_or_makes_it_long(application: Guard, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "splitinfer.server.guard")
    hostile = {"a\r\nSet-Cookie: b=c": 1, "\u043a\u043b\u044e\u0447": 1, "x" * 100_000: 1, "a, b": 1, "": 1}
    said = told(application, MESSAGE, LEAST[MESSAGE] | hostile | {f"field_{i}": i for i in range(5000)})
    names = said.headers["x-splitinfer-ignored"].split(", ")
    assert names[:4] == ["aSet-Cookiebc", "x" * 40, "ab", "field_0"]
    assert (said.status, len(names), "set-cookie" in said.headers) == (429, 32, False)
    assert all("\n" not in line for line in caplog.messages)


# -- what one client can do to the others ------------------------------------------------------------


@pytest.mark.timeout(15)
def test_a_cookie_of_backslashes_holds_nobody_up(application: Guard):
    """Python before 3.11.10 and 3.12.6 takes half a minute for one, on the event loop, whoever sends it."""
    for value in ('a="' + "\\" * 60_000 + '"', 'a="' + '\\"' * 30_000 + '"'):
        assert told(application, COUNT, LEAST[COUNT], ("Cookie", value)).status == 200


def test_a_method_is_refused_with_those_that_are_taken(application: Guard):
    said = told(application, CHAT, method="P" * 30_000)
    assert (said.status, said.headers["allow"], len(said.body) < 300) == (405, "POST", True)


def test_bodies_are_bounded_together(model: Model):
    inner, bodies = make_app(Service(model, "demo")), Bodies(most=3000)  # type: ignore[arg-type]
    application = Guard(inner._app, Gate(), {}, bodies)
    asked = Asked("POST", COUNT, (JSON,), json.dumps(LEAST[COUNT]).encode() + b" " * 2000)

    async def both() -> list[int]:
        comes, began = asyncio.Event(), asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not began.is_set():
                began.set()
                return {"type": "http.request", "body": asked.body, "more_body": True}
            await comes.wait()
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        statuses = list[int]()
        first = asyncio.create_task(application(scope_of(asked), receive, send))
        await began.wait()
        second = await answer(application, asked)
        assert (second.headers["retry-after"], second.json["error"]["type"]) == ("2", "rate_limit_error")
        comes.set()
        await first
        return [second.status, statuses[0], (await answer(application, asked)).status]

    assert asyncio.run(both()) == [429, 200, 200]
    assert bodies.held == 0


def test_what_a_large_body_asks_is_read_beside_the_event_loop():
    def reader(size: int) -> int:
        raw = json.dumps({"a": "x" * size}).encode()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": raw, "more_body": False}

        request = Request({"type": "http", "headers": [], "state": {"bodies": Bodies(), "size": 0}}, receive)
        return asyncio.run(read_json(request, lambda _: threading.get_ident()))

    assert reader(10) == threading.get_ident()
    assert reader(1 << 18) != threading.get_ident()


# -- failures, and what is read ----------------------------------------------------------------------


def test_a_failure_is_told_without_addresses_and_logged_with_them(caplog: pytest.LogCaptureFixture):
    lost = WorkerLost("worker mini (10.0.0.2:5000) is gone: it closed the link")
    for failure in ("stage mini was lost and did not come back", None):
        caplog.clear()
        application = make_app(Service(Model(failure, lost), "demo"))  # type: ignore[arg-type]
        said = told(application, COUNT, LEAST[COUNT])
        assert said.status == 503
        assert said.json["error"]["message"] == failure or "its log says why" in said.json["error"]["message"]
        assert "10.0.0.2" not in str(said.json)
        assert f"{lost}" in caplog.text


@pytest.mark.parametrize(
    ("body", "whole", "where"),
    [
        (b'{"messages": [{"content": "a\\ud83d b"}]}', {"messages": [{"content": "a\ufffd b"}]}, "messages[0].content"),
        (b'{"a": ["\\ude00", "\\ud83d\\ude00"]}', {"a": ["\ufffd", "\U0001f600"]}, "a[0]"),
        (b'{"a": "\xed\xa0\x80"}', {"a": "\ufffd"}, "a"),
        (b'{"a": {"\\uDFFF": "\\uDFFF"}}', {"a": {"\ufffd": "\ufffd"}}, "a."),
    ],
)
def test_half_a_character_is_read_as_a_broken_one(
    body: bytes, whole: Any, where: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO, "splitinfer.server.body"):
        assert parsed(body) == whole
    assert [where in one for one in caplog.messages] == [True]
