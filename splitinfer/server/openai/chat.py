"""`POST /v1/chat/completions`: a request as an `Ask`; ``chat_writer`` writes the answer."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from splitinfer.core.sampling_params import MAX_LOGPROBS
from splitinfer.server.ask import MAX_TOOLS, Ask, Chat
from splitinfer.server.fields import EMPTY, AsGiven, Count, CountOrNone, Fields, Ignored, Kinds, Refused
from splitinfer.server.openai.chat_writer import Shape
from splitinfer.server.openai.generating import (
    FOR_TEMPLATE,
    NO_STORE,
    NOT_FORCED,
    ByKeys,
    Cached,
    CacheKey,
    CacheRoom,
    Choices,
    Entries,
    Generating,
    OfLlamaCpp,
    OfMlxLm,
    OneTier,
    StreamOptions,
    TemplateOptions,
    TextFormat,
    allowed,
    check_stream_options,
    forced,
    form_of,
    small_metadata,
    template_options,
)
from splitinfer.server.openai.messages import Messages, template_messages
from splitinfer.server.problem import Problem, invalid

STRICT = "`true`: a call that the model begins keeps the schema; a request whose schema cannot be enforced is refused"


class Function(Fields):
    """A function"""

    name: str
    description: Any = Field(None, description="Shown to the model")
    parameters: dict[str, Any] | None = Field(None, description="Its schema, shown to the model")
    strict: Any = Field(None, description=STRICT)
    return_: Any = Field(None, alias="return", description=FOR_TEMPLATE)


class Tool(Fields):
    """A tool"""

    type: Literal["function"]
    function: Annotated[dict[str, Any], AsGiven(Function)]
    cache_control: Cached = None


class _Allowed(Fields):
    """Allowed tools"""

    mode: Literal["auto", "required"] = Field("auto", description="Whether one must be called")
    tools: Entries = Field(description="The other tools are not shown to the model")


class _NamedFunction(Fields):
    """A function by its name"""

    name: str


class _Named(Fields):
    """The function to call"""

    type: Literal["function"]
    function: _NamedFunction


class _Choice(Fields):
    """A choice of allowed tools"""

    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


Tools = Annotated[
    list[Annotated[Tool, Kinds("type", refused={"custom": "tools are functions"})]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]
ToolChoice = Annotated[str | _Choice | _Named, Kinds("type", words=("auto", "none", "required"), no_words=NOT_FORCED)]


class Conversation(Fields):
    """What a template writes out."""

    tools: Tools = Field(default_factory=list, description="Functions that the model may call")
    tool_choice: ToolChoice = Field("auto", description="Whether the model may call a tool, and which")
    reasoning_effort: str | None = Field(None, description=f"{FOR_TEMPLATE}; `none` turns reasoning off")
    verbosity: str | None = Field(None, description=FOR_TEMPLATE)
    enable_thinking: bool | None = Field(None, description=FOR_TEMPLATE)
    chat_template_kwargs: TemplateOptions | None = Field(None, description="More options for the model's template")

    def template_options(self) -> dict[str, Any]:
        return template_options(
            self.chat_template_kwargs,
            thinks=self.enable_thinking,
            verbosity=self.verbosity,
            effort=self.reasoning_effort,
        )

    def told_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The functions that the model is told of: those that it may call, none where it shall not.

        Raises:
            Problem: 400, a choice allows one that is not there.
        """
        choice, names = self.tool_choice, [tool.function["name"] for tool in self.tools]
        tools = [{"type": "function", "function": tool.function} for tool in self.tools]
        if isinstance(choice, str):
            return () if choice == "none" else tuple(tools)
        if isinstance(choice, _Named):
            if choice.function.name not in names:
                given = f"not {choice.function.name!r:.60}"
                raise invalid("tool_choice", f"tool_choice must name one of the tools, {given}")
            return tuple(tools)
        may = allowed(
            "tool_choice.allowed_tools", choice.allowed_tools.tools, names, lambda one: one.get("function")
        )  # fmt: skip
        return tuple(tool for tool, name in zip(tools, names, strict=True) if name in may)

    def forced_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The functions one of which the model must call; none where it need not.

        Raises:
            Problem: 400, as ``told_tools``, or there are none.
        """
        choice = self.tool_choice
        name = choice.function.name if isinstance(choice, _Named) else None
        mode = choice.allowed_tools.mode if isinstance(choice, _Choice) else choice
        return forced(self.told_tools(), name, must=mode == "required")


class ChatReasoning(Fields):
    """Reasoning of chats"""

    max_tokens: CountOrNone | None = Field(None, description="Most tokens of reasoning; then the answer begins")
    effort: str | None = Field(None, description=f"{FOR_TEMPLATE}; `none` turns reasoning off")
    exclude: Annotated[Any, Refused("reasoning is returned whole", (False,))] = None
    enabled: Annotated[Any, Ignored("effort `none` turns it off")] = None


Limit = Annotated[Count | None, BeforeValidator(lambda given: None if type(given) is int and given == -1 else given)]


class ChatRequest(Conversation, Generating, OfMlxLm, OfLlamaCpp):
    """A request for a chat completion."""

    messages: Messages = Field(description="The conversation, text only")
    max_tokens: Limit | None = Field(
        None, description="Token limit of the answer; at most the room that the context leaves, as with -1"
    )
    max_completion_tokens: Limit | None = Field(None, description="Takes precedence over max_tokens")
    include_reasoning: Annotated[Any, Refused("reasoning is returned whole", (True,))] = None
    n: Choices = Field(1, description="Number of answers")
    stream_options: StreamOptions | None = Field(None, description="Only with stream")
    logprobs: bool = Field(False, description="Returns the log probability of each token")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="With logprobs: also returns this many of the most likely tokens for each"
    )
    parallel_tool_calls: bool = Field(True, description="If false, an answer ends after its first call")
    metadata: Annotated[
        Any, AfterValidator(small_metadata), Field(description=f"Ignored: it is for stored answers, and {NO_STORE}")
    ] = None
    safety_identifier: ByKeys = None
    service_tier: OneTier = None
    prompt_cache_key: CacheKey = None
    prompt_cache_options: CacheRoom = None
    prompt_cache_retention: CacheRoom = None
    response_format: TextFormat | None = Field(None, description="The form of the answer")
    reasoning: ChatReasoning | None = Field(None, description="How much to reason")
    audio: Annotated[Any, Refused("answers are text")] = None
    modalities: Annotated[Any, Refused("answers are text", (["text"],))] = None
    prediction: Annotated[Any, Refused("drafts come from the layout's draft model")] = None
    web_search_options: Annotated[Any, Refused("the server runs no searches")] = None
    moderation: Annotated[Any, Refused("the server does not moderate")] = None
    functions: Annotated[Any, Refused("it is deprecated; give tools", EMPTY)] = None
    function_call: Annotated[Any, Refused("it is deprecated; give tool_choice", ("none", "auto"))] = None
    store: Annotated[Any, Refused(NO_STORE, (False,))] = None
    add_generation_prompt: Annotated[Any, Refused("the prompt always ends where the answer begins", (True,))] = None
    continue_final_message: Annotated[Any, Refused("the prompt always ends where the answer begins", (False,))] = None
    add_special_tokens: Annotated[Any, Refused("the model's template always writes its own", (False,))] = None
    echo: Annotated[Any, Refused("a chat has no text that could be repeated", (False,))] = None
    best_of: Annotated[Any, Refused("answers are not ranked", (1,))] = None


def chat_ask(request: ChatRequest, model: str = "") -> tuple[Ask, Shape]:
    """What a request asks, and in what shape. ``model``: the name in the answer where the request has none.

    Raises:
        Problem: 400, fields contradict each other.
    """
    if request.top_logprobs and not request.logprobs:
        raise Problem(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    num_top = (request.top_logprobs or 0) if request.logprobs else None
    chat = Chat(template_messages(request.messages), request.told_tools(), request.template_options())
    sampling = request.sampling() | ({} if num_top is None else {"logprobs": num_top})
    sampling |= form_of(request.response_format)
    if request.reasoning is not None and request.reasoning.max_tokens is not None:
        sampling["thinking_budget"] = request.reasoning.max_tokens
    most = request.max_completion_tokens or request.max_tokens
    shape = shape_of(request, request.stream_options, num_top, model, names_tier=request.service_tier is not None)
    return Ask(chat, sampling, most, request.n, not request.parallel_tool_calls, request.forced_tools()), shape


def shape_of(
    request: Generating, options: StreamOptions | None, num_top: int | None, model: str, *, names_tier: bool = False
) -> Shape:
    """The shape of what is sent. ``model``: its name where the request has none.

    Raises:
        Problem: 400, there are options of a stream, but there is no stream.
    """
    check_stream_options(options, streams=request.stream)
    with_usage = options is not None and options.include_usage
    return Shape(
        model if request.model is None else request.model,
        request.stream,
        with_usage,
        num_top,
        names_tier,
        with_usage and options is not None and options.continuous_usage_stats,
    )
