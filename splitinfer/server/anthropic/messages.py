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
from splitinfer.server.anthropic.blocks import BLOCKS, SYSTEM_BLOCKS, TEXTS, block_text, text_of
from splitinfer.server.anthropic.system_turns import changed_tools, effort_of, words_of
from splitinfer.server.ask import MAX_MESSAGES, MAX_TOOLS, Ask, Chat
from splitinfer.server.common_fields import BY_KEYS, CACHED, FOR_TEMPLATE, NOT_FORCED
from splitinfer.server.fields import (
    HONOURED,
    LEFT_OUT,
    Honoured,
    Ignored,
    Kinds,
    Object,
    Refused,
    Size,
    Treatment,
    Values,
    honoured,
    honoured_object,
    is_empty,
    is_one_of,
)
from splitinfer.server.openai.messages import merged_systems
from splitinfer.server.problem import Problem, unsupported

_MAX_STOPS = 16
_NO_SANDBOX = "nothing is run here"
_BY_SERVERS = Ignored("left out: Anthropic's servers run it, and agents list it beside their own")
_NO_SCHEMA = Refused("its input is known to Anthropic's models only; give a tool with an input_schema")
_HOSTED = (
    "web_search_20250305",
    "web_search_20260209",
    "web_search_20260318",
    "web_fetch_20250910",
    "web_fetch_20260209",
    "web_fetch_20260309",
    "web_fetch_20260318",
    "code_execution_20250522",
    "code_execution_20250825",
    "code_execution_20260120",
    "code_execution_20260521",
    "tool_search_tool_bm25",
    "tool_search_tool_bm25_20251119",
    "tool_search_tool_regex",
    "tool_search_tool_regex_20251119",
)
_KNOWN_TO_ANTHROPICS = (
    "bash_20250124",
    "text_editor_20250124",
    "text_editor_20250429",
    "text_editor_20250728",
    "memory_20250818",
    "computer_toolset_20260801",
    "browser_toolset_20260801",
)
_NO_STORE = "nothing is stored here; give the whole conversation as messages"
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""What makes Anthropic's own helpers send whole conversations (anthropic 2.12.0, ``lib/threads``, recovers_from)."""
_OF_ANSWERS = ("id", "type", "model", "stop_reason", "stop_sequence", "stop_details", "usage", "container")
_TOOLS = Kinds(
    "Tools of Anthropic",
    "type",
    {
        "custom": Honoured(
            inside=Object(
                "A tool of Anthropic",
                {
                    "type": HONOURED,
                    "name": HONOURED,
                    "description": HONOURED,
                    "input_schema": HONOURED,
                    "cache_control": CACHED,
                    "strict": Ignored("agents send it with every tool; calls are not held to the schema"),
                    "defer_loading": Ignored("the model is told of all tools at once"),
                    "eager_input_streaming": Ignored("the input of a call comes in one piece"),
                    "input_examples": Refused("templates have no place for them; say them in description", is_empty),
                    "allowed_callers": Refused(
                        "the model itself calls tools: nothing else runs here",
                        Values((), "a list with `direct`", lambda given: isinstance(given, list) and "direct" in given),
                    ),
                },
            )
        ),
        **dict.fromkeys(_HOSTED, _BY_SERVERS),
        **dict.fromkeys(_KNOWN_TO_ANTHROPICS, _NO_SCHEMA),
    },
    default="custom",
    others=_BY_SERVERS,
)
_ONE_CALL: Mapping[str, Treatment] = {"type": HONOURED, "disable_parallel_tool_use": HONOURED}
_CHOICES = Kinds(
    "Choice of tools of Anthropic",
    "type",
    {
        "auto": Honoured(inside=Object("The choice auto", _ONE_CALL)),
        "none": Honoured(inside=Object("The choice none", _ONE_CALL)),
        "any": NOT_FORCED,
        "tool": NOT_FORCED,
    },
)
_DISPLAY = Honoured("`summarized` shows it whole; `omitted` leaves it out")
_THINKING = Kinds(
    "Thinking",
    "type",
    {
        "enabled": Honoured(
            inside=Object(
                "Thinking that is enabled",
                {
                    "type": HONOURED,
                    "budget_tokens": Ignored(
                        "how long it thinks is the model's own affair; max_tokens bounds the answer"
                    ),
                    "display": _DISPLAY,
                },
            )
        ),
        "adaptive": Honoured(
            "as `enabled`", Object("Thinking that is adaptive", {"type": HONOURED, "display": _DISPLAY})
        ),
        "between_tools": Honoured("as `enabled`", Object("Thinking between tools", {"type": HONOURED})),
        "disabled": Honoured(inside=Object("Thinking that is disabled", {"type": HONOURED})),
    },
)
_MESSAGES = Kinds(
    "Messages of Anthropic",
    "role",
    {
        "user": Honoured(
            inside=Object("A turn of the user", {"role": HONOURED, "content": Honoured("text, or blocks", each=BLOCKS)})
        ),
        "assistant": Honoured(
            inside=Object(
                "A turn of the assistant",
                {
                    "role": HONOURED,
                    "content": Honoured("text, or blocks", each=BLOCKS),
                    **dict.fromkeys(_OF_ANSWERS, Ignored("of an answer that is handed back whole, its content counts")),
                },
            )
        ),
        "system": Honoured(
            inside=Object(
                "A turn of the system",
                {
                    "role": HONOURED,
                    "content": Honoured("text, or blocks", each=SYSTEM_BLOCKS),
                    "clear_at": Honoured("`next_user_message` leaves it out once there is one"),
                    "output_config": Honoured(inside=Object("Configuration from a turn on", {"effort": FOR_TEMPLATE})),
                },
            )
        ),
    },
)
_OUTPUT = Object(
    "Configuration of the output",
    {
        "effort": FOR_TEMPLATE,
        "format": Refused("answers cannot be held to a format"),
        "task_budget": Refused("the model is not told how many tokens are left"),
    },
)

COUNTED: Mapping[str, Treatment] = {
    "model": Honoured("any name; there is one model", size=Size(characters=512)),
    "messages": Honoured("text, thinking, calls of tools and their results", each=_MESSAGES, size=Size(MAX_MESSAGES)),
    "system": Honoured("text, or blocks; also among the messages", each=TEXTS),
    "tools": Honoured("tools with an input_schema", each=_TOOLS, size=Size(MAX_TOOLS)),
    "tool_choice": Honoured("auto and none", _CHOICES),
    "thinking": Honoured("where the model's template knows it", _THINKING),
    "output_config": Honoured(inside=_OUTPUT),
    "cache_control": CACHED,
    "speed": Refused("there is one speed", is_one_of("standard")),
    "user_profile_id": BY_KEYS,
    "workspace_id": BY_KEYS,
    # of the beta, some of which agents send whatever the server
    "betas": Ignored("what a beta adds has fields of its own"),
    "context_management": Ignored("no edit is applied, as the answer says; too long a prompt is refused with numbers"),
    "mcp_servers": Refused(_NO_SANDBOX, is_empty),
    "output_format": Refused("answers cannot be held to a format"),
    "compaction": Refused("a conversation is taken as it is", is_empty),
    "billing_policy": Ignored("nothing is paid for here"),
}
FIELDS: Mapping[str, Treatment] = {
    **COUNTED,
    "max_tokens": Honoured("no more than the context has room for"),
    "stop_sequences": Honoured(f"at most {_MAX_STOPS}"),
    "stream": HONOURED,
    "temperature": HONOURED,
    "top_p": HONOURED,
    "top_k": HONOURED,
    "metadata": BY_KEYS,
    "service_tier": Ignored("there is one tier, and the answer says so; priority is the header X-Splitinfer-Priority"),
    "inference_geo": Refused("the server does not know where its machines stand", is_one_of("global")),
    "container": Refused(_NO_SANDBOX),
    "diagnostics": Ignored("it asks why a cache of Anthropic's was missed, and may stay without an answer"),
    "fallbacks": Refused("there is one model", is_empty),
    "fallback_credit_token": Ignored("nothing is paid for here"),
    "thread": Refused(_NO_STORE, details=_NO_THREADS),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a client is shown of an answer. ``hides_thinking``: the model's thinking is left out. ``manages_context``:
    it is said that the conversation was not edited."""

    model: str
    streams: bool = False
    hides_thinking: bool = False
    manages_context: bool = False


def message_ask(body: Mapping[str, Any], model: str = "") -> tuple[Ask, Shape]:
    """What a request asks, and in what shape. ``model``: the name in the answer where the request has none.

    Raises:
        Problem: 400, in a sentence that names the field.
    """
    given = honoured(body, FIELDS)
    if "max_tokens" not in given:
        raise Problem(400, "max_tokens must be given", param="max_tokens")
    shape = Shape(
        values.text("model", given.get("model", model)),
        values.flag("stream", given.get("stream", False)),
        _hides_thinking(given),
        body.get("context_management") is not None,
    )
    most = values.whole("max_tokens", given["max_tokens"], 1, values.MOST_TOKENS)
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
        found["top_k"] = values.whole("top_k", given["top_k"], 0, values.MOST_TOKENS)
    if "stop_sequences" in given:
        found["stop"] = values.texts("stop_sequences", given["stop_sequences"], _MAX_STOPS)
    return found


def _chat(given: Mapping[str, Any]) -> Chat:
    messages = [{"role": "system", "content": text}] if (text := _system(given.get("system"))) else []
    turns = [values.mapping(f"messages[{i}]", one) for i, one in enumerate(_listed(given))]
    last_user = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
    for i, turn in enumerate(turns):
        messages += _turn(f"messages[{i}]", turn, user_follows=i < last_user)
    if all(message["role"] == "system" for message in messages):
        raise Problem(400, "messages must have at least one message", param="messages")
    if messages[-1]["role"] == "assistant":
        raise unsupported("messages", "the last one must not be the assistant's: an answer cannot be begun for it")
    return Chat(tuple(merged_systems(messages)), _tools(given), _options(given))


def _listed(given: Mapping[str, Any]) -> list[Any]:
    return values.listing("messages", given.get("messages"))


def _system(given: Any) -> str:
    """The system's words, in blocks or as they are."""
    return "" if given is None else text_of("system", given)


def _turn(name: str, turn: Mapping[str, Any], *, user_follows: bool) -> list[dict[str, Any]]:
    content = turn.get("content")
    match turn["role"]:
        case "system":
            text = words_of(name, turn, user_follows=user_follows)
            return [] if text is None else [{"role": "system", "content": text}]
        case "user":
            return _user(f"{name}.content", content)
        case _:
            return [_assistant(f"{name}.content", content)]


def _user(name: str, content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results, texts = [], []
    for where, block in _blocks(name, content):
        if block["type"] == "tool_result":
            results.append(_result(where, block))
        else:
            texts.append(block_text(where, _said_by(where, block, "user")))
    return [*results, *([{"role": "user", "content": "\n".join(texts)}] if texts or not results else [])]


def _result(name: str, block: Mapping[str, Any]) -> dict[str, Any]:
    call_id = values.text(f"{name}.tool_use_id", block.get("tool_use_id"))
    text = text_of(f"{name}.content", block.get("content", ""))
    failed = values.flag(f"{name}.is_error", block.get("is_error", False))
    return {"role": "tool", "tool_call_id": call_id, "content": text or ("error" if failed else "")}


def _assistant(name: str, content: Any) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    text, thinking, calls = [], [], []
    for where, block in _blocks(name, content):
        match block["type"]:
            case "thinking":
                thinking.append(values.text(f"{where}.thinking", block.get("thinking")))
            case "tool_use":
                calls.append(_call(where, block))
            case _:
                text.append(block_text(where, _said_by(where, block, "assistant")))
    made: dict[str, Any] = {"role": "assistant", "content": "".join(text)}
    if said := "".join(thinking):
        made["reasoning_content"] = said
    return made | ({"tool_calls": calls} if calls else {})


def _blocks(name: str, content: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """The blocks of a content, with their names."""
    blocks = enumerate(values.listing(name, content))
    return [(f"{name}[{i}]", values.mapping(f"{name}[{i}]", one)) for i, one in blocks if one is not LEFT_OUT]


def _said_by(name: str, block: Mapping[str, Any], role: str) -> Mapping[str, Any]:
    """A block of text, which may be anybody's.

    Raises:
        Problem: 400, it is a block of the other side's.
    """
    if block["type"] in ("thinking", "tool_use", "tool_result"):
        raise unsupported(f"{name}.type", f"it is no block of the {role}'s", block["type"])
    return block


def _call(name: str, block: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": values.text(f"{name}.name", block.get("name")),
        "arguments": values.mapping(f"{name}.input", block.get("input", {})),
    }
    return {"id": values.text(f"{name}.id", block.get("id")), "type": "function", "function": function}


def _tools(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The functions that the model may call, in OpenAI's form, which templates know; none where it shall not."""
    tools = enumerate(values.listing("tools", given.get("tools", [])))
    told = [_tool(f"tools[{i}]", one) for i, one in tools if one is not LEFT_OUT]
    told = changed_tools(told, _listed(given), _defined)
    return tuple(told) if _choice(given).get("type", "auto") == "auto" else ()


def _defined(name: str, given: Any) -> Mapping[str, Any] | None:
    """A tool that is defined among the messages; ``None``: one of a kind that is left out."""
    found = honoured_object(name, values.mapping(name, given), _TOOLS)
    return None if found is LEFT_OUT else _tool(name, found)


def _tool(name: str, given: Any) -> Mapping[str, Any]:
    tool = values.mapping(name, given)
    function = {
        "name": values.text(f"{name}.name", tool.get("name")),
        "description": values.text(f"{name}.description", tool.get("description", "")),
        "parameters": values.mapping(f"{name}.input_schema", tool.get("input_schema")),
    }
    return {"type": "function", "function": function}


def _choice(given: Mapping[str, Any]) -> Mapping[str, Any]:
    return values.mapping("tool_choice", given.get("tool_choice", {}))


def _is_one_call(given: Mapping[str, Any]) -> bool:
    one = _choice(given).get("disable_parallel_tool_use", False)
    return values.flag("tool_choice.disable_parallel_tool_use", one)


def _hides_thinking(given: Mapping[str, Any]) -> bool:
    display = values.mapping("thinking", given.get("thinking", {})).get("display", "summarized")
    if display not in ("summarized", "omitted"):
        raise values.wrong("thinking.display", "summarized or omitted", display)
    return bool(display == "omitted")


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the template is told of thinking."""
    effort = values.mapping("output_config", given.get("output_config", {})).get("effort")
    effort = effort_of(_listed(given), effort)
    options: dict[str, Any] = (
        {} if effort is None else {"reasoning_effort": values.text("output_config.effort", effort)}
    )
    if "thinking" in given:
        options["enable_thinking"] = values.mapping("thinking", given["thinking"])["type"] != "disabled"
    return options
