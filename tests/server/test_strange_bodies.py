"""Whatever stands anywhere in a request, it is taken or refused in a sentence: no other error comes out."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgpack
import pytest

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.server.anthropic.messages import CountRequest, MessageRequest, message_ask
from splitinfer.server.ask import Ask, Chat
from splitinfer.server.fields import read
from splitinfer.server.openai.chat import ChatRequest, chat_ask
from splitinfer.server.openai.completions import CompletionRequest, completions_of
from splitinfer.server.openai.responses import InputRequest, ResponseRequest, response_ask
from splitinfer.server.own_routes import TokenizeRequest, tokenize_ask
from splitinfer.server.problem import Problem

NUMBERS = [0, -1, 2**70, -(10**400), 10**400, 1.5, 1e308]
STRANGE = [None, True, *NUMBERS, "", "x", [], [[]], ["x"], {}, {"x": []}, {"type": []}]
SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.1,
    "frequency_penalty": 0.1, "seed": 1, "stop": ["x"], "stop_token_ids": [1], "ignore_eos": True, "stream": True,
    "logit_bias": {"1": 2.0},
}  # fmt: skip
FUNCTION = {"name": "w", "description": "d", "parameters": {"type": "object"}, "strict": True}
PARTS = [{"type": "text", "text": "x"}]
SPACE = {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]}
CHAT = {
    **SAMPLING, "model": "m", "max_tokens": 5, "n": 2, "logprobs": True, "top_logprobs": 1, "parallel_tool_calls": True,
    "stream_options": {"include_usage": True}, "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "auto", "reasoning_effort": "low", "chat_template_kwargs": {"x": 1}, "enable_thinking": True,
    "messages": [
        {"role": "developer", "content": "x"}, {"role": "user", "content": PARTS},
        {"role": "assistant", "content": None, "reasoning": "x",
         "tool_calls": [{"id": "c", "type": "function", "function": {"name": "w", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ],
}  # fmt: skip
COMPLETIONS = {
    **SAMPLING, "model": "m", "max_tokens": 5, "n": 2, "best_of": 2, "echo": True, "prompt": ["x", [1, 2]],
    "stream_options": {"include_usage": True},
}  # fmt: skip
COUNTED = {
    "model": "m", "instructions": "x", "tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}, SPACE],
    "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"}, "truncation": "disabled",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c", "name": "w", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "custom_tool_call", "call_id": "c", "name": "w", "input": "x"},
    ],
}  # fmt: skip
RESPONSES = {
    **SAMPLING, **COUNTED, "max_output_tokens": 5, "include": ["message.output_text.logprobs"], "top_logprobs": 1,
    "metadata": {"a": "b"}, "store": False, "stream_options": {"include_obfuscation": True},
}  # fmt: skip

BLOCK = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
TEXT_SOURCE = {"type": "text", "data": "x", "media_type": "text/plain"}
MESSAGES = {
    "model": "m", "max_tokens": 5, "system": [BLOCK], "stop_sequences": ["x"], "stream": True, "temperature": 0.5,
    "top_p": 0.9, "top_k": 4, "thinking": {"type": "enabled", "budget_tokens": 9, "display": "omitted"},
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "output_config": {"effort": "low"},
    "tools": [{"name": "w", "description": "d", "input_schema": {"type": "object"}}, {"type": "web_search_20250305"}],
    "messages": [
        {"role": "user", "content": [BLOCK, {"type": "document", "title": "t", "source": TEXT_SOURCE}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "x", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "t", "name": "w", "input": {"a": 1}, "caller": {"type": "direct"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "is_error": True,
             "content": [BLOCK, {"type": "tool_reference", "tool_name": "w"}]},
            {"type": "search_result", "source": "s", "title": "t", "content": [BLOCK]},
            {"type": "document", "source": {"type": "content", "content": [BLOCK]}}]},
        {"role": "system", "content": "x"},
    ],
}  # fmt: skip
TOKENIZED = {
    "model": "m", "messages": [{"role": "user", "content": PARTS}], "tools": CHAT["tools"], "reasoning_effort": "low",
    "add_generation_prompt": False, "add_special_tokens": False, "return_token_strs": True, "verbosity": "low",
    "chat_template_kwargs": {"x": 1},
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to everything inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield (*path, key)
        yield from places(each, (*path, key))


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


def asks_of_tokenizing(body: Mapping[str, Any]) -> list[Ask]:
    asked, _ = tokenize_ask(read(TokenizeRequest, body))
    return [Ask(asked if isinstance(asked, Chat) else asked.text, {})]


@pytest.mark.parametrize(
    ("asks_of", "body"),
    [
        (asks_of_messages, MESSAGES),
        (asks_of_tokenizing, TOKENIZED),
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
