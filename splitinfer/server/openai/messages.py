"""A conversation in OpenAI's words, as chat templates take it.

Templates know text contents, the roles system, user, assistant and tool, and calls whose arguments are objects. So
`developer` is `system`; system messages at the beginning are merged, because most templates want a single one; content
in parts is joined; arguments, which the API has as JSON text, are read. Reasoning that a client hands back reaches the
template under the name that templates know, whichever of the two names it came with.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from splitinfer.server import values
from splitinfer.server.problem import Problem, unsupported

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # the part's field
_REASONING = ("reasoning_content", "reasoning")
_KNOWN = {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "annotations", "audio", "function_call"}


def template_messages(given: Any) -> tuple[Mapping[str, Any], ...]:
    """The messages for a template.

    Raises:
        Problem: 400, a message is malformed, or has what the model cannot be given.
    """
    messages = [_message(f"messages[{i}]", one) for i, one in enumerate(values.listing("messages", given))]
    if not messages:
        raise Problem(400, "messages must have at least one message", param="messages")
    return tuple(merged_systems(messages))


def merged_systems(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with those of the system at the beginning as one."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if first < 2:
        return list(messages)
    content = "\n\n".join(message["content"] for message in messages[:first])
    return [{"role": "system", "content": content}, *messages[first:]]


def _message(name: str, given: Any) -> dict[str, Any]:
    message = values.mapping(name, given)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise values.wrong(f"{name}.role", f"one of {', '.join(_ROLES)}", role)
    for field in message.keys() - _KNOWN - {*_REASONING}:
        raise Problem(400, f"there is no field {field!r:.60} in {name}", param=f"{name}.{field}")
    for field in ("audio", "function_call"):
        if message.get(field) is not None:
            raise unsupported(f"{name}.{field}", "only text and tool_calls are")
    made: dict[str, Any] = {"role": _ROLES[role], "content": content_text(f"{name}.content", message.get("content"))}
    if role == "assistant":
        made |= _of_assistant(name, message)
    elif message.get("content") is None:
        raise values.wrong(f"{name}.content", "text", None)
    if role == "tool":
        made["tool_call_id"] = values.text(f"{name}.tool_call_id", message.get("tool_call_id"))
    return made


def _of_assistant(name: str, message: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    reasoning = next((message[field] for field in _REASONING if message.get(field)), None)
    if reasoning is not None:
        made["reasoning_content"] = values.text(f"{name}.reasoning_content", reasoning)
    if message.get("tool_calls"):
        calls = values.listing(f"{name}.tool_calls", message["tool_calls"])
        made["tool_calls"] = [_call(f"{name}.tool_calls[{i}]", one) for i, one in enumerate(calls)]
    return made


def _call(name: str, given: Any) -> dict[str, Any]:
    call = values.mapping(name, given)
    function = values.mapping(f"{name}.function", call.get("function"))
    return {
        "id": values.text(f"{name}.id", call.get("id", "")),
        "type": "function",
        "function": {
            "name": values.text(f"{name}.function.name", function.get("name")),
            "arguments": arguments_of(values.text(f"{name}.function.arguments", function.get("arguments", "{}"))),
        },
    }


def arguments_of(text: str) -> Any:
    """A call's arguments as an object, where its JSON is one; else as they are, for they may be the model's own."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return text
    return found if isinstance(found, dict) else text


def content_text(name: str, content: Any) -> str:
    """A message's content as one text.

    Raises:
        Problem: 400, a part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part_text(f"{name}[{i}]", part) for i, part in enumerate(values.listing(name, content)))


def _part_text(name: str, given: Any) -> str:
    if isinstance(given, str):
        return given
    part = values.mapping(name, given)
    kind = values.text(f"{name}.type", part.get("type"))
    if kind not in _TEXT_PARTS:
        raise unsupported(f"{name}.type", "the model is given text only", kind)
    field = _TEXT_PARTS[kind]
    return values.text(f"{name}.{field}", part.get(field))
