"""Bodies as clients that are in use send them: what asks for nothing is taken, and the rest is refused by name.

Where they are from: Zed `crates/open_ai/src/open_ai.rs`; Codex `codex-rs/codex-api/src/common.rs` and
`codex-rs/tools/src/tool_spec.rs`; Claude Code as captured by mitmproxy (chief-builder/claude-code-analytics) and in
ericc-ch/copilot-api #217; CodeCompanion in vllm-project/vllm #10463; the others as their packages serialise.
"""

from typing import Any

import pytest

from splitinfer.server.anthropic.messages import counted_chat, message_ask
from splitinfer.server.ask import Chat
from splitinfer.server.openai.chat import chat_ask
from splitinfer.server.openai.responses import response_ask
from splitinfer.server.problem import Problem

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": PARAMETERS}}
CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
HELLO = {"role": "user", "content": "Hello"}

CHATS: dict[str, dict[str, Any]] = {
    "Zed": {
        "model": "m", "messages": [{"role": "system", "content": "s"}, HELLO], "stream": True,
        "stream_options": {"include_usage": True}, "max_completion_tokens": 100, "temperature": 1.0,
        "tool_choice": "auto", "parallel_tool_calls": False, "tools": [READ], "prompt_cache_key": "thread",
    },
    "Open WebUI": {
        "model": "m", "messages": [HELLO], "stream": True, "stream_options": {"include_usage": True}, "user": "chat",
        "temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.0, "seed": 0, "stop": [], "tools": [], "metadata": {},
    },
    "Continue": {
        "model": "m", "messages": [HELLO], "max_tokens": 2048, "temperature": 0.5, "top_p": None, "stop": None,
        "stream": True, "tools": [READ], "presence_penalty": None, "frequency_penalty": None, "prediction": None,
        "parallel_tool_calls": False,
    },
    "LangChain": {
        "model": "m", "messages": [{**HELLO, "name": None}], "n": 1, "stream": False, "store": False, "tools": [READ],
        "parallel_tool_calls": True, "response_format": {"type": "text"}, "service_tier": "auto", "logprobs": None,
        "metadata": {"run": "1"}, "reasoning_effort": None,
    },
    "LiteLLM": {
        "model": "m", "user": "u", "safety_identifier": "u", "stream": False, "functions": None, "logit_bias": None,
        "messages": [
            {**HELLO, "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 0}], "function_call": None,
             "provider_specific_fields": {"refusal": None}, "annotations": [], "thinking_blocks": []},
            {"role": "tool", "tool_call_id": "c1", "name": "read", "content": "x"},
        ],
    },
    "OpenAI, its own answer handed back": {
        "model": "m",
        "messages": [
            HELLO,
            {"content": "Hi", "refusal": None, "role": "assistant", "annotations": None, "audio": None,
             "function_call": None, "tool_calls": None, "reasoning": "Hm.", "reasoning_content": "Hm."},
            HELLO,
        ],
        "verbosity": "low", "modalities": ["text"], "prompt_cache_retention": "24h",
    },
    "CodeCompanion": {"model": "m", "messages": [{**HELLO, "id": 1947269257, "opts": {"visible": False}}]},
    "vLLM's benchmark": {
        "model": "m", "messages": [HELLO], "ignore_eos": True, "min_tokens": 0, "repetition_penalty": 1.0,
        "stream": True, "stream_options": {"include_usage": True}, "skip_special_tokens": True, "top_k": -1,
        "add_generation_prompt": True, "continue_final_message": False, "length_penalty": 1.0, "echo": False,
    },
}  # fmt: skip
CODEX = {
    "model": "gpt-5-codex", "instructions": "s", "tool_choice": "auto", "parallel_tool_calls": False, "store": False,
    "reasoning": {"effort": "medium", "summary": "auto", "context": None}, "stream": True, "service_tier": "priority",
    "include": ["reasoning.encrypted_content"], "prompt_cache_key": "1", "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "1"},
    "tools": [
        {"type": "function", "name": "exec", "description": "d", "strict": False, "parameters": PARAMETERS},
        {"type": "custom", "name": "apply_patch", "description": "d",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}},
        {"type": "web_search", "external_web_access": False}, {"type": "local_shell"},
        {"type": "tool_search", "execution": "client", "description": "d", "parameters": PARAMETERS},
        {"type": "image_generation", "output_format": "png"},
        {"type": "namespace", "name": "mcp__docs__", "description": "d", "tools": [
            {"type": "function", "name": "find", "description": "d", "strict": False, "defer_loading": True,
             "parameters": PARAMETERS}]},
    ],
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}],
         "phase": "commentary", "id": "msg_1", "status": "completed"},
        {"type": "function_call", "name": "exec", "arguments": "{}", "call_id": "c1", "id": None, "namespace": None},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
    ],
}  # fmt: skip
CLAUDE_CODE = {
    "model": "m", "max_tokens": 32000, "stream": True, "temperature": 1,
    "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "metadata": {"user_id": "user_1"}, "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "diagnostics": {"previous_message_id": None}, "betas": ["context-management-2025-06-27"],
    "tools": [
        {"name": "Read", "description": "d", "input_schema": PARAMETERS, "cache_control": {"type": "ephemeral"},
         "eager_input_streaming": True, "defer_loading": False},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "tool_use", "id": "t1", "name": "Read", "input": {}, "caller": {"type": "direct"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "x", "is_error": False},
            {"type": "text", "text": "<system-reminder>r</system-reminder>"}]},
        {"role": "system", "content": "Be brief."},
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CHATS)
def test_chats(name: str):
    ask, _ = chat_ask(CHATS[name])
    assert isinstance(ask.prompt, Chat)
    assert any(message["content"] == "Hello" for message in ask.prompt.messages)


def test_codex():
    ask, shape = response_ask(CODEX)
    assert isinstance(ask.prompt, Chat)
    assert [tool["function"]["name"] for tool in ask.prompt.tools] == ["exec", "mcp__docs__find"]
    assert [message["role"] for message in ask.prompt.messages] == ["system", "user", "assistant", "tool"]
    assert (ask.one_call, shape.packs_reasoning) == (True, True)


def test_claude_code():
    ask, shape = message_ask(CLAUDE_CODE)
    assert isinstance(ask.prompt, Chat)
    assert [tool["function"]["name"] for tool in ask.prompt.tools] == ["Read"]
    assert [message["role"] for message in ask.prompt.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "user",
        "system",
    ]
    assert (shape.manages_context, shape.hides_thinking) == (True, False)
    counted = {name: CLAUDE_CODE[name] for name in ("model", "system", "tools", "messages", "thinking")}
    assert counted_chat(counted).messages == ask.prompt.messages


@pytest.mark.parametrize(
    ("asks", "param"),
    [
        ({"messages": [{**HELLO, "images": ["x"]}]}, "messages[0].images"),
        ({"messages": [{**HELLO, "content": [{"type": "text", "url": "u"}]}]}, "messages[0].content[0].url"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{**CALL, "type": "custom"}]}]},
         "messages[0].tool_calls[0].type"),
        ({"tools": [{**READ, "function": {**READ["function"], "cache": 1}}]}, "tools[0].function.cache"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}},
         "tool_choice.allowed_tools.mode"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"guided_json": {}}, "guided_json"),
    ],
)  # fmt: skip
def test_what_asks_for_more_is_named(asks: dict[str, Any], param: str):
    with pytest.raises(Problem) as caught:
        chat_ask({"model": "m", "messages": [HELLO], **asks})
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.rsplit(".", 1)[-1].split("[")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("asks", "param"),
    [
        ({"context_management": [{"type": "compaction", "compact_threshold": 1000}]}, "context_management"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "n", "arguments": "{}", "async": True}]},
         "input[0].async"),
        ({"input": [{"type": "message", "role": "user", "content": "x", "files": []}]}, "input[0].files"),
        ({"tools": [{"type": "function", "name": "n", "parameters": {}, "allowed_callers": ["programmatic"]}]},
         "tools[0].allowed_callers"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"access_programs": {"cyber": "standard"}}, "access_programs"),
    ],
)  # fmt: skip
def test_what_asks_for_more_of_responses_is_named(asks: dict[str, Any], param: str):
    with pytest.raises(Problem) as caught:
        response_ask({"model": "m", "input": "Hello", **asks})
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("asks", "param"),
    [
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
        ({"output_config": {"verbosity": "low"}}, "output_config.verbosity"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9, "display": "loud"}}, "thinking.display"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"inference_geo": "us"}, "inference_geo"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "n", "input_schema": {}, "input_examples": [{}]}]}, "tools[0].input_examples"),
        ({"tools": [{"name": "n", "input_schema": {}, "allowed_callers": ["code_execution_20260120"]}]},
         "tools[0].allowed_callers"),
        ({"messages": [{**HELLO, "id": "m"}]}, "messages[0].id"),
        ({"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "t", "name": "n", "input": {}}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
         "messages[0].content[0].source.type"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"fallbacks": [{"model": "n"}]}, "fallbacks"),
    ],
)  # fmt: skip
def test_what_asks_for_more_of_messages_is_named(asks: dict[str, Any], param: str):
    with pytest.raises(Problem) as caught:
        message_ask({"model": "m", "max_tokens": 9, "messages": [HELLO], **asks})
    assert (caught.value.status, caught.value.param) == (400, param)
