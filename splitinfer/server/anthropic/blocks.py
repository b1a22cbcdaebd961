"""Blocks of Anthropic's messages, and their text; and the system's turns among the messages.

Text is in blocks of text, in documents that are text, and in results of a client's own search; pictures are parts of
the text (``server.pictures``). Everything else was made by tools that Anthropic's servers run.

A system turn may hold for the user's next question only, add tools or take them away, and say with how much
effort the model shall answer (beta `mid-conversation-tool-changes`; anthropic 2.12.0,
``types/beta/beta_system_message_param.py``). What counts for an answer is what holds at its end: the model is told of
the tools that there are then.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from splitinfer.pictures.marks import in_lines, marked
from splitinfer.server.fields import EMPTY, Fields, Ignored, Kinds, Refused, TextOrSeveral
from splitinfer.server.openai.generating import FOR_TEMPLATE, Cached
from splitinfer.server.openai.response_items import BY_MODEL, names_direct


def _is_off(citations: Any) -> bool:
    return isinstance(citations, dict) and citations.get("enabled") in (None, False)


_TEXT_ONLY = "the model is given text and pictures only"
_NO_CITATIONS = Refused("answers do not cite", is_neutral=_is_off, said='{"enabled": false}')
_NO_TOOLSET = Refused("only Anthropic's models know toolsets")


class _Block(Fields):
    cache_control: Cached = None


# -- text ------------------------------------------------------------------------------------------


class TextBlock(_Block):
    """A block of text"""

    type: Literal["text"]
    text: str
    citations: Annotated[Any, Ignored("they name the source of the text for human readers")] = None


class PictureData(Fields):
    """A picture as a source, in base64"""

    type: Literal["base64"]
    data: str
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]


class PictureAddress(Fields):
    """A picture as a source, by its URL"""

    type: Literal["url"]
    url: str = Field(description="A data URL; addresses are not fetched")


class ImageBlock(_Block):
    """A block with a picture"""

    type: Literal["image"]
    source: Annotated[PictureData | PictureAddress, Kinds("type", refused={"file": "nothing is stored here"})]
    transformations: Annotated[Any, Refused("the model's own processor says how large a picture is", EMPTY)] = None

    @property
    def text(self) -> str:
        if isinstance(self.source, PictureAddress):
            return marked(self.source.url)
        return marked(f"data:{self.source.media_type};base64,{self.source.data}")


Texts = TextOrSeveral[Annotated[TextBlock, Kinds("type", refused={"image": "pictures go into messages"})]]


class TextSource(Fields):
    """Text as a source"""

    type: Literal["text"]
    data: str
    media_type: Any = None


class BlocksSource(Fields):
    """Blocks as a source"""

    type: Literal["content"]
    content: Texts


class Document(_Block):
    """A document"""

    type: Literal["document"]
    title: str | None = None
    context: str | None = None
    source: Annotated[
        TextSource | BlocksSource,
        Kinds(
            "type",
            refused={
                "base64": _TEXT_ONLY, "url": "nothing is fetched here", "file": "nothing is stored here",
            },
        ),
    ]  # fmt: skip
    citations: Annotated[Any, _NO_CITATIONS] = None


class SearchResult(_Block):
    """A search result"""

    type: Literal["search_result"]
    title: str | None = None
    source: str | None = None
    content: Texts
    citations: Annotated[Any, _NO_CITATIONS] = None


class ToolReference(_Block):
    """A reference to a tool, in the result of a call"""

    type: Literal["tool_reference"]
    tool_name: str = Field(description="Becomes text; the model sees all tools from the start")


_WithText = TextBlock | ImageBlock | Document | SearchResult | ToolReference
_Outcome = TextOrSeveral[Annotated[_WithText, Kinds("type", refused={"browser_state": _TEXT_ONLY})]]

# -- thinking and tools ----------------------------------------------------------------------------


class Thinking(Fields):
    """A block of thinking"""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[Any, Ignored("only Anthropic can check it")] = None


class ToolUse(_Block):
    """A block with a call"""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict)
    caller: Annotated[Any, BY_MODEL] = None
    toolset_name: Annotated[Any, _NO_TOOLSET] = None


class ToolResult(_Block):
    """A block with the result of a call"""

    type: Literal["tool_result"]
    tool_use_id: str
    content: _Outcome = ""
    is_error: bool = Field(False, description="Reported to the model if there is no text that says so")
    toolset_name: Annotated[Any, _NO_TOOLSET] = None


_REFUSED = dict.fromkeys(
    (
        "container_upload", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result",
        "code_execution_tool_result", "bash_code_execution_tool_result", "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
    ),
    "only Anthropic's servers can run it, or read its result",
)  # fmt: skip
_LEFT_OUT = {"redacted_thinking": "only its author can read it"}
UserContent = TextOrSeveral[
    Annotated[
        TextBlock | ImageBlock | Document | SearchResult | ToolResult | None,
        Kinds(
            "type",
            refused=_REFUSED | dict.fromkeys(("thinking", "tool_use"), "it cannot be in a user turn"),
            left_out=_LEFT_OUT,
        ),
    ]
]
AssistantContent = TextOrSeveral[
    Annotated[
        TextBlock | Document | SearchResult | Thinking | ToolUse | None,
        Kinds(
            "type",
            refused=_REFUSED | dict.fromkeys(("tool_result", "image"), "it cannot be in an assistant turn"),
            left_out=_LEFT_OUT,
        ),
    ]
]

# -- tools, and changes of them --------------------------------------------------------------------


class Tool(Fields):
    """A tool of Anthropic"""

    type: Literal["custom"]
    name: str
    description: str = Field("", description="Shown to the model")
    input_schema: dict[str, Any] = Field(description="Shown to the model")
    cache_control: Cached = None
    strict: Annotated[Any, Ignored("agents send it with every tool; calls are not held to the schema")] = None
    defer_loading: Annotated[Any, Ignored("the model sees all tools from the start")] = None
    eager_input_streaming: Annotated[Any, Ignored("the input of a call comes in one piece")] = None
    input_examples: Annotated[
        Any, Refused("templates have no place for them; put them into description", EMPTY)
    ] = None  # fmt: skip
    allowed_callers: Annotated[
        Any,
        Refused("only the model calls tools; nothing else runs here", is_neutral=names_direct, said='["direct"]'),
    ] = None

    def told(self) -> dict[str, Any]:
        """The tool in OpenAI's form, which templates know."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


AnyTool = Annotated[
    Tool | None,
    Kinds(
        "type",
        default="custom",
        refused=dict.fromkeys(
            (
                "bash_20250124", "text_editor_20250124", "text_editor_20250429", "text_editor_20250728",
                "memory_20250818", "computer_toolset_20260801", "browser_toolset_20260801",
            ),
            "only Anthropic's models know its input; give a tool with an input_schema",
        ),
        others="Anthropic's servers run it, and agents list it next to their own",
    ),
]  # fmt: skip


class NamedTool(Fields):
    """A tool by its name"""

    type: Literal["tool_reference"]
    name: str


class DefinedTool(Fields):
    """A tool with its definition"""

    type: Literal["tool_definition"]
    definition: AnyTool = Field(description="The same as an entry of `tools`")


_ChangedTool = Annotated[
    NamedTool | DefinedTool,
    Kinds("type", refused=dict.fromkeys(("mcp_tool_reference", "mcp_toolset_reference"), "nothing is run here")),
]


class ToolChange(_Block):
    """A block that adds a tool or removes one"""

    type: Literal["tool_addition", "tool_removal"]
    tool: _ChangedTool


SystemContent = TextOrSeveral[
    Annotated[TextBlock | ToolChange, Kinds("type", refused={"image": "pictures go into messages"})]
]


class Effort(Fields):
    """Configuration that applies from a turn on"""

    effort: str | None = Field(None, description=FOR_TEMPLATE)


def text_of(content: str | Sequence[_WithText]) -> str:
    return content if isinstance(content, str) else in_lines(map(block_text, content))


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
    """A system turn"""

    role: Literal["system"]
    content: SystemContent = ""
    clear_at: Literal["never", "next_user_message"] = Field(
        "never", description="`next_user_message` leaves the turn out when a user turn follows"
    )
    output_config: Effort | None = None

    def words(self, *, user_follows: bool) -> str | None:
        """What it says; ``None``: nothing, or nothing any more. ``user_follows``: a turn of the user is behind it."""
        if self.clear_at != "never" and user_follows:
            return None
        if isinstance(self.content, str):
            return self.content or None
        return text_of([block for block in self.content if not isinstance(block, ToolChange)]) or None

    @property
    def changes(self) -> list[ToolChange]:
        return [] if isinstance(self.content, str) else [one for one in self.content if isinstance(one, ToolChange)]


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
    said = [turn.output_config.effort for turn in turns if turn.output_config is not None]
    return next((one for one in reversed(said) if one is not None), effort)
