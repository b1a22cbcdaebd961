"""`POST /v1/responses` and `/v1/responses/input_tokens`: a request as an `Ask`. Stateless: the whole conversation comes
with each request, and nothing is kept of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.core.sampling_params import MAX_LOGPROBS
from splitinfer.server.ask import Ask, Chat
from splitinfer.server.fields import EMPTY, Count, CountOrNone, Fields, Ignored, Kinds, Name, Refused, not_supported
from splitinfer.server.openai.generating import (
    FOR_TEMPLATE,
    NOT_HIDDEN,
    ByKeys,
    CacheKey,
    CacheRoom,
    Generating,
    JsonFormat,
    NamedSchema,
    OneTier,
    PlainFormat,
    TemplateOptions,
    check_stream_options,
    forced,
    form_of,
    grammar_of,
    small_metadata,
    template_options,
)
from splitinfer.server.openai.response_items import (
    AllowedFunctions,
    Function,
    FunctionChoice,
    Input,
    NamedFunction,
    ResponseTools,
    callable_names,
    conversation,
    functions_of,
)
from splitinfer.server.problem import Problem

_NO_STORE = Refused("nothing is stored here; give the whole conversation as input")
_NOT_STORED = Refused(_NO_STORE.why, (False,))
_AS_IT_IS = "a conversation is taken as it is"
_WHOLE = Ignored("reasoning is returned whole")

_PROBABILITIES, _PACKED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
_OF_OTHER_TOOLS = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_REPEATED = {"max_tool_calls": int, "prompt_cache_key": str, "safety_identifier": str, "user": str}  # though ignored
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def _includable(given: str) -> str:
    if given not in (_PROBABILITIES, _PACKED_REASONING, *_OF_OTHER_TOOLS):
        raise not_supported(f"there are {_PROBABILITIES} and {_PACKED_REASONING}", value=given)
    return given


class Reasoning(Fields):
    """Reasoning of responses"""

    effort: str | None = Field(None, description=f"{FOR_TEMPLATE}; `none` turns reasoning off")
    summary: Annotated[Any, _WHOLE] = None
    generate_summary: Annotated[Any, _WHOLE] = None
    context: Annotated[Any, Ignored("the model's template decides which reasoning it keeps")] = None
    mode: Annotated[Any, Refused("there is one mode, standard", ("standard",))] = None
    max_tokens: CountOrNone | None = Field(None, description="Most tokens of reasoning; then the answer begins")


class FlatSchema(NamedSchema):
    """JSON of a schema, in one object"""

    type: Literal["json_schema"]


class Text(Fields):
    """Text of responses"""

    verbosity: str | None = Field(None, description=FOR_TEMPLATE)
    format: Annotated[PlainFormat | JsonFormat | FlatSchema, Kinds("type")] | None = Field(
        None, description="The form of the answer"
    )


class CacheOptions(Fields):
    """Options of the cache"""

    mode: CacheRoom = None
    ttl: CacheRoom = None
    comparison_response_id: Annotated[Any, Refused("nothing is stored here that could be compared")] = None
    prewarm: Annotated[
        Any, Refused("ask for one token instead: it leaves the prompt in the cache", (False,))
    ] = None  # fmt: skip


class ResponseStreamOptions(Fields):
    """Options of a stream of responses"""

    include_obfuscation: bool = Field(False, description=NOT_HIDDEN)


class _Asked(Fields):
    model: Name | None = Field(None, description="Any name, because there is only one model")
    input: Input = Field(description="Text, or messages, reasoning, tool calls and their results; text only")
    instructions: str | None = Field(None, description="System message before the input")
    tools: ResponseTools = Field(default_factory=list, description="Functions that the model may call")
    tool_choice: FunctionChoice = Field("auto", description="Whether the model may call a tool, and which")
    parallel_tool_calls: bool = Field(True, description="If false, an answer ends after its first call")
    reasoning: Reasoning | None = Field(None, description="How much to reason")
    text: Text | None = Field(None, description="How long the answer should be, and its format")
    chat_template_kwargs: TemplateOptions | None = Field(None, description="More options for the model's template")
    enable_thinking: bool | None = Field(None, description=FOR_TEMPLATE)
    conversation: Annotated[Any, _NO_STORE] = None
    previous_response_id: Annotated[Any, _NO_STORE] = None
    truncation: Annotated[Any, Refused(_AS_IT_IS, ("disabled",))] = None

    @property
    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    def forced_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The functions one of which the model must call; none where it need not.

        Raises:
            Problem: 400, no tool has that name, or no tools were given.
        """
        choice = self.tool_choice
        name = choice.name if isinstance(choice, NamedFunction) else None
        mode = choice.mode if isinstance(choice, AllowedFunctions) else choice
        return forced(self.chat().tools, name, must=mode == "required")

    def chat(self) -> Chat:
        functions = functions_of(self.tools)
        may = callable_names(self.tool_choice, functions)
        told = [{"name": one.told_name, **one.told} for one in functions if one.told_name in may]
        options = template_options(
            self.chat_template_kwargs,
            thinks=self.enable_thinking,
            verbosity=None if self.text is None else self.text.verbosity,
            effort=self.effort,
        )
        tools = tuple({"type": "function", "function": one} for one in told)
        return Chat(conversation(self.instructions, self.input), tools, options)


class InputRequest(_Asked):
    """A request for the number of a conversation's tokens."""

    personality: Annotated[Any, Refused("the model has none; give instructions")] = None


class ResponseRequest(_Asked, Generating):
    """A request for a response."""

    max_output_tokens: Count | None = Field(
        None, description="Token limit of the answer; at most the room that the context leaves"
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = Field(
        0, description=f"Returns this many of the most likely tokens for each; with {_PROBABILITIES} in include"
    )
    include: Annotated[list[Annotated[str, AfterValidator(_includable)]], Field(max_length=32, fail_fast=True)] = Field(
        default_factory=list,
        description=f"`{_PROBABILITIES}`; `{_PACKED_REASONING}`, which is readable and not secret",
    )
    stream_options: ResponseStreamOptions | None = Field(None, description="Only with stream")
    metadata: Annotated[dict[str, str], BeforeValidator(small_metadata)] = Field(
        default_factory=dict, description="Returned with the answer; nothing is stored"
    )
    max_tool_calls: Annotated[
        Any, Ignored("it is for tools that OpenAI's servers run; there are none here")
    ] = None  # fmt: skip
    safety_identifier: ByKeys = None
    client_metadata: ByKeys = None  # Codex sends it (codex-rs, `ResponsesApiRequest`); no field of the official types
    service_tier: OneTier = None
    prompt_cache_key: CacheKey = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: CacheRoom = None
    store: Annotated[Any, _NOT_STORED] = None
    background: Annotated[Any, _NOT_STORED] = None
    background_options: Annotated[Any, Refused(_NO_STORE.why, EMPTY)] = None
    prompt: Annotated[Any, _NO_STORE] = None
    moderation: Annotated[Any, Refused("the server does not moderate")] = None
    access_programs: Annotated[Any, Refused("there are none here", EMPTY)] = None
    image: Annotated[Any, Refused("the model is given text only", EMPTY)] = None
    context_management: Annotated[Any, Refused(_AS_IT_IS, EMPTY)] = None

    def form(self) -> dict[str, Any]:
        form = None if self.text is None else self.text.format
        if isinstance(form, FlatSchema):
            found: dict[str, Any] = {"grammar": grammar_of(form.schema_, "text.format")}
        else:
            found = form_of(form)
        if self.reasoning is not None and self.reasoning.max_tokens is not None:
            found["thinking_budget"] = self.reasoning.max_tokens
        return found


@dataclass(frozen=True, slots=True)
class Shape:
    """What a client is shown of an answer.

    said: fields of the request that the answer repeats, as the API has them.
    num_top: most likely tokens beside each; ``None``: no probabilities.
    packs_reasoning: reasoning is also given in the form that clients hand back unread.
    spaces: of functions in a namespace, by the names that the model is told, the namespace and the name in it.
    """

    model: str
    streams: bool = False
    said: Mapping[str, Any] = field(default_factory=dict)
    num_top: int | None = None
    packs_reasoning: bool = False
    spaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def with_sampling(self, ask: Ask, defaults: Recommended) -> Self:
        """The shape of an answer that also says how its tokens were chosen, with the model's own values where the
        request has none."""
        values = {**_SAMPLING, **defaults.values, **ask.sampling}
        return replace(self, said={**self.said, **{name: values[name] for name in _SAMPLING}})


def response_ask(request: ResponseRequest, model: str = "") -> tuple[Ask, Shape]:
    """What a request asks, and in what shape. ``model``: the name in the answer where the request has none.

    Raises:
        Problem: 400, fields contradict each other.
    """
    check_stream_options(request.stream_options, streams=request.stream)
    if request.top_logprobs and _PROBABILITIES not in request.include:
        raise Problem(400, f"top_logprobs needs {_PROBABILITIES} in include", param="top_logprobs")
    num_top = request.top_logprobs if _PROBABILITIES in request.include else None
    sampling = request.sampling() | ({} if num_top is None else {"logprobs": num_top}) | request.form()
    ask = Ask(
        request.chat(),
        sampling,
        request.max_output_tokens,
        one_call=not request.parallel_tool_calls,
        must_call=request.forced_tools(),
    )
    functions = functions_of(request.tools)
    shape = Shape(
        model if request.model is None else request.model,
        request.stream,
        _said(request, functions),
        num_top,
        _PACKED_REASONING in request.include,
        {one.told_name: (one.namespace, one.name) for one in functions if one.namespace is not None},
    )
    return ask, shape


def _format_said(request: ResponseRequest) -> dict[str, Any]:
    form = None if request.text is None else request.text.format
    return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_unset=True)


def _said(request: ResponseRequest, functions: list[Function]) -> dict[str, Any]:
    """The fields of the request that an answer repeats, also those that change nothing here."""
    choice = request.tool_choice
    idle = {name: getattr(request, name) for name in _REPEATED}
    untold = {"type": "function", "description": None, "parameters": None, "strict": None}
    return {
        **{name: idle[name] if type(idle[name]) is kind else None for name, kind in _REPEATED.items()},
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata,
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning": {"effort": request.effort, "summary": None},
        "text": {"format": _format_said(request)},
        "tool_choice": choice.model_dump(exclude_unset=True) if isinstance(choice, Fields) else choice,
        "tools": [{**untold, "name": one.told_name, **one.told} for one in functions],
        "top_logprobs": request.top_logprobs,
    }
