"""A conversation in OpenAI's words, as chat templates take it.

Templates know text contents, the roles system, user, assistant and tool, and calls whose arguments are objects. So
`developer` is `system`; system messages at the beginning are merged; content in parts is joined, pictures too
(``server.reading``); arguments, which the API has as JSON text, are read. Reasoning that a client hands back reaches
the template under the name that templates know.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from splitinfer.pictures.marks import in_lines, marked
from splitinfer.server.ask import MAX_MESSAGES
from splitinfer.server.body import plain_json
from splitinfer.server.fields import Fields, Kinds, Parts, Several
from splitinfer.server.refused import EARLIER_ANSWER


class TextPart(Fields):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Fields):
    """The model sees it as text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


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
    image_url: str

    @property
    def text(self) -> str:
        return marked(self.image_url)


Content = Parts[Annotated[TextPart | RefusalPart | PicturePart | InputPicturePart, Kinds("type")]]


class CalledFunction(Fields):
    """``arguments``: JSON, or an object; other text is passed on unchanged."""

    name: str
    arguments: str | dict[str, Any] | None = None


class Call(Fields):
    type: Literal["function"] = "function"
    id: str = ""
    function: CalledFunction

    def told(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": arguments_of(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


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
    """``refusal``: in place of the content where there is none."""

    refused = EARLIER_ANSWER
    role: Literal["assistant"]
    content: Content | None = None
    refusal: str | None = None
    tool_calls: Several[Call] | None = None
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
    tool_call_id: str

    def told(self) -> dict[str, Any]:
        return {**self._told("tool", content_text(self.content or ())), "tool_call_id": self.tool_call_id}


Messages = Annotated[
    list[Annotated[Said | Answered | Outcome, Kinds("role")]],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
]


def template_messages(given: Sequence[Said | Answered | Outcome]) -> tuple[Mapping[str, Any], ...]:
    return tuple(merged_systems([message.told() for message in given]))


def merged_systems(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with those of the system at the beginning as one."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if first < 2:
        return list(messages)
    content = "\n\n".join(message["content"] for message in messages[:first])
    return [{"role": "system", "content": content}, *messages[first:]]


def arguments_of(given: str | dict[str, Any] | None) -> Any:
    """A call's arguments as an object, where their JSON is one that a body may be, or null; else as they are, for they
    may be the model's own."""
    if isinstance(given, dict):
        return given
    try:
        found = plain_json(given or "null")
    except ValueError:
        return given
    return {} if found is None else found if isinstance(found, dict) else given


def content_text(content: Sequence[TextPart | RefusalPart | PicturePart | InputPicturePart], role: str = "") -> str:
    """The text of a content. ``role``: the parts of the assistant's were one text, which the model wrote; others are
    lines, as in Anthropic's API."""
    texts = [part.text for part in content]
    return "".join(texts) if role == "assistant" else in_lines(texts)
