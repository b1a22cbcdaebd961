"""`POST /v1/messages` and `/v1/messages/count_tokens`: a request as an `Ask`.

A message of this API is a list of blocks. For chat templates, which know OpenAI's form, a turn of the user with results
of tools becomes one message for each result, and then its text; a turn of the assistant becomes one message with its
text, its thinking and its calls. The system's words stand beside the messages, as text or as blocks, and some clients
also put them among the messages; those at the beginning become one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splitinfer.server import values
from splitinfer.server.ask import Ask, Chat
from splitinfer.server.fields import HONOURED, Honoured, Ignored, Refused, Treatment, honoured, is_empty, is_one_of
from splitinfer.server.openai.messages import merged_systems
from splitinfer.server.problem import Problem, unsupported

_MAX_STOPS = 16
_MOST_TOKENS = 2**31 - 1
_NO_SANDBOX = "nothing is run here"
_NO_STORE = "nothing is stored here; give the whole conversation as messages"
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""What makes Anthropic's own helpers send whole conversations (anthropic 2.12.0, ``lib/threads``, recovers_from)."""
_NO_BILLS = Ignored("nothing is billed here")

COUNTED: Mapping[str, Treatment] = {
    "model": HONOURED,
    "messages": Honoured("text, thinking, calls of tools and their results"),
    "system": Honoured("also among the messages"),
    "tools": Honoured("functions; those that Anthropic's servers run are left out"),
    "tool_choice": Honoured("auto and none"),
    "thinking": Honoured("whether, where the model's template knows it; not for how long"),
    "output_config": Honoured("effort, where the model's template knows it"),
    "cache_control": Ignored("a prompt's beginning is found in the cache by its tokens"),
    "speed": Refused("there is one speed", is_one_of("standard")),
    "user_profile_id": Ignored("requests are told apart by their keys"),
    "workspace_id": Ignored("requests are told apart by their keys"),
    "context_management": Ignored("a conversation is taken as it is, and refused with the numbers if it is too long"),
    "mcp_servers": Refused(_NO_SANDBOX, is_empty),
    "output_format": Refused("answers cannot be held to a format"),
    "billing_policy": _NO_BILLS,
    "compaction": Ignored("what is counted is the conversation as it was sent"),
    "betas": Ignored("what a beta adds is treated field by field"),
}
FIELDS: Mapping[str, Treatment] = {
    **COUNTED,
    "max_tokens": HONOURED,
    "stop_sequences": Honoured(f"at most {_MAX_STOPS}"),
    "stream": HONOURED,
    "temperature": HONOURED,
    "top_p": HONOURED,
    "top_k": HONOURED,
    "metadata": Ignored("requests are told apart by their keys"),
    "service_tier": Ignored("there is one tier; priority is a header"),
    "inference_geo": Ignored("answers come from this machine's pipeline"),
    "container": Refused(_NO_SANDBOX),
    "diagnostics": Ignored("it changes no answer"),
    "thread": Refused(_NO_STORE, details=_NO_THREADS),
    "compaction": Refused("a conversation is taken as it is, and not summarised"),
    "fallbacks": Ignored("no question is declined here for another model to answer"),
    "fallback_credit_token": _NO_BILLS,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a client is shown of an answer."""

    model: str
    streams: bool = False


def message_ask(body: Mapping[str, Any]) -> tuple[Ask, Shape]:
    """What a request asks, and in what shape.

    Raises:
        Problem: 400, in a sentence that names the field.
    """
    given = honoured(body, FIELDS)
    if "max_tokens" not in given:
        raise Problem(400, "max_tokens must be given", param="max_tokens")
    shape = Shape(values.text("model", given.get("model", "")), values.flag("stream", given.get("stream", False)))
    most = values.whole("max_tokens", given["max_tokens"], 1, _MOST_TOKENS)
    return Ask(_chat(given), _sampling(given), most, one_call=_is_one_call(given)), shape


def counted_chat(body: Mapping[str, Any]) -> Chat:
    """The conversation whose tokens are to be counted.

    Raises:
        Problem: 400, in a sentence that names the field.
    """
    return _chat(honoured(body, COUNTED))


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {n: values.number(n, given[n]) for n in ("temperature", "top_p") if n in given}
    if "top_k" in given:
        found["top_k"] = values.whole("top_k", given["top_k"], 0, _MOST_TOKENS)
    if "stop_sequences" in given:
        found["stop"] = values.texts("stop_sequences", given["stop_sequences"], _MAX_STOPS)
    return found


def _chat(given: Mapping[str, Any]) -> Chat:
    messages = [{"role": "system", "content": text}] if (text := _system(given.get("system"))) else []
    for i, one in enumerate(values.listing("messages", given.get("messages"))):
        messages += _turn(f"messages[{i}]", one)
    if all(message["role"] == "system" for message in messages):
        raise Problem(400, "messages must have at least one message", param="messages")
    if messages[-1]["role"] == "assistant":
        raise unsupported("messages", "the last one must not be the assistant's: an answer cannot be begun for it")
    return Chat(tuple(merged_systems(messages)), _tools(given), _options(given))


def _system(given: Any) -> str:
    """The system's words, in blocks or as they are."""
    return "" if given is None else _text_of("system", given)


def _turn(name: str, given: Any) -> list[dict[str, Any]]:
    turn = values.mapping(name, given)
    content = turn.get("content")
    match turn.get("role"):
        case "system":
            return [{"role": "system", "content": _text_of(f"{name}.content", content)}]
        case "user":
            return _user(f"{name}.content", content)
        case "assistant":
            return [_assistant(f"{name}.content", content)]
        case role:
            raise values.wrong(f"{name}.role", "user, assistant or system", role)


def _user(name: str, content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results, texts = [], []
    for i, block in enumerate(values.listing(name, content)):
        where, kind = f"{name}[{i}]", _kind(f"{name}[{i}]", block)
        if kind == "tool_result":
            call_id = values.text(f"{where}.tool_use_id", block.get("tool_use_id"))
            text = _text_of(f"{where}.content", block.get("content") or "")
            results.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            texts.append(_block_text(where, block))
    return [*results, *([{"role": "user", "content": "\n".join(texts)}] if texts or not results else [])]


def _assistant(name: str, content: Any) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    text, thinking, calls = [], [], []
    for i, block in enumerate(values.listing(name, content)):
        where = f"{name}[{i}]"
        match _kind(where, block):
            case "thinking":
                thinking.append(values.text(f"{where}.thinking", block.get("thinking")))
            case "redacted_thinking":
                continue  # nobody but its author can read it
            case "tool_use":
                calls.append(_call(where, block))
            case _:
                text.append(_block_text(where, block))
    made: dict[str, Any] = {"role": "assistant", "content": "".join(text)}
    if thinking:
        made["reasoning_content"] = "".join(thinking)
    return made | ({"tool_calls": calls} if calls else {})


def _call(name: str, block: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": values.text(f"{name}.name", block.get("name")),
        "arguments": values.mapping(f"{name}.input", block.get("input", {})),
    }
    return {"id": values.text(f"{name}.id", block.get("id")), "type": "function", "function": function}


def _text_of(name: str, content: Any) -> str:
    """Text, or blocks of text."""
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(f"{name}[{i}]", one) for i, one in enumerate(values.listing(name, content)))


def _kind(name: str, block: Any) -> Any:
    return values.mapping(name, block).get("type")


def _block_text(name: str, block: Any) -> str:
    kind = _kind(name, block)
    if kind != "text":
        raise unsupported(f"{name}.type", "the model is given text only", kind)
    return values.text(f"{name}.text", block.get("text"))


def _tools(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The functions that the model may call, in OpenAI's form, which templates know; none where it shall not."""
    tools = [_tool(f"tools[{i}]", one) for i, one in enumerate(values.listing("tools", given.get("tools", [])))]
    choice = values.mapping("tool_choice", given.get("tool_choice", {"type": "auto"})).get("type")
    if choice not in ("auto", "none"):
        raise unsupported("tool_choice.type", "a model cannot be made to call a tool; auto and none are", choice)
    return tuple(tool for tool in tools if tool is not None) if choice == "auto" else ()


def _tool(name: str, given: Any) -> Mapping[str, Any] | None:
    tool = values.mapping(name, given)
    if tool.get("type", "custom") not in ("custom", None):
        return None  # run by Anthropic's servers; agents list them beside their own
    function = {
        "name": values.text(f"{name}.name", tool.get("name")),
        "description": values.text(f"{name}.description", tool.get("description") or ""),
        "parameters": values.mapping(f"{name}.input_schema", tool.get("input_schema")),
    }
    return {"type": "function", "function": function}


def _is_one_call(given: Mapping[str, Any]) -> bool:
    choice = values.mapping("tool_choice", given.get("tool_choice", {}))
    return values.flag("tool_choice.disable_parallel_tool_use", choice.get("disable_parallel_tool_use", False))


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the template is told of thinking."""
    config = values.mapping("output_config", given.get("output_config", {}))
    if config.get("format") is not None:
        raise unsupported("output_config.format", "answers cannot be held to a format")
    effort = config.get("effort")
    options: dict[str, Any] = (
        {} if effort is None else {"reasoning_effort": values.text("output_config.effort", effort)}
    )
    if "thinking" in given:
        kind = values.mapping("thinking", given["thinking"]).get("type")
        options["enable_thinking"] = values.text("thinking.type", kind) != "disabled"
    return options
