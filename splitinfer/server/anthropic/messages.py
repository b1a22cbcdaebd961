"""`POST /v1/messages` and `/v1/messages/count_tokens`: a request as an `Ask`.

A message of this API is a list of blocks, while chat templates know OpenAI's form. So a user's turn with results of
tools becomes one message for each result, and then one with its text. A turn of the assistant becomes one message with
its text, its thinking and its calls. Text comes from text blocks, from documents with text, and from results of a
client's own search. Pictures are parts of the text (``server.reading``).

The system prompt stands beside the messages or among them; system messages at the beginning are merged. A system turn
may apply to the user's next question only, add or remove tools, and set the model's effort (beta
`mid-conversation-tool-changes`; anthropic 2.12.0). The state at the end of the conversation counts.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from splitinfer.pictures.marks import in_lines, marked
from splitinfer.server.ask import MAX_MESSAGES, MAX_TOOLS, AnswerRequest, Ask, AskedChat
from splitinfer.server.fields import Count, Fields, Kinds, Name, Parts, one_of
from splitinfer.server.history import history, taken_by, told
from splitinfer.server.openai.forms import grammar_of
from splitinfer.server.openai.generating import ForTemplate, NamedFunction, Sampling, Stops, Told, Word, chosen
from splitinfer.server.openai.messages import merged_systems, told_call
from splitinfer.server.problem import Problem
from splitinfer.server.refused import CITED, COUNTED, OUTPUT, REFUSED

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


class Document(Fields):
    refused = CITED
    type: Literal["document"]
    title: str | None = None
    context: str | None = None
    source: Annotated[TextSource | BlocksSource, Kinds("type")]

    @property
    def text(self) -> str:
        source = self.source
        text = source.data if isinstance(source, TextSource) else text_of(source.content)
        return _with_heading(self.title, self.context, text)


class SearchResult(Fields):
    refused = CITED
    type: Literal["search_result"]
    title: str | None = None
    source: str | None = None
    content: Texts

    @property
    def text(self) -> str:
        return _with_heading(self.title, self.source, text_of(self.content))


class ToolReference(Fields):
    """A tool named in the result of a call. It becomes text, because the model sees all tools from the start."""

    type: Literal["tool_reference"]
    text: str = Field(alias="tool_name")


_WithText = TextBlock | ImageBlock | Document | SearchResult | ToolReference
_InResult = Annotated[_WithText, Kinds("type")]

# -- thinking and tools ----------------------------------------------------------------------------


class Thinking(Fields):
    type: Literal["thinking"]
    thinking: str


class ToolUse(Fields):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] | str = Field(default_factory=dict)


class ToolResult(Fields):
    """``is_error``: told to the model if no text says so."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Parts[_InResult] = Field(default_factory=list)
    is_error: bool = False


_BLOCKS = Kinds("type", left_out="redacted_thinking".__eq__)  # only its author can read it
UserBlock = Annotated[TextBlock | ImageBlock | Document | SearchResult | ToolResult | None, _BLOCKS]
AssistantBlock = Annotated[TextBlock | Document | SearchResult | Thinking | ToolUse | None, _BLOCKS]
_IN_RESULT = taken_by(_InResult)
_TAKEN = {"user": taken_by(UserBlock), "assistant": taken_by(AssistantBlock)}


def _mended(turn: dict[str, Any], just_sent: bool) -> dict[str, Any]:
    """Return a turn with sentences in place of unreadable blocks; if it was just sent, only inside results of tools."""
    role, content = turn.get("role"), turn.get("content")
    if role not in ("user", "assistant") or not isinstance(content, list):
        return turn
    with_parts = ("tool_result",) if just_sent else ("tool_result", "search_result")
    blocks = [
        told(one, _IN_RESULT) if isinstance(one, dict) and one.get("type") in with_parts else one for one in content
    ]
    turn = {**turn, "content": blocks}
    return turn if just_sent else told(turn, _TAKEN[role])


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
        """Return the function in OpenAI's form, which templates know."""
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
    return in_lines(block.text for block in content)


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
        """Return the turn's text. Return None if it has none, or if it no longer applies. ``user_follows``: a user's
        turn comes later."""
        if self.clear_at != "never" and user_follows:
            return None
        return text_of([block for block in self.content if not isinstance(block, ToolChange)]) or None

    @property
    def changes(self) -> list[ToolChange]:
        return [one for one in self.content if isinstance(one, ToolChange)]


def changed_tools(tools: Sequence[Tool], turns: Sequence[SystemTurn]) -> list[Tool]:
    """Return the tools that remain after all turns."""
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


# -- requests -----------------------------------------------------------------------------------------


class UserTurn(Fields):
    role: Literal["user"]
    content: Parts[UserBlock]

    def told(self) -> list[dict[str, Any]]:
        results = [_result(block) for block in self.content if isinstance(block, ToolResult)]
        texts = [block.text for block in self.content if block is not None and not isinstance(block, ToolResult)]
        return [*results, *([{"role": "user", "content": in_lines(texts)}] if texts or not results else [])]


def _result(block: ToolResult) -> dict[str, Any]:
    text = text_of(block.content) or ("error" if block.is_error else "")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


class AssistantTurn(Fields):
    role: Literal["assistant"]
    content: Parts[AssistantBlock]

    def told(self) -> dict[str, Any]:
        text, thinking, calls = [], [], []
        for block in self.content:
            match block:
                case Thinking():
                    thinking.append(block.thinking)
                case ToolUse():
                    calls.append(told_call(block.id, block.name, block.input))
                case None:
                    pass
                case said:
                    text.append(said.text)
        made: dict[str, Any] = {"role": "assistant", "content": "".join(text)}
        if thought := "".join(thinking):
            made["reasoning_content"] = thought
        return made | ({"tool_calls": calls} if calls else {})


Turn = UserTurn | AssistantTurn | SystemTurn


class Choice(Fields):
    type: Literal["auto", "none", "any"]
    disable_parallel_tool_use: bool = False  # the answer ends after its first call


_WORDS = {"auto": Word(type="auto"), "none": Word(type="none"), "any": Word(type="required")}


class ToolChoice(Fields):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = True


class SchemaOutput(Fields):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class Thinks(Fields):
    """``budget_tokens``: the most tokens of thinking before the answer begins. ``display``: whether to show the
    thinking."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    display: Annotated[str, one_of("summarized", "omitted")] = "summarized"
    budget_tokens: Count | None = None


class Output(Effort):
    refused = OUTPUT
    format: SchemaOutput | None = None


class CountRequest(ForTemplate):
    """A request for the number of a conversation's tokens."""

    refused = COUNTED
    model: Name | None = None
    messages: Annotated[
        list[Annotated[Turn, Kinds("role")]], Field(max_length=MAX_MESSAGES, fail_fast=True), history(_mended)
    ]
    system: Texts = Field(default_factory=list)
    tools: list[AnyTool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Annotated[Choice | ToolChoice, Kinds("type")] = Choice(type="auto")
    thinking: Thinks | None = None
    output_config: Output = Output()
    output_format: SchemaOutput | None = None  # the beta's field; output_config.format takes precedence

    def chat(self) -> AskedChat:
        """Return the conversation.

        Raises:
            Problem: 400, there is nothing to answer.
        """
        system = text_of(self.system)
        messages: list[Mapping[str, Any]] = [{"role": "system", "content": system}] if system else []
        last_user = max((i for i, turn in enumerate(self.messages) if isinstance(turn, UserTurn)), default=-1)
        for i, turn in enumerate(self.messages):
            messages += _told(turn, user_follows=i < last_user)
        if all(message["role"] == "system" for message in messages):
            raise Problem(400, "messages must have at least one message", param="messages")
        goes_on = messages[-1]["role"] == "assistant"
        told, tools = merged_systems(messages), self.functions()[0]
        return AskedChat(told, tools, self.template_options(), opens_answer=not goes_on, continues=goes_on)

    def functions(self) -> tuple[Told, Told, bool]:
        """Return the result of ``chosen`` for this request."""
        choice = self.tool_choice
        asked = (
            NamedFunction(type="function", name=choice.name) if isinstance(choice, ToolChoice) else _WORDS[choice.type]
        )
        tools = changed_tools([tool for tool in self.tools if tool is not None], self._system_turns)
        return chosen([tool.told() for tool in tools], asked)

    @property
    def _system_turns(self) -> Sequence[SystemTurn]:
        return [turn for turn in self.messages if isinstance(turn, SystemTurn)]

    def template_options(self, verbosity: str | None = None) -> dict[str, Any]:
        options = super().template_options(verbosity)
        for said in (self.output_config, *(turn.output_config for turn in self._system_turns)):  # the last one counts
            if said.effort is not None:
                options["reasoning_effort"] = said.effort
        if self.thinking is not None:
            options["enable_thinking"] = self.thinking.type != "disabled"
        return options


def _told(turn: Turn, *, user_follows: bool) -> list[dict[str, Any]]:
    match turn:
        case UserTurn():
            return turn.told()
        case AssistantTurn():
            return [turn.told()]
        case SystemTurn():
            words = turn.words(user_follows=user_follows)
            return [] if words is None else [{"role": "system", "content": words}]


class MessageRequest(CountRequest, Sampling, AnswerRequest):
    refused = REFUSED
    max_tokens: Count
    stop_sequences: Stops = Field(default_factory=list)

    @property
    def hides_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    def asks(self) -> tuple[Ask]:
        one_call, may_call = self.tool_choice.disable_parallel_tool_use, self.functions()[1:]
        return (Ask(self.chat(), self.sampling(), self.max_tokens, 1, one_call, *may_call, self.stream),)

    def sampling(self) -> dict[str, Any]:
        found = super().sampling() | self.budget()
        if stops := (*self.stop, *self.stop_sequences):
            found["stop"] = tuple(filter(None, stops))
        if self.thinking is not None and self.thinking.type == "enabled" and self.thinking.budget_tokens is not None:
            found["thinking_budget"] = self.thinking.budget_tokens
        form = self.output_config.format or self.output_format
        if form is not None:
            found["grammar"] = grammar_of(form.schema_, "output_config.format")
        return found
