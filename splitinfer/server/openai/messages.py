"""A conversation in OpenAI's words, as chat templates take it.

Templates know text contents, the roles system, user, assistant and tool, and calls whose arguments are objects. So
`developer` is `system`; system messages at the beginning are merged, because most templates want a single one; content
in parts is joined, pictures too (``server.pictures``); arguments, which the API has as JSON text, are read. Reasoning
that a client hands back reaches the template under the name that templates know, whichever of the two names it came
with.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from splitinfer.pictures.marks import marked
from splitinfer.server.ask import MAX_MESSAGES
from splitinfer.server.body import plain_json
from splitinfer.server.fields import EMPTY, Fields, Ignored, Kinds, Refused, Second, Several, TextOrSeveral
from splitinfer.server.openai.generating import FOR_TEMPLATE, Cached
from splitinfer.server.pictures import SIZE, STORED, PictureURL

_BY_OTHERS = Ignored("another server wrote it for its own use")
_FOR_PEOPLE = Ignored("they name the source of the text for human readers")
_NOTE = Ignored("a client's own note on a message")  # CodeCompanion sends id and opts (vllm-project/vllm #10463)


class _Part(Fields):
    prompt_cache_breakpoint: Cached = None
    cache_control: Cached = None


class TextPart(_Part):
    """A part with text"""

    type: Literal["text", "input_text"]
    text: str


class OutputPart(_Part):
    """A part of an earlier answer"""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[Any, _FOR_PEOPLE] = None
    logprobs: Annotated[Any, Ignored("the model is given the text, not how it was chosen")] = None


class RefusalPart(_Part):
    """A refusal"""

    type: Literal["refusal"]
    refusal: str = Field(description="The model sees it as text")


class PicturePart(_Part):
    """A part with a picture"""

    type: Literal["image_url"]
    image_url: Annotated[str | PictureURL, Second(dict)] = Field(description="A data URL with the picture")

    @property
    def text(self) -> str:
        return marked(self.image_url if isinstance(self.image_url, str) else self.image_url.url)


class InputPicturePart(_Part):
    """A part with a picture, of responses"""

    type: Literal["input_image"]
    image_url: str = Field(description="A data URL with the picture")
    detail: Annotated[Any, SIZE] = None
    file_id: Annotated[Any, STORED] = None

    @property
    def text(self) -> str:
        return marked(self.image_url)


AnyPart = str | TextPart | OutputPart | RefusalPart | PicturePart | InputPicturePart
_NOT_SEEN = dict.fromkeys(("input_audio", "file", "input_file"), "the model is given text and pictures only")
Content = TextOrSeveral[Annotated[AnyPart, Kinds("type", refused=_NOT_SEEN)]]


class CalledFunction(Fields):
    """The function of a call"""

    name: str
    arguments: str = Field("{}", description="JSON; other text is passed on unchanged")


class Call(Fields):
    """A tool call"""

    type: Literal["function"]
    id: str = ""
    function: CalledFunction
    index: Annotated[Any, Ignored("calls are in the order of the list")] = None
    extra_content: Annotated[Any, _BY_OTHERS] = None
    provider_specific_fields: Annotated[Any, _BY_OTHERS] = None

    def told(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": arguments_of(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


_Calls = Several[Annotated[Call, Kinds("type", default="function", refused={"custom": "tools are functions"})]]


class _Message(Fields):
    name: str | None = Field(None, description=FOR_TEMPLATE)
    cache_control: Cached = None
    id: Annotated[Any, _NOTE] = None
    opts: Annotated[Any, _NOTE] = None
    metadata: Annotated[Any, _NOTE] = None
    timestamp: Annotated[Any, _NOTE] = None

    def _told(self, role: str, content: str) -> dict[str, Any]:
        return {"role": role, "content": content, **({} if self.name is None else {"name": self.name})}


class Said(_Message):
    """A system, developer or user message"""

    role: Literal["system", "developer", "user"] = Field(
        description="`developer` counts as `system`; system messages at the beginning are merged"
    )
    content: Content

    def told(self) -> dict[str, Any]:
        return self._told("user" if self.role == "user" else "system", content_text(self.content))


class Answered(_Message):
    """An assistant message"""

    role: Literal["assistant"]
    content: Content | None = None
    refusal: str | None = Field(None, description="Used as the content if there is no content")
    tool_calls: _Calls | None = None
    reasoning_content: str | None = Field(None, description=FOR_TEMPLATE)
    reasoning: str | None = Field(None, description="The same")
    annotations: Annotated[Any, _FOR_PEOPLE] = None
    audio: Annotated[Any, Refused("answers are text")] = None
    function_call: Annotated[Any, Refused("it is deprecated; give tool_calls")] = None
    images: Annotated[Any, Refused("answers are text", EMPTY)] = None
    reasoning_details: Annotated[Any, _BY_OTHERS] = None
    thinking_blocks: Annotated[Any, _BY_OTHERS] = None
    provider_specific_fields: Annotated[Any, _BY_OTHERS] = None

    def told(self) -> dict[str, Any]:
        content = self.refusal or "" if self.content is None else content_text(self.content)
        made = self._told("assistant", content)
        if reasoning := self.reasoning_content or self.reasoning:
            made["reasoning_content"] = reasoning
        if self.tool_calls:
            made["tool_calls"] = [call.told() for call in self.tool_calls]
        return made


class Outcome(_Message):
    """The result of a call"""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    is_error: Annotated[Any, _BY_OTHERS] = None

    def told(self) -> dict[str, Any]:
        return {**self._told("tool", content_text(self.content)), "tool_call_id": self.tool_call_id}


Messages = Annotated[
    list[
        Annotated[
            Said | Answered | Outcome, Kinds("role", refused={"function": "it is deprecated; give the role tool"})
        ]
    ],
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


def arguments_of(text: str) -> Any:
    """A call's arguments as an object, where its JSON is one that a body may be; else as they are, for they may be the
    model's own."""
    try:
        found = plain_json(text or "{}")
    except ValueError:
        return text
    return found if isinstance(found, dict) else text


def content_text(content: str | Sequence[AnyPart]) -> str:
    return content if isinstance(content, str) else "".join(map(_part_text, content))


def _part_text(part: AnyPart) -> str:
    if isinstance(part, str):
        return part
    return part.refusal if isinstance(part, RefusalPart) else part.text
