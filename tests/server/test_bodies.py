"""What is wrong with a body, of any route: one table over the whole application, without a model.

Each row: a route, what its body has beside the least of it, the field that is named, and what is said of it.
"""

import asyncio
import json
import re
import threading
from typing import Any

import pytest
from asgi import answer
from mutating import BODIES, Asked
from raw_http import Said
from starlette.requests import Request
from test_without_a_model import Model

from splitinfer.server.body import Bodies, read_json
from splitinfer.server.fields import read
from splitinfer.server.openai.chat import ChatRequest
from splitinfer.server.openai.messages import arguments_of
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
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"temperature": "hot"}, "temperature", "must be a number, not 'hot'"),
    (CHAT, {"temperature": True}, "temperature", "must be a number, not True"),
    (CHAT, {"n": 0}, "n", "must be at least 1, not 0"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "must be at least 1, not 0"),
    (CHAT, {"max_completion_tokens": 1.5}, "max_completion_tokens", "must be a whole number, not 1.5"),
    (CHAT, {"stop": ["a"] * 17}, "stop", "may have 16 entries, not 17"),
    (CHAT, {"stop": [1]}, "stop[0]", "must be text, not 1"),
    (CHAT, {"logit_bias": {"a": 1}}, "logit_bias", "must be an object whose keys are token ids, not 'a'"),
    (CHAT, {"logit_bias": {"1": "x"}}, "logit_bias.1", "must be a number, not 'x'"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "needs logprobs to be true"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be at most 20, not 21"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "is for streams only"),
    (CHAT, {"stream": True, "stream_options": {"extra": 1}}, "stream_options.extra",
     "there is no field 'stream_options.extra' here"),
    (CHAT, {"stream": "yes"}, "stream", "must be true or false, not 'yes'"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "requires a call, but there are no tools"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice",
     "must name one of the tools, not 'a'"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
     "response_format.json_schema.schema", "must be given"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type",
     "must be one of text, json_object, json_schema, not 'xml'"),
    (CHAT, {"thinking_budget": -1}, "thinking_budget", "must be at least 0, not -1"),
    (CHAT, {"tools": [{"type": "custom"}]}, "tools[0].type", "'custom' is not supported: tools are functions"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function", "must be given"),
    (CHAT, {"tools": {}}, "tools", "must be a list, not {}"),
    (CHAT, {"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize",
     "is not supported: it is set by the request itself"),
    (CHAT, {"messages": []}, "messages", "must not be empty"),
    (CHAT, {"messages": None}, "messages", "must be given"),
    (CHAT, {"messages": "hi"}, "messages", "must be a list, not 'hi'"),
    (CHAT, {"messages": ["hi"]}, "messages[0]", "must be an object, not 'hi'"),
    (CHAT, {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role",
     "must be one of system, developer, user, assistant, tool, not 'robot'"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "must be given"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url",
     "must be given"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 1}]}]},
     "messages[0].content[0].image_url", "must be text, not 1"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type",
     "'input_audio' is not supported: the model is given text and pict"),
    (CHAT, {"messages": [{"role": "user", "content": "", "extra": 1}]}, "messages[0].extra",
     "there is no field 'messages[0].extra' here"),
    (CHAT, {"messages": [{"role": "tool", "content": "1"}]}, "messages[0].tool_call_id", "must be given"),
    (TEXT, {"prompt": None}, "prompt", "must be given"),
    (TEXT, {"prompt": []}, "prompt", "must have at least one text or token id"),
    (TEXT, {"prompt": 5}, "prompt", "must be text or a list, not 5"),
    (TEXT, {"prompt": [True]}, "prompt[0]", "must be text or a list of token ids, not True"),
    (TEXT, {"prompt": ["a", 5]}, "prompt[1]", "must be text or a list of token ids, not 5"),
    (TEXT, {"prompt": [[1, "a"]]}, "prompt[0]", "must be text or a list of token ids, not [1, 'a']"),
    (TEXT, {"prompt": ["a"] * 65, "n": 2}, "prompt", "65 prompts by 2 choices are over 128 answers"),
    (TEXT, {"n": 0}, "n", "must be at least 1, not 0"),
    (TEXT, {"best_of": 3, "n": 2}, "best_of", "3 is not supported: answers are not ranked, so that it can be n only"),
    (TEXT, {"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1 without echo"),
    (TEXT, {"logprobs": 21}, "logprobs", "must be at most 20, not 21"),
    (TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "is not supported: a stream has none; use "),
    (TEXT, {"echo": 1}, "echo", "must be true or false, not 1"),
    (TEXT, {"stream_options": {"include_usage": True}}, "stream_options", "is for streams only"),
    (TEXT, {"messages": []}, "messages", "there is no field 'messages' here"),
    (RESPONSE, {"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "must be given"),
    (RESPONSE, {"text": {"form": 1}}, "text.form", "there is no field 'text.form' here; did you mean 'format'?"),
    (RESPONSE, {"reasoning": {"mode": "pro"}}, "reasoning.mode", "is not supported: there is one mode, standard"),
    (RESPONSE, {"reasoning": {"effort": 1}}, "reasoning.effort", "must be text, not 1"),
    (RESPONSE, {"reasoning": {"depth": 1}}, "reasoning.depth", "there is no field 'reasoning.depth' here"),
    (RESPONSE, {"tool_choice": "required"}, "tool_choice", "requires a call, but there are no tools"),
    (RESPONSE, {"tool_choice": {"type": "function", "name": "weather"}}, "tool_choice",
     "must name one of the tools, not 'weather'"),
    (RESPONSE, {"tools": [{"type": "function"}]}, "tools[0].name", "must be given"),
    (RESPONSE, {"tools": [{"name": "weather"}]}, "tools[0].type", "must be one of function, namespace, not None"),
    (RESPONSE, {"tools": [{"type": "function", "name": "weather", "parameters": [1], "strict": False}]},
     "tools[0].parameters", "must be an object, not [1]"),
    (RESPONSE, {"max_output_tokens": 0}, "max_output_tokens", "must be at least 1, not 0"),
    (RESPONSE, {"top_logprobs": 2}, "top_logprobs", "needs message.output_text.logprobs in include"),
    (RESPONSE, {"include": ["everything"]}, "include[0]", "'everything' is not supported: there are message.output_te"),
    (RESPONSE, {"include": "everything"}, "include", "must be a list, not 'everything'"),
    (RESPONSE, {"stream_options": {"include_obfuscation": False}}, "stream_options", "is for streams only"),
    (RESPONSE, {"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage",
     "there is no field 'stream_options.include_usage' here"),
    (RESPONSE, {"metadata": {"a": 1}}, "metadata.a", "must be text, not 1"),
    (RESPONSE, {"messages": []}, "messages", "there is no field 'messages' here"),
    (RESPONSE, {"input": None}, "input", "must be given"),
    (RESPONSE, {"input": []}, "input", "must not be empty"),
    (RESPONSE, {"input": ["hi"]}, "input[0]", "must be an object, not 'hi'"),
    (RESPONSE, {"input": [{"role": "robot", "content": ""}]}, "input[0].role",
     "must be 'system', 'developer', 'user' or 'assistant', not 'robot'"),
    (RESPONSE, {"input": [{"role": "user"}]}, "input[0].content", "must be given"),
    (RESPONSE, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url",
     "must be given"),
    (RESPONSE, {"input": [{"type": "item_reference", "id": "1"}]}, "input[0].type",
     "'item_reference' is not supported: nothing is stored here; giv"),
    (RESPONSE, {"input": [{"type": "function_call_output", "output": ""}]}, "input[0].call_id", "must be given"),
    (RESPONSE, {"input": [{"type": "function_call", "call_id": "c", "name": "w"}]}, "input[0].arguments",
     "must be given"),
    (RESPONSE, {"input": [{"type": "reasoning", "content": [{}]}]}, "input[0].content[0].text", "must be given"),
    (RESPONSE, {"instructions": ["Be kind."]}, "instructions", "must be text, not ['Be kind.']"),
    (MESSAGE, {"max_tokens": None}, "max_tokens", "must be given"),
    (MESSAGE, {"max_tokens": 0}, "max_tokens", "must be at least 1, not 0"),
    (MESSAGE, {"stop_sequences": "aaa", "top_k": -1}, "top_k", "must be at least 0, not -1"),
    (MESSAGE, {"messages": []}, "messages", "must have at least one message"),
    (MESSAGE, {"messages": None}, "messages", "must be given"),
    (MESSAGE, {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role",
     "must be one of user, assistant, system, not 'robot'"),
    (MESSAGE, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source",
     "must be given"),
    (MESSAGE, {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "I"}]}, "messages",
     "is not supported: the last one must not be th"),
    (MESSAGE, {"tool_choice": {"type": "any"}}, "tool_choice", "must name one of the tools"),
    (MESSAGE, {"tools": [{"name": "a"}]}, "tools[0].input_schema", "must be given"),
    (MESSAGE, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "must be given"),
    (MESSAGE, {"temprature": 1}, "temprature", "there is no field 'temprature' here; did you mean 'temperature'?"),
    (MESSAGE, {"messages": [{"role": "user", "content": "Hi"}, {"role": "system", "content": [], "clear_at":
     "soon"}]}, "messages[1].clear_at", "must be 'never' or 'next_user_message', not 'soon'"),
    (MESSAGE, {"messages": [{"role": "user", "content": "Hi"}, {"role": "system", "content": [{"type":
     "tool_addition"}]}]}, "messages[1].content[0].tool", "must be given"),
    (MESSAGE, {"messages": [{"role": "user", "content": "Hi"}, {"role": "system", "content": [{"type":
     "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": "c"}}}]}]},
     "messages[1].content[0].tool.definition.input_schema", "must be given"),
    (MESSAGE, {"messages": [{"role": "user", "content": "Hi"}, {"role": "system", "content": [{"type":
     "tool_result"}]}]}, "messages[1].content[0].type",
     "must be one of text, tool_addition, tool_removal, not 'tool_result'"),
    (MESSAGE, {"messages": [{"role": "user", "content": "Hi"}, {"role": "system", "content": [{"type": "tool_removal",
     "tool": {"type": "mcp_tool_reference"}}]}]}, "messages[1].content[0].tool.type",
     "'mcp_tool_reference' is not supported: nothing is run here"),
    (CHAT, {"messages": [{"role": "user", "content": "Hello", "images": ["x"]}]}, "messages[0].images",
     "there is no field 'messages[0].images' here"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "url": "u"}]}]}, "messages[0].content[0].url",
     "there is no field 'messages[0].content[0].url' here"),
    (CHAT, {"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role",
     "'function' is not supported: it is deprecated; give the role tool"),
    (CHAT, {'messages': [{'role': 'assistant', 'content': '', 'tool_calls': [{'id': 'c1', 'type': 'custom',
     'function': {'name': 'read', 'arguments': '{"path": "a"}'}}]}]}, "messages[0].tool_calls[0].type",
     "'custom' is not supported: tools are functions"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "read", "description": "Reads.", "parameters":
     {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}, "cache": 1}}]},
     "tools[0].function.cache", "there is no field 'tools[0].function.cache' here"),
    (CHAT, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}},
     "tool_choice", "requires a call, but there are no tools"),
    (CHAT, {"min_tokens": -1}, "min_tokens", "must be at least 0, not -1"),
    (CHAT, {"guided_json": {}}, "guided_json", "there is no field 'guided_json' here"),
    (RESPONSE, {"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm",
     "is not supported: ask for one token instead"),
    (RESPONSE, {"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type",
     "'compaction' is not supported: only its author can read it"),
    (RESPONSE, {'input': [{'type': 'function_call', 'call_id': 'c', 'name': 'n', 'arguments': '{}', 'async': True}]},
     "input[0].async", "is not supported: an answer is made of finished calls"),
    (RESPONSE, {"input": [{"type": "message", "role": "user", "content": "x", "files": []}]}, "input[0].files",
     "there is no field 'input[0].files' here"),
    (RESPONSE, {"tools": [{"type": "function", "name": "n", "parameters": {}, "allowed_callers": ["programmatic"]}]},
     "tools[0].allowed_callers", "is not supported: only the model calls tools; nothing else runs here"),
    (RESPONSE, {"tool_choice": {"type": "web_search"}}, "tool_choice.type",
     "'web_search' is not supported: there are auto, none, required"),
    (MESSAGE, {"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget",
     "is not supported: the model is not told how many tokens are left"),
    (MESSAGE, {"output_config": {"verbosity": "low"}}, "output_config.verbosity",
     "there is no field 'output_config.verbosity' here"),
    (MESSAGE, {"thinking": {"type": "enabled", "budget_tokens": 9, "display": "loud"}}, "thinking.display",
     "must be 'summarized' or 'omitted', not 'loud'"),
    (MESSAGE, {"thinking": {"type": "deep"}}, "thinking.type",
     "must be one of enabled, adaptive, between_tools, disabled, not 'deep'"),
    (MESSAGE, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type",
     "'bash_20250124' is not supported: only Anthropic's models know"),
    (MESSAGE, {"tools": [{"name": "n", "input_schema": {}, "input_examples": [{}]}]}, "tools[0].input_examples",
     "is not supported: templates have no place for"),
    (MESSAGE, {"tools": [{"name": "n", "input_schema": {}, "allowed_callers": ["code_execution_20260120"]}]},
     "tools[0].allowed_callers", "is not supported: only the model calls tools; nothing else runs here"),
    (MESSAGE, {"messages": [{"role": "user", "content": "Hello", "id": "m"}]}, "messages[0].id",
     "there is no field 'messages[0].id' here"),
    (MESSAGE, {"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]},
     "messages[0].content[0].type", "'server_tool_use' is not supported: only Anthropic's servers ca"),
    (MESSAGE, {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "t", "name": "n", "input":
     {}}]}]}, "messages[0].content[0].type", "'tool_use' is not supported: it cannot be in a user turn"),
    (MESSAGE, {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
     "messages[0].content[0].source.type", "'base64' is not supported: the model is given text and pictur"),
    (MESSAGE, {"system": [{"type": "image"}]}, "system[0].type",
     "'image' is not supported: pictures go into messages"),
    (TOKENS, {}, "prompt", "give either prompt or messages"),
    (TOKENS, {"prompt": "a", "messages": HI}, "prompt", "give either prompt or messages"),
    (TOKENS, {"messages": HI, "add_special_tokens": True}, "add_special_tokens",
     "is not supported: a chat has those that the model's template writes"),
    (TOKENS, {"messages": HI, "chat_template": "x"}, "chat_template", "is not supported: the model has its own"),
    (TOKENS, {"messages": HI, "continue_final_message": True}, "continue_final_message",
     "is not supported: an answer cannot be begun for the model"),
    (TOKENS, {"messages": HI, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools",
     "is not supported: it is set by the request itself"),
    (DETOKENS, {}, "tokens", "must be given"),
    (DETOKENS, {"tokens": [1, "2"]}, "tokens[1]", "must be a whole number, not '2'"),
    (CHAT, {"temprature": 1}, "temprature", "there is no field 'temprature' here; did you mean 'temperature'?"),
    (CHAT, {"messages": [{"role": "user", "content": "Hello", "contnt": "x"}]}, "messages[0].contnt",
     "there is no field 'messages[0].contnt' here; did you mean 'content'?"),
    (TEXT, {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    (TEXT, {"logprobs": 1.5}, "logprobs", "must be a whole number, not 1.5"),
    (CHAT, {"temperature": 10**400}, "temperature", "must be a number, not 1000000000"),
    (CHAT, {"seed": 2**64}, "seed", "must be at most 18446744073709551615, not 18446744073709551616"),
    (CHAT, {"user": "x" * 513}, "user", "may have 512 characters, not 513"),
    (RESPONSE, {"safety_identifier": "x" * 513}, "safety_identifier", "may have 512 characters, not 513"),
    (RESPONSE, {"prompt_cache_key": "x" * 513}, "prompt_cache_key", "may have 512 characters, not 513"),
    (TEXT, {"model": "x" * 513}, "model", "may have 512 characters, not 513"),
    (MESSAGE, {"model": "x" * 513}, "model", "may have 512 characters, not 513"),
    (CHAT, {"metadata": {"k" * 65: "v"}}, "metadata", "may have names of 64 characters, not 65"),
    (CHAT, {"metadata": {"k": "v" * 513}}, "metadata.k", "may have 512 characters, not 513"),
    (RESPONSE, {"metadata": {str(i): "v" for i in range(17)}}, "metadata", "may have 16 entries, not 17"),
    (CHAT, {"messages": HI * 4097}, "messages", "may have 4,096 entries, not 4,097"),
    (CHAT, {"tools": [TOOL] * 1025}, "tools", "may have 1,024 entries, not 1,025"),
    (CHAT, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [{}] * 1025}}},
     "tool_choice.allowed_tools.tools", "may have 1,024 entries, not 1,025"),
    (RESPONSE, {"input": [{"role": "user", "content": "Hi"}] * 16_385}, "input", "may have 16,384 entries, not 16,385"),
    (RESPONSE, {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}] * 1025}]},
     "tools[0].tools", "may have 1,024 entries, not 1,025"),
    (MESSAGE, {"messages": HI * 4097}, "messages", "may have 4,096 entries, not 4,097"),
    (COUNT, {"tools": [{"type": "web_search"}] * 1025}, "tools", "may have 1,024 entries, not 1,025"),
    (TEMPLATE, {"messages": HI * 4097}, "messages", "may have 4,096 entries, not 4,097"),
    (TEMPLATE, {"messages": None}, "messages", "must be given"),
]  # fmt: skip
CODES = (
    ("is not supported", "unsupported_parameter"), ("there is no field", "unknown_parameter"),
    (r"must be given|needs |for streams only|give either|at least one message|over 128", None),
    ("", "invalid_value"),
)  # fmt: skip


@pytest.fixture(scope="module")
def application() -> Any:
    return make_app(Service(Model(), "demo"))  # type: ignore[arg-type]


def said(application: Any, route: str, body: bytes, *headers: tuple[str, str]) -> Said:
    headers = (("Content-Type", "application/json"), *headers)
    return asyncio.run(answer(application, Asked("POST", route, headers, body)))


@pytest.mark.parametrize(("route", "fields", "param", "words"), WRONG)
def test_what_is_wrong_is_said_by_name(application: Any, route: str, fields: dict[str, Any], param: str, words: str):
    found = said(application, route, json.dumps({**LEAST[route], **fields}).encode())
    error = found.json["error"]
    assert found.status == 400
    assert error["message"].startswith((words, f"{param} {words}"))
    assert "\n" not in error["message"]
    if not route.startswith(MESSAGE):
        code = next(code for pattern, code in CODES if re.search(pattern, error["message"]))
        assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


HALF = "the body has half a character, which no text can hold"
NO_JSON: list[tuple[bytes, int, str]] = [
    (b"", 400, "the body is not JSON"),
    (b"[]", 400, "the body must be a JSON object"),
    (b"{", 400, "the body is not JSON"),
    (b'{"a": NaN}', 400, "the body is not JSON: NaN is not a number in JSON"),
    (b'{"a": Infinity}', 400, "the body is not JSON: Infinity is not a number in JSON"),
    (b'{"a": 1e999}', 400, "the body is not JSON: 1e999 is too large a number"),
    (b'{"a": ' + b"9" * 5000 + b"}", 400, "the body is not JSON: a number has too many digits"),
    (b'{"a": "\\ud800"}', 400, HALF),
    (b'{"\\uDFFF": 1}', 400, HALF),
    (b'{"a": "\xed\xa0\x80"}', 400, "the body is not JSON"),
    (b'{"a": "\xff"}', 400, "the body is not JSON"),
    ('{"a": 1}'.encode("utf-16"), 400, "the body is not JSON"),
    (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", 400, "the body is nested too deeply"),
    (b'{"a": ' + b"[" * 100_000, 400, "the body is nested too deeply"),
    (b'{"a": [' + b"[]," * (1 << 20) + b"[], 1]}", 400, "the body may have 1,048,576 commas"),
    (b'{"a": "' + b"x" * (32 << 20) + b'"}', 413, "the body may have 33,554,432 bytes"),
]


@pytest.mark.parametrize(("raw", "status", "words"), NO_JSON)
def test_what_is_no_body_is_refused(application: Any, raw: bytes, status: int, words: str):
    for route in (CHAT, MESSAGE):
        found = said(application, route, raw)
        assert (found.status, found.json["error"]["message"][: len(words)]) == (status, words)
        assert found.headers["x-request-id"].startswith("req_")


def test_every_route_refuses_a_field_that_it_does_not_know(application: Any):
    for route, body in BODIES.items():
        if route == "/session":  # it takes nothing
            continue
        found = said(application, route, json.dumps({**body, "surprise": 1}).encode())
        assert (found.status, found.json["error"]["message"]) == (400, "there is no field 'surprise' here")
        many = said(application, route, json.dumps({f"x{i}": 1 for i in range(100_000)}).encode())
        assert (many.status, many.json["error"]["message"]) == (400, "there is no field 'x0' here")


def test_many_wrong_values_are_told_by_the_first(application: Any):
    for route, body, name in (
        (TEXT, {"prompt": [None] * 500_000}, "prompt[0]"),
        (CHAT, {"messages": HI, "stop_token_ids": ["x"] * 500_000}, "stop_token_ids[0]"),
        (CHAT, {"messages": [{"role": "user", "content": [1] * 500_000}]}, "messages[0].content[0]"),
        (CHAT, {"messages": HI, "logit_bias": {f"x{i}": 1 for i in range(500_000)}}, "logit_bias"),
        (RESPONSE, {"input": "x", "metadata": {f"{i}": 1 for i in range(500_000)}}, "metadata"),
        (DETOKENS, {"tokens": [-1] * 500_000}, "tokens[0]"),
    ):
        found = said(application, route, json.dumps(body).encode())
        assert (found.status, found.json["error"]["param"]) == (400, name)


def test_chat_completions_are_also_there_without_the_version(application: Any):
    found = said(application, "/chat/completions", b'{"messages": 1}')
    assert (found.status, found.json["error"]["param"]) == (400, "messages")


# -- bodies and arguments that are taken ---------------------------------------------------------------


def test_lists_and_names_may_be_as_long_as_the_bounds_say():
    names = dict.fromkeys(("user", "safety_identifier", "prompt_cache_key", "model"), "x" * 512)
    metadata = {f"{i:064}": "v" * 512 for i in range(16)}
    chat = read(ChatRequest, {"messages": HI * 4096, "tools": [TOOL] * 1024, "metadata": metadata, **names})
    assert (len(chat.messages), len(chat.tools)) == (4096, 1024)
    response = read(ResponseRequest, {"input": HI * 16_384, "metadata": metadata, **names})
    assert (len(response.input), response.metadata) == (16_384, metadata)
    assert read(ResponseRequest, {"input": "x" * 100_000}), "a text is no list"


def test_what_a_large_body_asks_is_read_beside_the_event_loop():
    def reader(size: int) -> int:
        raw = json.dumps({"a": "x" * size}).encode()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": raw, "more_body": False}

        request = Request({"type": "http", "headers": [], "state": {"bodies": Bodies(), "size": 0}}, receive)
        return asyncio.run(read_json(request, lambda _: threading.get_ident()))

    assert reader(10) == threading.get_ident()
    assert reader(1 << 18) != threading.get_ident()


def test_arguments_of_a_call_are_an_object():
    assert (arguments_of('{"city": "Oslo"}'), arguments_of("")) == ({"city": "Oslo"}, {})
    assert arguments_of('{"a": "\\ud83d\\ude00 \\\\ud800"}') == {"a": "\U0001f600 \\ud800"}
    assert arguments_of('{"a": ' + "[" * 63 + "]" * 63 + "}") == json.loads('{"a": ' + "[" * 63 + "]" * 63 + "}")


@pytest.mark.parametrize(
    "text",
    [
        "{oops", "[1]", "[" * 100_000, '{"a": ' * 5000 + "1" + "}" * 5000, '{"a": ' + "[" * 64 + "]" * 64 + "}",
        '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"\\udfff": 1}',
    ],
)  # fmt: skip
def test_arguments_that_no_body_could_be_stay_text(text: str):
    assert arguments_of(text) == text
