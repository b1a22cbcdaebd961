"""A conversation in OpenAI's words, as chat templates take it.

Templates know text contents, the roles system, user, assistant and tool, and calls whose arguments are objects. So
`developer` is `system`; system messages at the beginning are merged, because most templates want a single one; content
in parts is joined; arguments, which the API has as JSON text, are read. Reasoning that a client hands back reaches the
template under the name that templates know, whichever of the two names it came with.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from splitinfer.server import values
from splitinfer.server.common_fields import CACHED, FOR_TEMPLATE
from splitinfer.server.fields import HONOURED, Honoured, Ignored, Kinds, Object, Refused, Treatment, is_empty
from splitinfer.server.plain_json import plain_json
from splitinfer.server.problem import Problem

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_REASONING = ("reasoning_content", "reasoning")

_BY_OTHERS = Ignored("another server has written it for itself")
_TEXT_ONLY = Refused("the model is given text only")
_BREAKPOINTS: Mapping[str, Treatment] = {"prompt_cache_breakpoint": CACHED, "cache_control": CACHED}
_TEXT_PART = Honoured(inside=Object("A part with text", {"type": HONOURED, "text": HONOURED, **_BREAKPOINTS}))
_OUTPUT_PART = Honoured(
    inside=Object(
        "A part of an earlier answer",
        {
            "type": HONOURED,
            "text": HONOURED,
            "annotations": Ignored("they say where the text is from, and are for people"),
            "logprobs": Ignored("they tell how the text was chosen, and the model is given the text"),
            **_BREAKPOINTS,
        },
    )
)
PARTS = Kinds(
    "Parts of a content",
    "type",
    {
        "text": _TEXT_PART,
        "input_text": _TEXT_PART,
        "output_text": _OUTPUT_PART,
        "refusal": Honoured("as text", Object("A refusal", {"type": HONOURED, "refusal": HONOURED, **_BREAKPOINTS})),
        "image_url": _TEXT_ONLY,
        "input_image": _TEXT_ONLY,
        "input_audio": _TEXT_ONLY,
        "file": _TEXT_ONLY,
        "input_file": _TEXT_ONLY,
    },
)
_CONTENT = Honoured("text, or parts", each=PARTS)
CALLS = Kinds(
    "Calls of tools in messages",
    "type",
    {
        "function": Honoured(
            inside=Object(
                "A call of a function",
                {
                    "type": HONOURED,
                    "id": HONOURED,
                    "function": Honoured(
                        inside=Object("The function of a call", {"name": HONOURED, "arguments": HONOURED})
                    ),
                    "index": Ignored("calls are in the order of the list"),
                    "extra_content": _BY_OTHERS,
                    "provider_specific_fields": _BY_OTHERS,
                },
            )
        ),
        "custom": Refused("tools are functions"),
    },
    default="function",
)
_NOTE = Ignored("a client's own note on a message")  # CodeCompanion sends id and opts (vllm-project/vllm #10463)
_SYSTEM: Mapping[str, Treatment] = {
    "role": HONOURED,
    "content": _CONTENT,
    "name": FOR_TEMPLATE,
    "cache_control": CACHED,
    "id": _NOTE,
    "opts": _NOTE,
    "metadata": _NOTE,
    "timestamp": _NOTE,
}
_ASSISTANT: Mapping[str, Treatment] = {
    **_SYSTEM,
    "refusal": Honoured("it is the content, where there is none"),
    "tool_calls": Honoured(each=CALLS),
    "reasoning_content": FOR_TEMPLATE,
    "reasoning": FOR_TEMPLATE,
    "annotations": Ignored("they say where the text is from, and are for people"),
    "audio": _TEXT_ONLY,
    "function_call": Refused("it is deprecated; give tool_calls"),
    "images": Refused("the model is given text only", is_empty),
    "reasoning_details": _BY_OTHERS,
    "thinking_blocks": _BY_OTHERS,
    "provider_specific_fields": _BY_OTHERS,
}
MESSAGES = Kinds(
    "Messages",
    "role",
    {
        "system": Honoured("those at the beginning become one", Object("A message of the system", _SYSTEM)),
        "developer": Honoured("as `system`", Object("A message of the developer", _SYSTEM)),
        "user": Honoured(inside=Object("A message of the user", _SYSTEM)),
        "assistant": Honoured(inside=Object("A message of the assistant", _ASSISTANT)),
        "tool": Honoured(
            inside=Object("What came of a call", {**_SYSTEM, "tool_call_id": HONOURED, "is_error": _BY_OTHERS})
        ),
        "function": Refused("it is deprecated; give the role tool"),
    },
)


def template_messages(given: Any) -> tuple[Mapping[str, Any], ...]:
    """The messages for a template. ``given``: as ``MESSAGES`` has left them.

    Raises:
        Problem: 400, a message is malformed.
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
    role = message["role"]
    made: dict[str, Any] = {"role": _ROLES[role], "content": content_text(f"{name}.content", message.get("content"))}
    if "name" in message:
        made["name"] = values.text(f"{name}.name", message["name"])
    if role == "assistant":
        made |= _of_assistant(name, message)
    elif "content" not in message:
        raise values.wrong(f"{name}.content", "text", None)
    if role == "tool":
        made["tool_call_id"] = values.text(f"{name}.tool_call_id", message.get("tool_call_id"))
    return made


def _of_assistant(name: str, message: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if "refusal" in message and "content" not in message:
        made["content"] = values.text(f"{name}.refusal", message["refusal"])
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
    """A call's arguments as an object, where its JSON is one that a body may be; else as they are, for they may be the
    model's own."""
    try:
        found = plain_json(text or "{}")
    except ValueError:
        return text
    return found if isinstance(found, dict) else text


def content_text(name: str, content: Any) -> str:
    """A message's content as one text. ``content``: as ``PARTS`` has left it.

    Raises:
        Problem: 400, a part is malformed.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part_text(f"{name}[{i}]", part) for i, part in enumerate(values.listing(name, content)))


def _part_text(name: str, given: Any) -> str:
    if isinstance(given, str):
        return given
    part = values.mapping(name, given)
    field = "refusal" if part["type"] == "refusal" else "text"
    return values.text(f"{name}.{field}", part.get(field))
