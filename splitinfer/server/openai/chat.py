"""`POST /v1/chat/completions`: a request as an `Ask`, and answers: chunks of a stream, or one document made of the
same pieces.

Reasoning is written under both names that clients know, ``reasoning`` and ``reasoning_content``. A call of a tool is
one delta, with its index, id, name and all of its arguments.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from splitinfer.core.sequence import MAX_LOGPROBS
from splitinfer.engine.coordinator.requests import TokenLogprobs
from splitinfer.server.answer import Piece
from splitinfer.server.ask import MAX_TOOLS, Ask, Chat
from splitinfer.server.fields import EMPTY, AsGiven, Count, Fields, Ignored, Kinds, Refused
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
    form_of,
    small_metadata,
    template_options,
)
from splitinfer.server.openai.messages import Messages, template_messages
from splitinfer.server.problem import Problem, invalid
from splitinfer.server.spans import Usage
from splitinfer.server.stream import event, json_line
from splitinfer.text.answer import AnswerPart, ReasoningPart, TextPart, ToolCallPart

STRICT = "`true`: a call that the model begins keeps the schema; where that cannot be enforced it is refused"


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
        """What the template is told beside the conversation."""
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
        choice, told = self.tool_choice, self.told_tools()
        if isinstance(choice, _Named):
            return tuple(tool for tool in told if tool["function"]["name"] == choice.function.name)
        must = choice == "required" if isinstance(choice, str) else choice.allowed_tools.mode == "required"
        if must and not told:
            raise invalid("tool_choice", "tool_choice requires a call, but there are no tools")
        return told if must else ()


class ChatReasoning(Fields):
    """Reasoning of chats"""

    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        None, description="Most tokens of reasoning; then the answer begins"
    )
    effort: str | None = Field(None, description=f"{FOR_TEMPLATE}; `none` turns reasoning off")
    exclude: Annotated[Any, Refused("reasoning is returned whole", (False,))] = None
    enabled: Annotated[Any, Ignored("effort `none` turns it off")] = None


class ChatRequest(Conversation, Generating, OfMlxLm, OfLlamaCpp):
    """A request for a chat completion."""

    messages: Messages = Field(description="The conversation, text only")
    max_tokens: Count | None = Field(
        None, description="Token limit of the answer; at most the room that the context leaves"
    )
    max_completion_tokens: Count | None = Field(None, description="Takes precedence over max_tokens")
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


@dataclass(frozen=True, slots=True)
class Shape:
    """What a client is shown of an answer. ``num_top``: most likely tokens beside each; ``None``: no probabilities.
    ``always_usage``: every chunk has the usage so far. ``names_tier``: the tier of service is said."""

    model: str
    streams: bool = False
    includes_usage: bool = False
    num_top: int | None = None
    names_tier: bool = False
    always_usage: bool = False


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
    must_call = request.forced_tools()
    if must_call and "grammar" in sampling:
        raise invalid("response_format", "response_format is for answers, and tool_choice requires a call")
    most = request.max_completion_tokens or request.max_tokens
    shape = shape_of(request, request.stream_options, num_top, model, names_tier=request.service_tier is not None)
    return Ask(chat, sampling, most, request.n, not request.parallel_tool_calls, must_call), shape


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


# -- the answer ------------------------------------------------------------------------------------


TokenText = Callable[[int], bytes]
"""The bytes of one token id."""

ONLY_TIER = "default"
# A request that was ended, by its id or its deadline, has an answer that is cut off as at its length.
_REASONS = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "abort": "length"}


@dataclass(slots=True)
class ChatWriter:
    """Writes one answer. ``created``: seconds since 1970. ``fingerprint``: while it is the same, a seed gives the same
    answer. ``usage_now``: the usage so far."""

    answer_id: str
    created: int
    shape: Shape
    token_text: TokenText
    new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"
    fingerprint: str | None = None
    usage_now: Callable[[], Usage] = lambda: Usage(0)
    _num_calls: dict[int, int] = field(default_factory=dict)  # by choice
    _frames: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # what is around a choice's text

    # -- a stream ------------------------------------------------------------------------------

    def written(self, piece: Piece) -> bytes:
        """The chunks of a piece as events of a stream."""
        has_logprobs = piece.logprobs and self.shape.num_top is not None
        match piece.parts:
            case (TextPart(text),) if piece.finish_reason is None and not has_logprobs and not self.shape.always_usage:
                return self._text_event(piece.choice, text)
        return b"".join(event(chunk) for chunk in self.chunks(piece))

    def _text_event(self, choice: int, text: str) -> bytes:
        """The event of nothing but text, which nearly every token is: all but the text is always the same."""
        frame = self._frames.get(choice)
        if frame is None:
            # What else could hold these characters has its quotation marks escaped, or comes before them.
            before, name, after = event(self._chunk([_choice(choice, {"content": ""})])).rpartition(b'"content":""')
            frame = self._frames[choice] = before + name[:-2], after
        return frame[0] + json_line(text).encode("utf-8", "replace") + frame[1]

    def first(self, choice: int) -> dict[str, Any]:
        """The chunk with which a choice begins."""
        return self._chunk([_choice(choice, {"role": "assistant", "content": ""})])

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The chunks of a piece: one for each part; the last has the log probabilities, and another the reason."""
        deltas = [self._delta(piece.choice, part) for part in piece.parts]
        chunks = [_choice(piece.choice, delta) for delta in deltas]
        if piece.logprobs and self.shape.num_top is not None:
            chunks = chunks or [_choice(piece.choice, {})]
            chunks[-1]["logprobs"] = self._logprobs(piece.logprobs)
        if piece.finish_reason is not None:
            chunks.append({**_choice(piece.choice, {}), "finish_reason": _REASONS[piece.finish_reason]})
        return [self._chunk([chunk]) for chunk in chunks]

    def usage_chunk(self, usage: Usage) -> dict[str, Any] | None:
        """The chunk with the usage, which has no choices; ``None`` where it was not asked for."""
        return {**self._chunk([]), "usage": usage_of(usage)} if self.shape.includes_usage else None

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = usage_so_far(self.shape, self.usage_now)
        return {**self._head("chat.completion.chunk"), "choices": choices, **usage}

    # -- a document ----------------------------------------------------------------------------

    def document(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        choices = [self._whole(choice, pieces) for choice in sorted({piece.choice for piece in pieces})]
        return {**self._head("chat.completion"), "choices": choices, "usage": usage_of(usage)}

    def _whole(self, choice: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        own = [piece for piece in pieces if piece.choice == choice]
        parts = [part for piece in own for part in piece.parts]
        logprobs = [one for piece in own for one in piece.logprobs]
        return {
            "index": choice,
            "message": self._message(choice, parts),
            "logprobs": None if self.shape.num_top is None else self._logprobs(logprobs),
            "finish_reason": _REASONS[own[-1].finish_reason or "stop"],
        }

    def _message(self, choice: int, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        text = "".join(part.text for part in parts if isinstance(part, TextPart))
        reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
        calls = [self._call(choice, part) for part in parts if isinstance(part, ToolCallPart)]
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls:
            message["tool_calls"] = [{key: one for key, one in call.items() if key != "index"} for call in calls]
        return message

    # -- both ----------------------------------------------------------------------------------

    def _head(self, kind: str) -> dict[str, Any]:
        tier = {"service_tier": ONLY_TIER} if self.shape.names_tier else {}
        head = {"id": self.answer_id, "object": kind, "created": self.created, "model": self.shape.model}
        return {**head, "system_fingerprint": self.fingerprint, **tier}

    def _delta(self, choice: int, part: AnswerPart) -> dict[str, Any]:
        match part:
            case TextPart(text):
                return {"content": text}
            case ReasoningPart(text):
                return {"reasoning": text, "reasoning_content": text}
            case ToolCallPart():
                return {"tool_calls": [self._call(choice, part)]}

    def _call(self, choice: int, part: ToolCallPart) -> dict[str, Any]:
        index = self._num_calls.get(choice, 0)
        self._num_calls[choice] = index + 1
        function = {"name": part.name, "arguments": part.arguments}
        return {"index": index, "id": part.call_id or self.new_id(), "type": "function", "function": function}

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = [token_logprob(one, self.shape.num_top or 0, self.token_text) for one in tokens]
        return {"content": content, "refusal": None}


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def token_logprob(one: TokenLogprobs, num_top: int, token_text: TokenText) -> dict[str, Any]:
    """A token's log probability, and those of the ``num_top`` likeliest tokens there, as OpenAI's API says it."""

    def written(token_id: int, logprob: float) -> dict[str, Any]:
        raw = token_text(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    return {**written(one.token_id, one.logprob), "top_logprobs": [written(*top) for top in one.top[:num_top]]}


def usage_so_far(shape: Shape, usage_now: Callable[[], Usage]) -> dict[str, Any]:
    """The usage in a chunk that is not the last one: none, null, or what it is by now."""
    if not shape.includes_usage:
        return {}
    return {"usage": usage_of(usage_now()) if shape.always_usage else None}


def usage_of(usage: Usage) -> dict[str, Any]:
    """Usage as OpenAI's API says it, and in a field of our own, where there were drafts, what became of them. (OpenAI's
    ``accepted_prediction_tokens`` is of predictions that a client sends.)"""
    drafts = {"splitinfer": {"drafts_tried": usage.tried, "drafts_right": usage.right}} if usage.tried else {}
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
        **drafts,
    }
