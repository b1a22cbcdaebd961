"""`POST /v1/responses` and `/v1/responses/input_tokens`: a request as an `Ask`. Stateless: each request brings the
whole conversation, and the server keeps nothing of it.

A conversation is a list of items, which are finer than messages: an assistant's turn is an item of reasoning, an item
of text and an item for each call, and the result of each call is an item, too. So adjacent items of the assistant
become one message. The reasoning of earlier turns is there only if the client sends it back. Some clients drop the
readable reasoning and keep the unreadable form (``encrypted_content``, which they request by name). So reasoning also
goes out in that form, as text that only this module reads: it is no secret, because the same item has the reasoning
itself.

Tools that only OpenAI's servers run are left out. Functions may stand in namespaces (Codex's, for tools of MCP
servers): the model sees ``namespace__name``, and a call has namespace and name again.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.core.sampling_params import MAX_LOGPROBS
from splitinfer.server.ask import MAX_MESSAGES, MAX_TOOLS, Ask, AskedChat, in_force
from splitinfer.server.fields import Fields, Kinds, ListOf, Name, wrong
from splitinfer.server.history import history, sentence, told
from splitinfer.server.openai.forms import JsonFormat, NamedSchema, PlainFormat
from splitinfer.server.openai.generating import ForTemplate, FunctionChoice, Generating, Limit, Told, Word, chosen
from splitinfer.server.openai.messages import TAKEN, Content, content_text, merged_systems, told_call
from splitinfer.server.refused import COUNTED, REFUSED
from splitinfer.server.stream import json_line

# -- tools -----------------------------------------------------------------------------------------


_TOLD = ("description", "parameters", "strict")
_FUNCTIONS = Kinds("type", left_out=lambda _: True)  # the model is told of functions only, so it calls no other tool


class ResponseFunction(Fields):
    """A function as the model sees it. ``strict``: as in a chat. ``namespace``: the namespace that has it, if any."""

    type: Literal["function"]
    name: str
    description: Any = None
    parameters: dict[str, Any] | None = None
    strict: Any = None
    namespace: str | None = None

    @property
    def told_name(self) -> str:
        return told_name(self.name, self.namespace)

    @property
    def told(self) -> dict[str, Any]:
        about = {name: getattr(self, name) for name in _TOLD if name in self.model_fields_set}
        return {"name": self.told_name, **about}


class Namespace(Fields):
    type: Literal["namespace"]
    name: str
    tools: list[Annotated[ResponseFunction | None, _FUNCTIONS]] = Field(max_length=MAX_TOOLS, fail_fast=True)


ResponseTools = list[Annotated[ResponseFunction | Namespace | None, _FUNCTIONS]]


def told_name(name: str, namespace: str | None) -> str:
    """Return the one name of a function in a namespace.

    >>> told_name("search", None), told_name("search", "docs"), told_name("search", "mcp__docs__")
    ('search', 'docs__search', 'mcp__docs__search')
    """
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


# -- items -----------------------------------------------------------------------------------------


_MAX_ITEMS = 4 * MAX_MESSAGES  # reasoning, text and calls are items of their own, and become one message


class MessageItem(Fields):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class ReasoningText(Fields):
    """A part of reasoning, or of its summary."""

    text: str


class ReasoningItem(Fields):
    type: Literal["reasoning"]
    content: ListOf[ReasoningText] | None = None
    summary: ListOf[ReasoningText] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """The reasoning itself, or this server's packed form of it, or its summary."""
        return _joined(self.content) or unpacked(self.encrypted_content or "") or _joined(self.summary)


def _joined(parts: Sequence[ReasoningText] | None) -> str:
    return "\n".join(part.text for part in parts or ())


class _CallItem(Fields):
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str | dict[str, Any]

    def told(self) -> dict[str, Any]:
        return told_call(self.call_id, told_name(self.name, self.namespace), self.arguments)


class FunctionCallItem(_CallItem):
    type: Literal["function_call"]


class CustomCallItem(_CallItem):
    """A call with text. The model sees an object, because templates know no other arguments."""

    type: Literal["custom_tool_call"]
    arguments: Annotated[str, AfterValidator(lambda text: {"input": text})] = Field(alias="input")


class OutputItem(Fields):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content = Field(default_factory=list)


Item = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | OutputItem
_LEFT_OUT = ("web_search_call", "mcp_list_tools")  # their results are in the following items
_KINDS = Kinds(
    "type",
    default="message",
    left_out=_LEFT_OUT.__contains__,
    why={"item_reference": "nothing is stored here; give the item itself; clients do so with store: false"},
)
_PACKED = "splitinfer-1:"
_RESULTS = ("function_call_output", "custom_tool_call_output")
_KNOWN = {
    "message", "reasoning", "function_call", "custom_tool_call", *_LEFT_OUT,
    "item_reference", "compaction_trigger",  # refused: they ask for stored items, or for another answer
}  # fmt: skip


def _mended(item: dict[str, Any], just_sent: bool) -> dict[str, Any]:
    """Return an item with sentences in place of unreadable parts unless it was just sent. An item of an unknown kind
    becomes a sentence: another server ran it, or it belongs to a tool that is left out."""
    match item.get("type") or "message":
        case "message" if not just_sent:
            return told(item, TAKEN)
        case kind if kind in _RESULTS:
            return told(item, TAKEN, "output")
        case str(kind) if kind not in _KNOWN:
            return {"role": "assistant", "content": f"{sentence(item)}\n"}
    return item


Input = Annotated[
    list[Annotated[Item | None, _KINDS]],
    Field(min_length=1, max_length=_MAX_ITEMS, fail_fast=True),
    history(_mended),
    BeforeValidator(lambda given: [{"role": "user", "content": given}] if isinstance(given, str) else given),
]


def conversation(instructions: str | None, items: Sequence[Item | None]) -> tuple[Mapping[str, Any], ...]:
    """Return the messages for a template. ``instructions``: the system prompt, if any."""
    made: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for item in items:
        if item is not None:
            _add(made, _told(item))
    return merged_systems(made)


def _told(item: Item) -> dict[str, Any]:
    match item:
        case MessageItem():
            role = item.role if item.role in ("user", "assistant") else "system"
            return {"role": role, "content": content_text(item.content, role)}
        case ReasoningItem():
            return {"role": "assistant", "content": "", "reasoning_content": item.text}
        case FunctionCallItem() | CustomCallItem():
            return {"role": "assistant", "content": "", "tool_calls": [item.told()]}
        case OutputItem():
            return {"role": "tool", "tool_call_id": item.call_id, "content": content_text(item.output)}


def _add(made: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message. Adjacent messages of the assistant become one, because they are one turn."""
    if message.get("reasoning_content") == "":
        del message["reasoning_content"]
    if not made or not made[-1]["role"] == message["role"] == "assistant":
        made.append(message)
        return
    for name, value in message.items():
        if name != "role":
            made[-1][name] = made[-1][name] + value if name in made[-1] else value


def packed(reasoning: str) -> str:
    """Return reasoning in the form that clients hand back unread.

    >>> unpacked(packed("Hm.")), unpacked("of another server")
    ('Hm.', '')
    """
    return _PACKED + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def unpacked(text: str) -> str:
    """Return the reasoning in a text that ``packed`` made. Return an empty text for anything else: only its author can
    read it."""
    if not text.startswith(_PACKED):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_PACKED), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return ""


# -- requests ----------------------------------------------------------------------------------------


_PROBABILITIES, _PACKED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
_MOST_METADATA = 1 << 14
_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


class FlatSchema(NamedSchema):
    """JSON of a schema, in one object."""

    type: Literal["json_schema"]


def _small(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata, which comes back with the answer, and in a stream with each event that has the whole
    response."""
    if (size := len(json_line(metadata))) > _MOST_METADATA:
        raise wrong(f" may have {_MOST_METADATA:,} characters of JSON, not {size:,}")
    return metadata


class Text(Fields):
    verbosity: str | None = None
    format: Annotated[PlainFormat | JsonFormat | FlatSchema, Kinds("type")] | None = None


class InputRequest(ForTemplate):
    """A request for the number of a conversation's tokens."""

    refused = COUNTED
    model: Name | None = None
    input: Input
    instructions: str | None = None
    tools: ResponseTools = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: FunctionChoice = Word(type="auto")
    text: Text = Text()

    @cached_property
    def functions(self) -> list[ResponseFunction]:
        """All functions, including functions in namespaces."""
        found: list[ResponseFunction] = []
        for tool in self.tools:
            if isinstance(tool, Namespace):
                found += [one.model_copy(update={"namespace": tool.name}) for one in tool.tools if one is not None]
            elif tool is not None:
                found.append(tool)
        return found

    def chosen(self) -> tuple[Told, Told, bool]:
        """Return the result of the function ``chosen`` for this request."""
        return chosen([one.told for one in self.functions], self.tool_choice)

    def chat(self) -> AskedChat:
        messages = conversation(self.instructions, self.input)
        return AskedChat(messages, self.chosen()[0], self.template_options(self.text.verbosity))


class ResponseRequest(InputRequest, Generating):
    refused = REFUSED
    max_output_tokens: Limit = None
    parallel_tool_calls: bool = True  # false: an answer ends after its first call
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    include: list[str] = Field(default_factory=list, max_length=32, fail_fast=True)
    metadata: Annotated[dict[str, Any], AfterValidator(_small)] = Field(default_factory=dict)

    @property
    def num_top(self) -> int | None:
        """Most likely tokens beside each; ``None``: no probabilities."""
        return self.top_logprobs if _PROBABILITIES in self.include or self.top_logprobs else None

    @property
    def packs_reasoning(self) -> bool:
        """Whether reasoning is also given in the form that clients hand back unread."""
        return _PACKED_REASONING in self.include

    def asks(self) -> tuple[Ask]:
        sampling = self.sampling() | self.form(self.text.format, "text.format") | self.budget()
        one_call, may_call = not self.parallel_tool_calls, self.chosen()[1:]
        return (Ask(self.chat(), sampling, self.max_output_tokens, 1, one_call, *may_call, self.stream),)

    def said(self, defaults: Recommended) -> dict[str, Any]:
        """Return the request's fields that an answer repeats, further fields of the API's answers, and the sampling
        fields. The model's ``defaults`` fill missing ones."""
        choice, form = self.tool_choice, self.text.format
        untold = {"type": "function", "description": None, "parameters": None, "strict": None}
        told = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_unset=True)
        sampling = {**in_force(defaults), **self.sampling()}
        return {
            **dict.fromkeys(("max_tool_calls", "prompt_cache_key", "safety_identifier", "user")),
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning": {"effort": self.effort, "summary": None},
            "text": {"format": told},
            "tool_choice": choice.type if isinstance(choice, Word) else choice.model_dump(exclude_unset=True),
            "tools": [{**untold, **one.told} for one in self.functions],
            "top_logprobs": self.top_logprobs,
            **{name: sampling[name] for name in _SAMPLING},
        }
