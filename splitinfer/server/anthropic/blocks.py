"""Blocks of Anthropic's messages, and their text; and the system's turns among the messages.

Text is in blocks of text, in documents that are text, and in results of a client's own search; pictures are parts of
the text (``server.reading``). Everything else was made by tools that Anthropic's servers run.

A system turn may hold for the user's next question only, add tools or take them away, and say with how much
effort the model shall answer (beta `mid-conversation-tool-changes`; anthropic 2.12.0,
``types/beta/beta_system_message_param.py``). What counts for an answer is what holds at its end: the model is told of
the tools that there are then.
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

# -- tools, and changes of them --------------------------------------------------------------------

# Tools whose input only Anthropic's models know; agents run them. Anthropic's servers run all others, and agents list
# them next to their own.
_UNKNOWN_INPUT = ("bash_", "text_editor_", "memory_", "computer_", "browser_")


class Tool(Fields):
    type: Literal["custom"]
    name: str
    description: str = ""
    input_schema: dict[str, Any]

    def told(self) -> dict[str, Any]:
        """The function in OpenAI's form, which templates know."""
        return {"name": self.name, "description": self.description, "parameters": self.input_schema}


AnyTool = Annotated[
    Tool | None, Kinds("type", default="custom", left_out=lambda kind: not kind.startswith(_UNKNOWN_INPUT))
]


class NamedTool(Fields):
    type: Literal["tool_reference"]
    name: str


class DefinedTool(Fields):
    type: Literal["tool_definition"]
    definition: AnyTool


class ToolChange(Fields):
    type: Literal["tool_addition", "tool_removal"]
    tool: Annotated[NamedTool | DefinedTool, Kinds("type")]


class Effort(Fields):
    """Configuration that applies from a turn on."""

    effort: str | None = None


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


# -- turns of the system ---------------------------------------------------------------------------


class SystemTurn(Fields):
    """``clear_at``: whether it is left out when a turn of the user follows."""

    role: Literal["system"]
    content: Parts[Annotated[TextBlock | ToolChange, Kinds("type")]] = Field(default_factory=list)
    clear_at: Literal["never", "next_user_message"] = "never"
    output_config: Effort = Effort()

    def words(self, *, user_follows: bool) -> str | None:
        """What it says; ``None``: nothing, or nothing any more. ``user_follows``: a turn of the user is behind it."""
        if self.clear_at != "never" and user_follows:
            return None
        return text_of([block for block in self.content if not isinstance(block, ToolChange)]) or None

    @property
    def changes(self) -> list[ToolChange]:
        return [one for one in self.content if isinstance(one, ToolChange)]


def changed_tools(tools: Sequence[Tool], turns: Sequence[SystemTurn]) -> list[Tool]:
    """The tools that there are behind all turns."""
    known = {tool.name: tool for tool in tools}
    there = dict(known)
    for change in (change for turn in turns for change in turn.changes):
        tool = change.tool
        if isinstance(tool, DefinedTool):
            if tool.definition is not None:
                known[tool.definition.name] = there[tool.definition.name] = tool.definition
        elif change.type == "tool_removal":
            there.pop(tool.name, None)
        elif tool.name in known:
            there[tool.name] = known[tool.name]
    return list(there.values())


def last_effort(turns: Sequence[SystemTurn], effort: str | None) -> str | None:
    """With how much effort the model shall answer: what the last turn says that says it, else ``effort``."""
    said = [turn.output_config.effort for turn in turns]
    return next((one for one in reversed(said) if one is not None), effort)
