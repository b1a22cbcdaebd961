"""Blocks of Anthropic's messages, and their text.

Text is in blocks of text, in documents that are text, and in results of a client's own search; pictures are parts of
the text (``server.reading``). Everything else was made by tools that Anthropic's servers run.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from splitinfer.pictures.marks import in_lines, marked
from splitinfer.server.fields import Fields, Kinds, Parts
from splitinfer.server.refused import CITED

# -- text ------------------------------------------------------------------------------------------


class TextBlock(Fields):
    type: Literal["text"]
    text: str


class PictureData(Fields):
    type: Literal["base64"]
    data: str
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]


class PictureAddress(Fields):
    type: Literal["url"]
    url: str


class ImageBlock(Fields):
    type: Literal["image"]
    source: Annotated[PictureData | PictureAddress, Kinds("type")]

    @property
    def text(self) -> str:
        if isinstance(self.source, PictureAddress):
            return marked(self.source.url)
        return marked(f"data:{self.source.media_type};base64,{self.source.data}")


Texts = Parts[TextBlock]


class TextSource(Fields):
    type: Literal["text"]
    data: str


class BlocksSource(Fields):
    type: Literal["content"]
    content: Texts


class _Cited(Fields):
    refused = CITED


class Document(_Cited):
    type: Literal["document"]
    title: str | None = None
    context: str | None = None
    source: Annotated[TextSource | BlocksSource, Kinds("type")]


class SearchResult(_Cited):
    type: Literal["search_result"]
    title: str | None = None
    source: str | None = None
    content: Texts


class ToolReference(Fields):
    """In the result of a call; it becomes text, for the model sees all tools from the start."""

    type: Literal["tool_reference"]
    tool_name: str


_WithText = TextBlock | ImageBlock | Document | SearchResult | ToolReference

# -- thinking and tools ----------------------------------------------------------------------------


class Thinking(Fields):
    type: Literal["thinking"]
    thinking: str


class ToolUse(Fields):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict)


class ToolResult(Fields):
    """``is_error``: told to the model if no text says so."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Parts[Annotated[_WithText, Kinds("type")]] = Field(default_factory=list)
    is_error: bool = False


_BLOCKS = Kinds("type", left_out="redacted_thinking".__eq__)  # only its author can read it
UserContent = Parts[Annotated[TextBlock | ImageBlock | Document | SearchResult | ToolResult | None, _BLOCKS]]
AssistantContent = Parts[Annotated[TextBlock | Document | SearchResult | Thinking | ToolUse | None, _BLOCKS]]


def text_of(content: Sequence[_WithText]) -> str:
    return in_lines(map(block_text, content))


def block_text(block: _WithText) -> str:
    match block:
        case TextBlock() | ImageBlock():
            return block.text
        case ToolReference():
            return block.tool_name
        case SearchResult():
            return _with_heading(block.title, block.source, text_of(block.content))
        case Document():
            source = block.source
            text = source.data if isinstance(source, TextSource) else text_of(source.content)
            return _with_heading(block.title, block.context, text)


def _with_heading(title: str | None, more: str | None, text: str) -> str:
    return "\n".join(one for one in (title, more, text) if one is not None)
