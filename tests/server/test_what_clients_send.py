"""Bodies as clients that are in use send them are taken; those of agents were recorded (``test_recorded_requests``).

Where they are from: Zed `crates/open_ai/src/open_ai.rs`; CodeCompanion in vllm-project/vllm #10463; the others as their
packages serialise.
"""

from typing import Any

import pytest

from splitinfer.server.ask import Chat
from splitinfer.server.fields import read
from splitinfer.server.openai.chat import ChatRequest, chat_ask

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
    "guidellm": {
        "model": "m", "messages": [{**HELLO, "content": [{"type": "text", "text": "Hello"}]}], "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "max_completion_tokens": 9,
        "stop": None, "ignore_eos": True,
    },
    "mlx-lm's own tests": {
        "model": "chat_model", "max_tokens": 10, "temperature": 0.7, "top_p": 0.85, "messages": [HELLO],
        "repetition_penalty": 0.0, "repetition_context_size": 20, "presence_context_size": 20, "xtc_probability": 0.0,
        "xtc_threshold": 0.0, "adapters": None, "draft_model": "default_model", "num_draft_tokens": 3,
        "role_mapping": None,
    },
    "a program for llama.cpp's server": {
        "model": "m", "messages": [HELLO], "cache_prompt": True, "typical_p": 1, "tfs_z": 1.0, "top_n_sigma": -1.0,
        "mirostat": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "dynatemp_range": 0, "dynatemp_exponent": 1,
        "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "repeat_penalty": 1.0,
        "repeat_last_n": 64, "id_slot": -1, "n_probs": 0, "min_keep": 0, "samplers": [], "timings_per_token": False,
    },
    "llama.cpp's own values": {
        "model": "m", "messages": [HELLO], "dynatemp_range": 0.0, "dry_multiplier": 0.0, "mirostat": 0, "grammar": "",
        "n_discard": 0, "n_indent": 0, "t_max_predict_ms": 0, "lora": [], "image_data": [], "response_fields": [],
        "return_progress": False, "post_sampling_probs": False, "reasoning_format": "auto", "parse_tool_calls": True,
        "thinking_forced_open": False, "reasoning_in_content": False, "reasoning_budget": -1, "max_tokens": -1,
    },
    "LM Studio": {"model": "m", "messages": [HELLO], "max_tokens": -1, "ttl": 300, "repeat_penalty": 1.0, "top_k": 40},
    "vLLM's own values": {
        "model": "m", "messages": [HELLO], "bad_words": [], "return_token_ids": False, "include_reasoning": True,
        "return_tokens_as_token_ids": False, "priority": 0, "use_beam_search": False, "max_completion_tokens": -1,
    },
    "a program for Ollama": {"model": "m", "messages": [HELLO], "keep_alive": "5m", "reasoning_effort": "none"},
}  # fmt: skip


@pytest.mark.parametrize("name", CHATS)
def test_chats(name: str):
    ask, _ = chat_ask(read(ChatRequest, CHATS[name]))
    assert isinstance(ask.prompt, Chat)
    assert any(message["content"] == "Hello" for message in ask.prompt.messages)
