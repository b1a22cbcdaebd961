"""`POST /v1/messages` and `/v1/messages/count_tokens`: a request as an `Ask`.

A message of this API is a list of blocks. For chat templates, which know OpenAI's form, a turn of the user with results
of tools becomes one message for each result, and then its text; a turn of the assistant becomes one message with its
text, its thinking and its calls. The system's words stand beside the messages, as text or as blocks, and some clients
also put them among the messages; those at the beginning become one.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from splitinfer.pictures.marks import in_lines
from splitinfer.server.anthropic.blocks import (
    AnyTool,
    AssistantContent,
    Effort,
    SystemTurn,
    Texts,
    Thinking,
    ToolResult,
    ToolUse,
    UserContent,
    block_text,
    changed_tools,
    last_effort,
    text_of,
)
from splitinfer.server.ask import MAX_MESSAGES, MAX_TOOLS, AnswerRequest, Ask, Chat
from splitinfer.server.fields import Count, Fields, Kinds, Name
from splitinfer.server.openai.forms import grammar_of
from splitinfer.server.openai.generating import ForTemplate, NamedFunction, Sampling, Stops, Told, Word, chosen
from splitinfer.server.openai.messages import merged_systems
from splitinfer.server.problem import Problem
from splitinfer.server.refused import OUTPUT

_Display = Literal["summarized", "omitted"]


class UserTurn(Fields):
    role: Literal["user"]
    content: UserContent

    def told(self) -> list[dict[str, Any]]:
        results = [_result(block) for block in self.content if isinstance(block, ToolResult)]
        texts = [
            block_text(block) for block in self.content if block is not None and not isinstance(block, ToolResult)
        ]  # fmt: skip
        return [*results, *([{"role": "user", "content": in_lines(texts)}] if texts or not results else [])]


def _result(block: ToolResult) -> dict[str, Any]:
    text = text_of(block.content) or ("error" if block.is_error else "")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


class AssistantTurn(Fields):
    role: Literal["assistant"]
    content: AssistantContent

    def told(self) -> dict[str, Any]:
        text, thinking, calls = [], [], []
        for block in self.content:
            match block:
                case Thinking():
                    thinking.append(block.thinking)
                case ToolUse():
                    calls.append(_call(block))
                case None:
                    pass
                case said:
                    text.append(block_text(said))
        made: dict[str, Any] = {"role": "assistant", "content": "".join(text)}
        if thought := "".join(thinking):
            made["reasoning_content"] = thought
        return made | ({"tool_calls": calls} if calls else {})


def _call(block: ToolUse) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


Turn = UserTurn | AssistantTurn | SystemTurn


class Choice(Fields):
    type: Literal["auto", "none", "any"]
    disable_parallel_tool_use: bool = False  # the answer ends after its first call


_WORDS = {"auto": Word(type="auto"), "none": Word(type="none"), "any": Word(type="required")}


class NamedTool(Fields):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = True


class SchemaOutput(Fields):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class Thinks(Fields):
    """``budget_tokens``: of thinking; then the answer begins. ``display``: whether it is shown."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    display: _Display = "summarized"
    budget_tokens: Count | None = None


class Output(Effort):
    refused = OUTPUT
    format: SchemaOutput | None = None


class CountRequest(ForTemplate):
    """A request for the number of a conversation's tokens."""

    model: Name | None = None
    messages: list[Annotated[Turn, Kinds("role")]] = Field(max_length=MAX_MESSAGES, fail_fast=True)
    system: Texts = Field(default_factory=list)
    tools: list[AnyTool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Annotated[Choice | NamedTool, Kinds("type")] = Choice(type="auto")
    thinking: Thinks | None = None
    output_config: Output = Output()
    output_format: SchemaOutput | None = None  # of the beta; output_config.format takes precedence

    def chat(self) -> Chat:
        """The conversation.

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
        told, tools = tuple(merged_systems(messages)), self.functions()[0]
        return Chat(told, tools, self._options(), opens_answer=not goes_on, continues=goes_on)

    def functions(self) -> tuple[Told, Told]:
        """As ``chosen``."""
        choice = self.tool_choice
        asked = (
            NamedFunction(type="function", name=choice.name) if isinstance(choice, NamedTool) else _WORDS[choice.type]
        )
        tools = changed_tools([tool for tool in self.tools if tool is not None], self._system_turns)
        return chosen([tool.told() for tool in tools], asked)

    @property
    def _system_turns(self) -> Sequence[SystemTurn]:
        return [turn for turn in self.messages if isinstance(turn, SystemTurn)]

    def _options(self) -> dict[str, Any]:
        """What the template is told of thinking."""
        options = self.template_options()
        if (effort := last_effort(self._system_turns, self.output_config.effort)) is not None:
            options["reasoning_effort"] = effort
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
    max_tokens: Count
    stop_sequences: Stops = Field(default_factory=list)

    @property
    def hides_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    def asks(self) -> tuple[Ask]:
        one_call, must_call = self.tool_choice.disable_parallel_tool_use, self.functions()[1]
        return (Ask(self.chat(), self.sampling(), self.max_tokens, 1, one_call, must_call, self.stream),)

    def sampling(self) -> dict[str, Any]:
        found = super().sampling() | self.budget()
        if stops := (*self.stop, *self.stop_sequences):
            found["stop"] = tuple(filter(None, stops))
        if self.thinking is not None and self.thinking.type == "enabled" and self.thinking.budget_tokens is not None:
            found["thinking_budget"] = self.thinking.budget_tokens
        if self.thinking is not None and self.thinking.type == "disabled":
            found["thinking_budget"] = 0
        form = self.output_config.format or self.output_format
        if form is not None:
            found["grammar"] = grammar_of(form.schema_, "output_config.format")
        return found
