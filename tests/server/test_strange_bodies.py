"""Whatever stands anywhere in a request, it is taken or refused in a sentence: no other error comes out."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgpack
import pytest
from mutating import BODIES, places

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.server.anthropic.messages import CountRequest, MessageRequest, message_ask
from splitinfer.server.ask import Ask
from splitinfer.server.fields import read
from splitinfer.server.openai.chat import ChatRequest, chat_ask
from splitinfer.server.openai.completions import CompletionRequest, completions_of
from splitinfer.server.openai.responses import InputRequest, ResponseRequest, response_ask
from splitinfer.server.own_routes import TokenizeRequest, tokenize_ask
from splitinfer.server.problem import Problem

NUMBERS = [0, -1, 2**70, -(10**400), 10**400, 1.5, 1e308]
STRANGE = [None, True, *NUMBERS, "", "x", [], [[]], ["x"], {}, {"x": []}, {"type": []}]
FUNCTION = {"name": "w", "description": "d", "parameters": {"type": "object"}, "strict": True}
BLOCK = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
TEXT_SOURCE = {"type": "text", "data": "x", "media_type": "text/plain"}
CHAT = BODIES["/v1/chat/completions"] | {
    "stream": True, "stream_options": {"include_usage": True}, "enable_thinking": True,
    "tools": [{"type": "function", "function": FUNCTION}],
}  # fmt: skip
CHAT["messages"] = [*CHAT["messages"], {"role": "assistant", "content": None, "reasoning": "x"}]
COMPLETIONS = BODIES["/v1/completions"] | {"best_of": 2, "stream": True, "stream_options": {"include_usage": True}}
COUNTED = BODIES["/v1/responses/input_tokens"] | {
    "parallel_tool_calls": True, "truncation": "disabled", "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"}, "tools": [
        {"type": "function", **FUNCTION}, {"type": "web_search"},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]},
    ],
}  # fmt: skip
COUNTED["input"] = [*COUNTED["input"], {"type": "custom_tool_call", "call_id": "c", "name": "w", "input": "x"}]
RESPONSES = BODIES["/v1/responses"] | COUNTED | {"store": False, "stream_options": {"include_obfuscation": True}}
MESSAGES = BODIES["/v1/messages"] | {
    "thinking": {"type": "enabled", "budget_tokens": 9, "display": "omitted"},
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "tools": [{"name": "w", "description": "d", "input_schema": {"type": "object"}}, {"type": "web_search_20250305"}],
}  # fmt: skip
MESSAGES["messages"] = [
    *MESSAGES["messages"],
    {"role": "assistant", "content": [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "tool_use", "id": "t", "name": "w", "input": {"a": 1}, "caller": {"type": "direct"}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t", "is_error": True,
         "content": [BLOCK, {"type": "tool_reference", "tool_name": "w"}]},
        {"type": "search_result", "source": "s", "title": "t", "content": [BLOCK]},
        {"type": "document", "title": "t", "source": TEXT_SOURCE},
        {"type": "document", "source": {"type": "content", "content": [BLOCK]}}]},
    {"role": "system", "content": "x"},
]  # fmt: skip
TOKENIZED = BODIES["/tokenize"] | {
    "reasoning_effort": "low", "add_generation_prompt": False, "add_special_tokens": False, "verbosity": "low",
}  # fmt: skip


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(body)
    inside = made
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return made


def asks_of_messages(body: Mapping[str, Any]) -> list[Ask]:
    counted = {name: value for name, value in body.items() if name in ("model", "messages", "system", "tools")}
    read(CountRequest, counted).chat()
    return [message_ask(read(MessageRequest, body))[0]]


@pytest.mark.parametrize(
    ("asks_of", "body"),
    [
        (asks_of_messages, MESSAGES),
        (lambda body: [Ask(tokenize_ask(read(TokenizeRequest, body)), {})], TOKENIZED),
        (lambda body: [chat_ask(read(ChatRequest, body))[0]], CHAT),
        (lambda body: completions_of(read(CompletionRequest, body)).asks, COMPLETIONS),
        (lambda body: [response_ask(read(ResponseRequest, body))[0]], RESPONSES),
        (lambda body: [Ask(read(InputRequest, body).chat(), {})], COUNTED),
    ],
)
def test_strange_values_are_taken_or_refused(
    asks_of: Callable[[Mapping[str, Any]], Sequence[Ask]], body: dict[str, Any]
):
    assert asks_of(body)
    refused = list[Problem]()
    for path in places(body):
        for value in STRANGE:
            try:
                for ask in asks_of(changed(body, path, value)):
                    msgpack.packb(asdict(ask.params(Recommended({}), 100)))  # as the stages are sent it
            except Problem as problem:
                refused.append(problem)
            except Exception as error:
                raise AssertionError(f"{path} = {value!r}") from error
    assert {problem.status for problem in refused} == {400}
    assert all(problem.message for problem in refused)
    assert len(refused) > 50
