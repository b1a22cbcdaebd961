"""A conversation in OpenAI's form, prepared for chat templates.

Templates know text contents, the roles system, user, assistant and tool, and calls whose arguments are objects. So
`developer` becomes `system`, system messages at the beginning are merged, content in parts is joined, pictures too
(``server.reading``), and arguments, which the API has as JSON text, are parsed. Reasoning that a client sends back
reaches the template under the name that templates know.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from splitinfer.pictures.marks import in_lines, marked
from splitinfer.server.ask import MAX_MESSAGES
from splitinfer.server.body import plain_json
from splitinfer.server.fields import Fields, Kinds, ListOf, Parts
from splitinfer.server.history import history, sentence, taken_by, told


class TextPart(Fields):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Fields):
    """The model sees it as text."""

    type: Literal["refusal"]
    text: str = Field(alias="refusal")


class PictureURL(Fields):
    url: str


class PicturePart(Fields):
    type: Literal["image_url"]
    image_url: Annotated[PictureURL, BeforeValidator(lambda given: {"url": given} if isinstance(given, str) else given)]

    @property
    def text(self) -> str:
        return marked(self.image_url.url)


class InputPicturePart(Fields):
    """A picture, of responses."""

    type: Literal["input_image"]
    text: Annotated[str, AfterValidator(marked)] = Field(alias="image_url")


Part = Annotated[TextPart | RefusalPart | PicturePart | InputPicturePart, Kinds("type")]
Content = Parts[Part]
TAKEN = taken_by(Part)


class CalledFunction(Fields):
    """``arguments``: JSON, or an object; other text is passed on unchanged."""

    name: str
    arguments: str | dict[str, Any] | None = None


class Call(Fields):
    type: Literal["function"] = "function"
    id: str = ""
    function: CalledFunction

    def told(self) -> dict[str, Any]:
        return told_call(self.id, self.function.name, self.function.arguments)


class _Message(Fields):
    name: str | None = None

    def _told(self, role: str, content: str) -> dict[str, Any]:
        return {"role": role, "content": content, **({} if self.name is None else {"name": self.name})}


class Said(_Message):
    role: Literal["system", "developer", "user"]
    content: Content

    def told(self) -> dict[str, Any]:
        return self._told("user" if self.role == "user" else "system", content_text(self.content))


class Answered(_Message):
    """An earlier answer. ``refusal`` replaces a missing content."""

    role: Literal["assistant"]
    content: Content | None = None
    refusal: str | None = None
    tool_calls: ListOf[Call] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def told(self) -> dict[str, Any]:
        content = self.refusal or "" if self.content is None else content_text(self.content, self.role)
        made = self._told("assistant", content)
        if reasoning := self.reasoning_content or self.reasoning:
            made["reasoning_content"] = reasoning
        if self.tool_calls:
            made["tool_calls"] = [call.told() for call in self.tool_calls]
        return made


class Outcome(_Message):
    role: Literal["tool"]
    content: Content | None = None
    tool_call_id: str = ""

    def told(self) -> dict[str, Any]:
        return {**self._told("tool", content_text(self.content or ())), "tool_call_id": self.tool_call_id}


def _mended(message: dict[str, Any], just_sent: bool) -> dict[str, Any]:
    """Return a message in this API's own fields. Sentences replace unreadable parts unless it was just sent."""
    role = message.get("role")
    if just_sent:
        return message
    if role == "assistant":
        message = _own_fields(message)
    if role in ("tool", "function"):  # the role of results before there were tools
        content = message.get("content")
        text = json.dumps(content, ensure_ascii=False) if isinstance(content, dict | int | float) else content
        message = {**message, "role": "tool", "content": text}
    return told(message, TAKEN)


def _own_fields(message: dict[str, Any]) -> dict[str, Any]:
    """Return an answer with its reasoning and its calls in fields of their own. Some clients write them as parts of its
    content, as in Anthropic's API, or its only call as ``function_call``."""
    made, content = dict(message), message.get("content")
    called, spoken = made.pop("function_call", None), made.pop("audio", None)
    parts = [one for one in content if isinstance(one, dict)] if isinstance(content, list) else []
    thoughts = [one for one in parts if one.get("type") in ("thinking", "reasoning")]
    uses = [one for one in parts if one.get("type") == "tool_use"]
    if thoughts or uses:
        made["content"] = [one for one in content or () if one not in thoughts and one not in uses]
    calls = [
        {"id": one.get("id"), "function": {"name": one.get("name"), "arguments": one.get("input")}} for one in uses
    ]
    calls += [{"function": called}] if isinstance(called, dict) else []
    if calls and not made.get("tool_calls"):
        made["tool_calls"] = calls
    if thoughts and not (made.get("reasoning_content") or made.get("reasoning")):
        texts = [one.get(one["type"]) or one.get("text") for one in thoughts]
        made["reasoning_content"] = "".join(text for text in texts if isinstance(text, str))
    if spoken is not None and not made.get("content"):
        made["content"] = sentence({"type": "audio"})
    return made


Messages = Annotated[
    list[Annotated[Said | Answered | Outcome, Kinds("role")]],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    history(_mended),
]


def with_ids(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with an id for each call and each result. A result without an id belongs to the oldest call
    that has no result yet, among the calls of the function that it names, if it names one."""
    made, open_calls, numbers = list[dict[str, Any]](), list[tuple[str, str]](), count(1)
    for message in messages:
        if calls := message.get("tool_calls"):
            calls = [{**call, "id": call["id"] or f"call{next(numbers):05}"} for call in calls]
            open_calls += [(call["id"], call["function"]["name"]) for call in calls]
            message = {**message, "tool_calls": calls}
        if message["role"] == "tool":
            own, name = message["tool_call_id"], message.get("name")
            rank = {each: (each[0] != own, each[1] != name) for each in open_calls}
            answered = min(open_calls, key=rank.__getitem__, default=("", ""))
            open_calls = [each for each in open_calls if each != answered]
            message = {**message, "tool_call_id": own or answered[0]}
        made.append(message)
    return made


def merged_systems(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return the messages with all system messages at the beginning merged into one."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if first < 2:
        return tuple(messages)
    content = "\n\n".join(message["content"] for message in messages[:first])
    return {"role": "system", "content": content}, *messages[first:]


def told_call(call_id: str, name: str, arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    """Return a call as templates know it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": _arguments(arguments)}}


def _arguments(given: str | dict[str, Any] | None) -> Any:
    """Return a call's arguments as an object, if they are an object, null, or valid JSON for one. Otherwise return them
    unchanged, because the model may have written them."""
    if isinstance(given, dict):
        return given
    try:
        found = plain_json(given or "null")
    except ValueError:
        return given
    return {} if found is None else found if isinstance(found, dict) else given


def content_text(content: Sequence[TextPart | RefusalPart | PicturePart | InputPicturePart], role: str = "") -> str:
    """Return the text of a content. ``role``: the assistant's parts are joined directly, because the model wrote them
    as one text; other parts become lines, as in Anthropic's API."""
    texts = [part.text for part in content]
    return "".join(texts) if role == "assistant" else in_lines(texts)
