"""`POST /v1/messages` and `/v1/messages/count_tokens`: a request as an `Ask`.

A message of this API is a list of blocks. For chat templates, which know OpenAI's form, a turn of the user with results
of tools becomes one message for each result, and then its text; a turn of the assistant becomes one message with its
text, its thinking and its calls. The system's words stand beside the messages, as text or as blocks, and some clients
also put them among the messages; those at the beginning become one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from splitinfer.server.ask import MAX_MESSAGES, MAX_TOOLS, Ask, Chat
from splitinfer.server.fields import EMPTY, Count, CountOrNone, Fields, Ignored, Kinds, Name, Refused
from splitinfer.server.openai.generating import FOR_TEMPLATE, HELD, ByKeys, Cached, OneTier, Stops, grammar_of
from splitinfer.server.openai.messages import merged_systems
from splitinfer.server.problem import Problem, invalid, unsupported

_NO_SANDBOX = "nothing is run here"
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""What makes Anthropic's own helpers send whole conversations (anthropic 2.12.0, ``lib/threads``, recovers_from)."""
_OfAnswer = Annotated[Any, Ignored("only the content of an earlier answer is used")]
_Display = Literal["summarized", "omitted"]
_NotPaid = Annotated[Any, Ignored("there is no billing here")]


class UserTurn(Fields):
    """A user turn"""

    role: Literal["user"]
    content: UserContent

    def told(self) -> list[dict[str, Any]]:
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        results = [_result(block) for block in self.content if isinstance(block, ToolResult)]
        texts = [
            block_text(block) for block in self.content if block is not None and not isinstance(block, ToolResult)
        ]  # fmt: skip
        return [*results, *([{"role": "user", "content": in_lines(texts)}] if texts or not results else [])]


def _result(block: ToolResult) -> dict[str, Any]:
    text = text_of(block.content) or ("error" if block.is_error else "")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


class AssistantTurn(Fields):
    """An assistant turn"""

    role: Literal["assistant"]
    content: AssistantContent
    id: _OfAnswer = None
    type: _OfAnswer = None
    model: _OfAnswer = None
    stop_reason: _OfAnswer = None
    stop_sequence: _OfAnswer = None
    stop_details: _OfAnswer = None
    usage: _OfAnswer = None
    container: _OfAnswer = None

    def told(self) -> dict[str, Any]:
        if isinstance(self.content, str):
            return {"role": "assistant", "content": self.content}
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
    """A choice of tools of Anthropic"""

    type: Literal["auto", "none", "any"]
    disable_parallel_tool_use: bool = Field(False, description="An answer ends after its first call")


class NamedTool(Fields):
    """The tool to call"""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = Field(True, description="An answer ends after its first call")


class SchemaOutput(Fields):
    """JSON of a schema, of Anthropic"""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description=HELD)


class Enabled(Fields):
    """Enabled thinking"""

    type: Literal["enabled"]
    display: _Display = Field("summarized", description="`summarized` returns all of it; `omitted` leaves it out")
    budget_tokens: Count | None = Field(None, description="Most tokens of thinking; then the answer begins")


class Adaptive(Fields):
    """Adaptive thinking, the same as enabled"""

    type: Literal["adaptive"]
    display: _Display = "summarized"


class Plain(Fields):
    """Thinking between tools, the same as enabled; or disabled"""

    type: Literal["between_tools", "disabled"]


class Output(Effort):
    """Configuration of the output"""

    format: Annotated[SchemaOutput, Kinds("type")] | None = Field(None, description="The form of the answer")
    task_budget: Annotated[Any, Refused("the model is not told how many tokens are left")] = None


class CountRequest(Fields):
    """A request for the number of a conversation's tokens."""

    model: Name | None = Field(None, description="Any name, because there is only one model")
    messages: Annotated[
        list[Annotated[Turn, Kinds("role")]],
        Field(max_length=MAX_MESSAGES, fail_fast=True),
    ] = Field(description="Text, thinking, tool calls and their results")
    system: Texts | None = Field(None, description="System message; system messages may also be among the messages")
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list, description="Tools with an input_schema that the model may call"
    )
    tool_choice: Annotated[Choice | NamedTool, Kinds("type")] | None = Field(
        None, description="Whether the model may call a tool, or must, and which"
    )
    thinking: Annotated[Enabled | Adaptive | Plain, Kinds("type")] | None = Field(None, description=FOR_TEMPLATE)
    output_config: Output | None = None
    cache_control: Cached = None
    speed: Annotated[Any, Refused("there is one speed", ("standard",))] = None
    user_profile_id: ByKeys = None
    workspace_id: ByKeys = None
    # of the beta, some of which agents send whatever the server
    betas: Annotated[Any, Ignored("the features of a beta have their own fields")] = None
    context_management: Annotated[
        Any, Ignored("no edit is applied, and the answer says so; a prompt that is too long is refused")
    ] = None
    mcp_servers: Annotated[Any, Refused(_NO_SANDBOX, EMPTY)] = None
    output_format: Annotated[SchemaOutput, Kinds("type")] | None = Field(
        None, description="The form of the answer; output_config.format takes precedence"
    )
    compaction: Annotated[Any, Refused("a conversation is taken as it is", EMPTY)] = None
    billing_policy: _NotPaid = None

    def chat(self) -> Chat:
        """The conversation.

        Raises:
            Problem: 400, there is nothing to answer.
        """
        system = text_of(self.system or "")
        messages: list[Mapping[str, Any]] = [{"role": "system", "content": system}] if system else []
        last_user = max((i for i, turn in enumerate(self.messages) if isinstance(turn, UserTurn)), default=-1)
        for i, turn in enumerate(self.messages):
            messages += _told(turn, user_follows=i < last_user)
        if all(message["role"] == "system" for message in messages):
            raise Problem(400, "messages must have at least one message", param="messages")
        if messages[-1]["role"] == "assistant":
            raise unsupported("messages", "the last one must not be the assistant's: an answer cannot be begun for it")
        turns = [turn for turn in self.messages if isinstance(turn, SystemTurn)]
        return Chat(tuple(merged_systems(messages)), self._told_tools(turns), self._options(turns))

    def _told_tools(self, turns: Sequence[SystemTurn]) -> tuple[Mapping[str, Any], ...]:
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return ()
        tools = changed_tools([tool for tool in self.tools if tool is not None], turns)
        return tuple(tool.told() for tool in tools)

    def _options(self, turns: Sequence[SystemTurn]) -> dict[str, Any]:
        """What the template is told of thinking."""
        effort = last_effort(turns, None if self.output_config is None else self.output_config.effort)
        options: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
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


class MessageRequest(CountRequest):
    """A request for a message."""

    max_tokens: Count = Field(description="Token limit of the answer; at most the room that the context leaves")
    stop_sequences: Stops | None = Field(None, description="Texts that end the answer")
    stream: bool = Field(False, description="Sends the answer in parts as it is generated")
    temperature: float | None = Field(None, description="Randomness of sampling; 0 always takes the most likely token")
    top_p: float | None = Field(None, description="Samples from the most likely tokens with this total probability")
    top_k: CountOrNone | None = Field(None, description="Samples from this many of the most likely tokens; 0 is off")
    metadata: ByKeys = None
    service_tier: OneTier = None
    inference_geo: Annotated[Any, Refused("the server does not know the location of its machines", ("global",))] = None
    container: Annotated[Any, Refused(_NO_SANDBOX)] = None
    diagnostics: Annotated[Any, Ignored("it asks why Anthropic's cache was missed; an answer to it is optional")] = None
    fallbacks: Annotated[Any, Refused("there is one model", EMPTY)] = None
    fallback_credit_token: _NotPaid = None
    thread: Annotated[
        Any, Refused("nothing is stored here; give the whole conversation as messages", details=_NO_THREADS)
    ] = None

    def sampling(self) -> dict[str, Any]:
        names = ("temperature", "top_p", "top_k")
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.stop_sequences is not None:
            stops = self.stop_sequences
            found["stop"] = (stops,) if isinstance(stops, str) else tuple(stops)
        if isinstance(self.thinking, Enabled) and self.thinking.budget_tokens is not None:
            found["thinking_budget"] = self.thinking.budget_tokens
        form = self.output_format if self.output_config is None else self.output_config.format or self.output_format
        if form is not None:
            found["grammar"] = grammar_of(form.schema_, "output_config.format")
        return found

    def forced_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The functions one of which the model must call; none where it need not.

        Raises:
            Problem: 400, no tool has that name, or no tools were given.
        """
        choice = self.tool_choice
        if choice is None or choice.type in ("auto", "none"):
            return ()
        told = self.chat().tools
        name = choice.name if isinstance(choice, NamedTool) else None
        found = tuple(one for one in told if name is None or one["function"]["name"] == name)
        if not found:
            raise invalid("tool_choice", "tool_choice must name one of the tools")
        return found


@dataclass(frozen=True, slots=True)
class Shape:
    """What a client is shown of an answer. ``hides_thinking``: the model's thinking is left out. ``manages_context``:
    it is said that the conversation was not edited."""

    model: str
    streams: bool = False
    hides_thinking: bool = False
    manages_context: bool = False


def message_ask(request: MessageRequest, model: str = "") -> tuple[Ask, Shape]:
    """What a request asks, and in what shape. ``model``: the name in the answer where the request has none.

    Raises:
        Problem: 400, there is nothing to answer.
    """
    thinking, choice = request.thinking, request.tool_choice
    shape = Shape(
        model if request.model is None else request.model,
        request.stream,
        isinstance(thinking, Enabled | Adaptive) and thinking.display == "omitted",
        request.context_management is not None,
    )
    one_call = choice is not None and choice.disable_parallel_tool_use
    ask = Ask(
        request.chat(), request.sampling(), request.max_tokens, one_call=one_call, must_call=request.forced_tools()
    )
    return ask, shape
