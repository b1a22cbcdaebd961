"""A conversation as items of OpenAI's responses, and their tools, as chat templates take them.

Items are finer than messages: what an assistant did in one turn is an item of reasoning, one of text and one for each
call, and what came of each call is an item, too. So the assistant's items that follow each other become one message;
every other item is one of its own.

Nothing is stored here, so reasoning comes back only if the client hands it back. Some clients drop reasoning that they
can read and keep what they cannot (``encrypted_content``, which they ask for by name). So it also goes out in that
form, as text that only this module reads: it is no secret, for the same item has the reasoning itself.

Agents list tools of kinds that only OpenAI's servers run, beside the functions that they run themselves; these are left
out. Functions may also stand in namespaces (Codex's, for tools of MCP servers). Templates know names alone, so that the
model is told of ``namespace__name``; a call has both again.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from splitinfer.server.ask import MAX_MESSAGES, MAX_TOOLS
from splitinfer.server.fields import Fields, Ignored, Kinds, Refused, Second, Several
from splitinfer.server.openai.chat import STRICT
from splitinfer.server.openai.generating import NOT_FORCED, Entries, allowed
from splitinfer.server.openai.messages import Content, arguments_of, content_text, merged_systems
from splitinfer.server.problem import invalid

# -- tools -----------------------------------------------------------------------------------------


_TOLD = ("description", "parameters", "strict")
_OTHER_TOOL = "the model sees functions only, so it never calls it"


def names_direct(callers: Any) -> bool:
    """Whether the model itself may call a tool."""
    return isinstance(callers, list) and "direct" in callers


class ResponseFunction(Fields):
    """A function of responses"""

    type: Literal["function"]
    name: str
    description: Any = Field(None, description="Shown to the model")
    parameters: dict[str, Any] | None = Field(None, description="Its schema, shown to the model")
    strict: Any = Field(None, description=STRICT)
    defer_loading: Annotated[Any, Ignored("the model sees all functions from the start")] = None
    output_schema: Annotated[Any, Ignored("the result of a call is read as text")] = None
    allowed_callers: Annotated[
        Any,
        Refused("only the model calls tools; nothing else runs here", is_neutral=names_direct, said='["direct"]'),
    ] = None
    async_: Annotated[Any, Refused("an answer is made of finished calls", (False,)), Field(alias="async")] = None


class Namespace(Fields):
    """A namespace of functions"""

    type: Literal["namespace"]
    name: str = Field(description="The model sees its functions as `namespace__name`")
    description: Annotated[Any, Ignored("its functions have their own descriptions")] = None
    tools: Annotated[
        list[Annotated[ResponseFunction | None, Kinds("type", others=_OTHER_TOOL)]],
        Field(max_length=MAX_TOOLS, fail_fast=True),
    ]


class AllowedFunctions(Fields):
    """A choice of allowed functions"""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = Field("auto", description="Whether one must be called")
    tools: Entries = Field(description="The other tools are not shown to the model")


class NamedFunction(Fields):
    """The function to call"""

    type: Literal["function"]
    name: str


ResponseTools = Annotated[
    list[Annotated[ResponseFunction | Namespace | None, Kinds("type", others=_OTHER_TOOL)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]
FunctionChoice = Annotated[
    str | AllowedFunctions | NamedFunction,
    Kinds("type", words=("auto", "none", "required"), no_words=NOT_FORCED),
]


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the client. ``told``: what the model is told of it beside its name."""

    name: str
    told: Mapping[str, Any]
    namespace: str | None = None

    @property
    def told_name(self) -> str:
        return told_name(self.name, self.namespace)


def told_name(name: str, namespace: str | None) -> str:
    """The one name of a function in a namespace.

    >>> told_name("search", None), told_name("search", "docs"), told_name("search", "mcp__docs__")
    ('search', 'docs__search', 'mcp__docs__search')
    """
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def functions_of(
    tools: Sequence[ResponseFunction | Namespace | None], namespace: str | None = None
) -> list[Function]:  # fmt: skip
    """The functions of a request, also those in namespaces."""
    found: list[Function] = []
    for tool in tools:
        if isinstance(tool, Namespace):
            found += functions_of(tool.tools, tool.name)
        elif tool is not None:
            told = {name: getattr(tool, name) for name in _TOLD if name in tool.model_fields_set}
            found.append(Function(tool.name, told, namespace))
    return found


def callable_names(choice: str | AllowedFunctions | NamedFunction, functions: Sequence[Function]) -> frozenset[str]:
    """The names of the functions that the model may call, as it is told them.

    Raises:
        Problem: 400, a choice allows one that is not there.
    """
    names = [one.told_name for one in functions]
    if isinstance(choice, str):
        return frozenset(() if choice == "none" else names)
    if isinstance(choice, NamedFunction):
        if choice.name not in names:
            raise invalid("tool_choice", f"tool_choice must name one of the tools, not {choice.name!r:.60}")
        return frozenset(names)
    return allowed("tool_choice", choice.tools, names)


# -- items -----------------------------------------------------------------------------------------


_MAX_ITEMS = 4 * MAX_MESSAGES  # reasoning, text and calls are items of their own, and become one message
_BY_ID = Ignored("the call is found by its id")


def is_direct(caller: Any) -> bool:
    """Whether the model itself has called a tool."""
    return isinstance(caller, dict) and caller.get("type") == "direct"


BY_MODEL = Refused(
    "only the model calls tools; nothing else runs here", is_neutral=is_direct, said='{"type": "direct"}'
)


class _Item(Fields):
    id: Annotated[Any, Ignored("nothing is stored here")] = None
    status: Annotated[Any, Ignored("items are taken as they are")] = None


class MessageItem(_Item):
    """An item with a message"""

    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: Annotated[Any, Ignored("the items of an answer become one message for the model's template")] = None


class ReasoningText(Fields):
    """A part of reasoning, or of its summary"""

    type: Any = None
    text: str


_Texts = Several[ReasoningText]


class ReasoningItem(_Item):
    """An item with reasoning"""

    type: Literal["reasoning"]
    content: _Texts | None = None
    summary: _Texts | None = Field(None, description="Used if there is no content")
    encrypted_content: str | None = Field(None, description="This server's own; otherwise the summary is used")

    @property
    def text(self) -> str:
        """The reasoning itself, or this server's packed form of it, or its summary."""
        return _joined(self.content) or unpacked(self.encrypted_content or "") or _joined(self.summary)


def _joined(parts: Sequence[ReasoningText] | None) -> str:
    return "\n".join(part.text for part in parts or ())


class _CallItem(_Item):
    call_id: str
    name: str
    namespace: str | None = Field(None, description="Part of the function's name that the model sees")
    caller: Annotated[Any, BY_MODEL] = None
    async_: Annotated[Any, Refused("an answer is made of finished calls", (False,)), Field(alias="async")] = None

    def _told(self, arguments: Any) -> dict[str, Any]:
        function = {"name": told_name(self.name, self.namespace), "arguments": arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class FunctionCallItem(_CallItem):
    """An item with a call"""

    type: Literal["function_call"]
    arguments: str

    def told(self) -> dict[str, Any]:
        return self._told(arguments_of(self.arguments))


class CustomCallItem(_CallItem):
    """An item with a custom call"""

    type: Literal["custom_tool_call"]
    input: str = Field(description="Shown to the model as an object, because templates support no other arguments")

    def told(self) -> dict[str, Any]:
        return self._told({"input": self.input})


class OutputItem(_Item):
    """An item with the result of a call"""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content = ""
    name: Annotated[Any, _BY_ID] = None
    namespace: Annotated[Any, _BY_ID] = None
    caller: Annotated[Any, BY_MODEL] = None


_REFUSED = {
    "only OpenAI's servers can run it, or read its result": (
        "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_list_tools", "mcp_approval_request",
        "mcp_approval_response", "mcp_call",
    ),
    "only its author can read it": ("compaction",),
    "a conversation is taken as it is": ("compaction_trigger",),
    "a request has one configuration": ("configuration_update",),
    "give them as tools": ("additional_tools",),
    "the model was shown functions only": (
        "tool_search_call", "tool_search_output", "computer_call", "computer_call_output", "local_shell_call",
        "local_shell_call_output", "shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output",
    ),
    "no programs of the model are run here": ("program", "program_output"),
    "nothing is stored here; give the item itself; clients do so with store: false": ("item_reference",),
}  # fmt: skip
Item = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | OutputItem
_Items = Annotated[
    list[
        Annotated[
            Item | None,
            Kinds(
                "type",
                default="message",
                refused={kind: why for why, kinds in _REFUSED.items() for kind in kinds},
                left_out={"web_search_call": "OpenAI's servers ran it; its results are in the message that follows"},
            ),
        ]
    ],
    Field(min_length=1, max_length=_MAX_ITEMS, fail_fast=True),
]
Input = Annotated[str | _Items, Second(list)]
_PACKED = "splitinfer-1:"


def conversation(instructions: str | None, given: str | Sequence[Item | None]) -> tuple[Mapping[str, Any], ...]:
    """The messages for a template. ``instructions``: the system's words, if any; ``given``: text of the user, or
    items."""
    made: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        made.append({"role": "user", "content": given})
    else:
        for item in given:
            if item is not None:
                _add(made, _told(item))
    return tuple(merged_systems(made))


def _told(item: Item) -> dict[str, Any]:
    match item:
        case MessageItem():
            role = item.role if item.role in ("user", "assistant") else "system"
            return {"role": role, "content": content_text(item.content)}
        case ReasoningItem():
            return {"role": "assistant", "content": "", "reasoning_content": item.text}
        case FunctionCallItem() | CustomCallItem():
            return {"role": "assistant", "content": "", "tool_calls": [item.told()]}
        case OutputItem():
            return {"role": "tool", "tool_call_id": item.call_id, "content": content_text(item.output)}


def _add(made: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message; what the assistant did in one turn becomes one."""
    if message.get("reasoning_content") == "":
        del message["reasoning_content"]
    if not made or not made[-1]["role"] == message["role"] == "assistant":
        made.append(message)
        return
    for name, value in message.items():
        if name != "role":
            made[-1][name] = made[-1][name] + value if name in made[-1] else value


def packed(reasoning: str) -> str:
    """Reasoning in the form that clients hand back unread.

    >>> unpacked(packed("Hm.")), unpacked("of another server")
    ('Hm.', '')
    """
    return _PACKED + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def unpacked(text: str) -> str:
    """The reasoning in what ``packed`` made; empty for anything else, which only its author can read."""
    if not text.startswith(_PACKED):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_PACKED), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return ""
