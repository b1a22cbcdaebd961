"""A conversation as items of OpenAI's responses, as chat templates take it.

Items are finer than messages: what an assistant did in one turn is an item of reasoning, one of text and one for each
call, and what came of each call is an item, too. So the assistant's items that follow each other become one message;
every other item is one of its own.

Nothing is stored here, so reasoning comes back only if the client hands it back. Some clients drop reasoning that they
can read and keep what they cannot (``encrypted_content``, which they ask for by name). So it also goes out in that
form, as text that only this module reads: it is no secret, for the same item has the reasoning itself.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from splitinfer.server import values
from splitinfer.server.fields import (
    HONOURED,
    LEFT_OUT,
    Honoured,
    Ignored,
    Kinds,
    Object,
    Refused,
    Treatment,
    Values,
    is_one_of,
)
from splitinfer.server.openai.messages import PARTS, arguments_of, content_text, merged_systems
from splitinfer.server.openai.response_tools import told_name
from splitinfer.server.problem import Problem

_ROLES = {"system": "system", "developer": "system", "user": "user"}
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}  # the item's field with what the tool gets


def _is_direct(caller: Any) -> bool:
    return isinstance(caller, dict) and caller.get("type") == "direct"


_NOT_STORED = Ignored("nothing is stored here")
_WHOLE = Ignored("items are taken as they are")
_BY_MODEL = Refused(
    "the model itself calls tools: nothing else runs here", Values((), '`{"type": "direct"}`', _is_direct)
)
_BY_PROGRAMS = Refused("no programs of the model are run here")
_BY_SERVERS = Refused("only OpenAI's servers can run it, or read what came of it")
_OF_OTHER_TOOLS = Refused("the model was told of functions only")
_NO_REFERENCE = Refused("nothing is stored here; give the item itself")
_BY_ID = Ignored("the call is found by its id")
_CALLED: Mapping[str, Treatment] = {
    "namespace": Honoured("a part of the function's name, as the model was told it"),
    "caller": _BY_MODEL,
    "async": Refused("an answer is made of finished calls", is_one_of(False)),
}
_ITEM: Mapping[str, Treatment] = {"type": HONOURED, "id": _NOT_STORED, "status": _WHOLE}
_OUTPUT = Honoured("text, or parts", each=PARTS)


def _texts_of(title: str) -> Honoured:
    return Honoured(each=Object(title, {"type": HONOURED, "text": HONOURED}))


ITEMS = Kinds(
    "Items of the input",
    "type",
    {
        "message": Honoured(
            inside=Object(
                "An item with a message",
                {
                    **_ITEM,
                    "role": Honoured("system, developer, user or assistant"),
                    "content": _OUTPUT,
                    "phase": Ignored("an answer's items are one message for the model's template"),
                },
            )
        ),
        "reasoning": Honoured(
            inside=Object(
                "An item with reasoning",
                {
                    **_ITEM,
                    "content": _texts_of("A part of reasoning"),
                    "summary": Honoured(
                        "where there is no content",
                        each=Object("A part of a summary", {"type": HONOURED, "text": HONOURED}),
                    ),
                    "encrypted_content": Honoured("this server's own; of another's, the summary is taken"),
                },
            )
        ),
        "function_call": Honoured(
            inside=Object(
                "An item with a call",
                {**_ITEM, "call_id": HONOURED, "name": HONOURED, "arguments": HONOURED, **_CALLED},
            )
        ),
        "function_call_output": Honoured(
            inside=Object(
                "An item with a result",
                {
                    **_ITEM,
                    "call_id": HONOURED,
                    "output": _OUTPUT,
                    "name": _BY_ID,
                    "namespace": _BY_ID,
                    "caller": _BY_MODEL,
                },
            )
        ),
        "custom_tool_call": Honoured(
            inside=Object(
                "An item with a custom call",
                {**_ITEM, "call_id": HONOURED, "name": HONOURED, "input": HONOURED, **_CALLED},
            )
        ),
        "custom_tool_call_output": Honoured(
            inside=Object(
                "An item with a custom result",
                {
                    **_ITEM,
                    "call_id": HONOURED,
                    "output": _OUTPUT,
                    "name": _BY_ID,
                    "namespace": _BY_ID,
                    "caller": _BY_MODEL,
                },
            )
        ),
        "web_search_call": Ignored("OpenAI's servers ran it; what it brought is in the message behind it"),
        "file_search_call": _BY_SERVERS,
        "code_interpreter_call": _BY_SERVERS,
        "image_generation_call": _BY_SERVERS,
        "mcp_list_tools": _BY_SERVERS,
        "mcp_approval_request": _BY_SERVERS,
        "mcp_approval_response": _BY_SERVERS,
        "mcp_call": _BY_SERVERS,
        "compaction": Refused("nobody but its author can read it"),
        "compaction_trigger": Refused("a conversation is taken as it is"),
        "configuration_update": Refused("a request has one configuration"),
        "additional_tools": Refused("give them as tools"),
        "tool_search_call": _OF_OTHER_TOOLS,
        "tool_search_output": _OF_OTHER_TOOLS,
        "computer_call": _OF_OTHER_TOOLS,
        "computer_call_output": _OF_OTHER_TOOLS,
        "local_shell_call": _OF_OTHER_TOOLS,
        "local_shell_call_output": _OF_OTHER_TOOLS,
        "shell_call": _OF_OTHER_TOOLS,
        "shell_call_output": _OF_OTHER_TOOLS,
        "apply_patch_call": _OF_OTHER_TOOLS,
        "apply_patch_call_output": _OF_OTHER_TOOLS,
        "program": _BY_PROGRAMS,
        "program_output": _BY_PROGRAMS,
        "item_reference": _NO_REFERENCE,
    },
    default="message",
)
_PACKED = "splitinfer-1:"


def conversation(instructions: Any, given: Any) -> tuple[Mapping[str, Any], ...]:
    """The messages for a template. ``instructions``: the system's words, if any; ``given``: text of the user, or items
    as ``ITEMS`` has left them.

    Raises:
        Problem: 400, an item is malformed.
    """
    made = _Messages()
    if instructions is not None:
        made.add({"role": "system", "content": values.text("instructions", instructions)})
    items = (
        [{"type": "message", "role": "user", "content": given}]
        if isinstance(given, str)
        else values.listing("input", given)
    )
    if not items:
        raise Problem(400, "input must have at least one item", param="input")
    for i, item in enumerate(items):
        if item is not LEFT_OUT:
            _take(made, f"input[{i}]", values.mapping(f"input[{i}]", item))
    return tuple(merged_systems(made.all()))


@dataclass(slots=True)
class _Messages:
    """The messages so far, and the assistant's turn that is still open."""

    _made: list[Mapping[str, Any]] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[Mapping[str, Any]] = field(default_factory=list)
    _is_open: bool = False

    def add(self, message: Mapping[str, Any]) -> None:
        """A message of another than the assistant, whose turn ends."""
        self._close()
        self._made.append(message)

    def add_text(self, text: str) -> None:
        """The assistant has said something."""
        self._is_open = True
        self._text.append(text)

    def add_reasoning(self, text: str) -> None:
        """The assistant has thought something."""
        self._is_open = True
        self._reasoning.append(text)

    def add_call(self, call: Mapping[str, Any]) -> None:
        """The assistant has called a tool."""
        self._is_open = True
        self._calls.append(call)

    def all(self) -> list[Mapping[str, Any]]:
        """All messages."""
        self._close()
        return self._made

    def _close(self) -> None:
        if not self._is_open:
            return
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._text)}
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        self._made.append(message)
        self._text, self._reasoning, self._calls, self._is_open = [], [], [], False


def _take(made: _Messages, name: str, item: Mapping[str, Any]) -> None:
    """Add one item to the messages."""
    kind = item["type"]
    if kind == "message":
        _take_message(made, name, item)
    elif kind == "reasoning":
        made.add_reasoning(_reasoning_text(name, item))
    elif kind in _CALLS:
        made.add_call(_call(name, item, _CALLS[kind]))
    else:
        call_id = values.text(f"{name}.call_id", item.get("call_id"))
        output = content_text(f"{name}.output", item.get("output"))
        made.add({"role": "tool", "tool_call_id": call_id, "content": output})


def _take_message(made: _Messages, name: str, item: Mapping[str, Any]) -> None:
    role, content = item.get("role"), item.get("content")
    if content is None:
        raise values.wrong(f"{name}.content", "text", None)
    text = content_text(f"{name}.content", content)
    if role == "assistant":
        made.add_text(text)
    elif isinstance(role, str) and role in _ROLES:
        made.add({"role": _ROLES[role], "content": text})
    else:
        raise values.wrong(f"{name}.role", f"one of {', '.join((*_ROLES, 'assistant'))}", role)


def _call(name: str, item: Mapping[str, Any], field_name: str) -> Mapping[str, Any]:
    """A call. What a tool gets that is no function is text, and templates know objects only."""
    given = values.text(f"{name}.{field_name}", item.get(field_name))
    namespace = values.text(f"{name}.namespace", item["namespace"]) if "namespace" in item else None
    function = {
        "name": told_name(values.text(f"{name}.name", item.get("name")), namespace),
        "arguments": arguments_of(given) if field_name == "arguments" else {field_name: given},
    }
    return {"id": values.text(f"{name}.call_id", item.get("call_id")), "type": "function", "function": function}


# -- reasoning -------------------------------------------------------------------------------------


def _reasoning_text(name: str, item: Mapping[str, Any]) -> str:
    """The reasoning itself, or this server's packed form of it, or its summary."""
    if text := _texts(f"{name}.content", item.get("content")):
        return text
    packed = item.get("encrypted_content")
    if packed is not None and (text := unpacked(values.text(f"{name}.encrypted_content", packed))):
        return text
    return _texts(f"{name}.summary", item.get("summary"))


def _texts(name: str, given: Any) -> str:
    if given is None:
        return ""
    parts = [values.mapping(f"{name}[{i}]", part) for i, part in enumerate(values.listing(name, given))]
    return "\n".join(values.text(f"{name}[{i}].text", part.get("text")) for i, part in enumerate(parts))


def packed(reasoning: str) -> str:
    """Reasoning in the form that clients hand back unread.

    >>> unpacked(packed("Hm.")), unpacked("of another server")
    ('Hm.', '')
    """
    return _PACKED + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def unpacked(text: str) -> str:
    """The reasoning in what ``packed`` made; empty for anything else, which nobody but its author can read."""
    if not text.startswith(_PACKED):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_PACKED), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return ""
