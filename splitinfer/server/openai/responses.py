"""`POST /v1/responses` and `/v1/responses/input_tokens`: a request as an `Ask`. Stateless: the whole conversation comes
with each request, and nothing is kept of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.core.sampling_params import MAX_LOGPROBS
from splitinfer.server.ask import MAX_TOOLS, Ask, Chat, in_force
from splitinfer.server.fields import Fields, Kinds, Name, wrong
from splitinfer.server.openai.forms import JsonFormat, NamedSchema, PlainFormat, form_of, grammar_of
from splitinfer.server.openai.generating import (
    ForTemplate,
    FunctionChoice,
    Generating,
    Limit,
    Told,
    Word,
    chosen,
)
from splitinfer.server.openai.response_items import (
    Function,
    Input,
    ResponseTools,
    conversation,
    functions_of,
)
from splitinfer.server.stream import json_line

_PROBABILITIES, _PACKED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
_MOST_METADATA = 1 << 14
_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


class FlatSchema(NamedSchema):
    """JSON of a schema, in one object."""

    type: Literal["json_schema"]


def _small(metadata: dict[str, Any]) -> dict[str, Any]:
    """What comes back with the answer: of a stream, with each event that has the whole response."""
    if (size := len(json_line(metadata))) > _MOST_METADATA:
        raise wrong(f" may have {_MOST_METADATA:,} characters of JSON, not {size:,}")
    return metadata


class Text(Fields):
    verbosity: str | None = None
    format: Annotated[PlainFormat | JsonFormat | FlatSchema, Kinds("type")] | None = None


class InputRequest(ForTemplate):
    """A request for the number of a conversation's tokens."""

    model: Name | None = None
    input: Input
    instructions: str | None = None
    tools: ResponseTools = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: FunctionChoice = Word(type="auto")
    text: Text = Text()

    @property
    def functions(self) -> list[Function]:
        return functions_of(self.tools)

    def chosen(self) -> tuple[Told, Told]:
        """As the function."""
        return chosen([one.told for one in self.functions], self.tool_choice)

    def chat(self) -> Chat:
        messages = conversation(self.instructions, self.input)
        return Chat(messages, self.chosen()[0], self.template_options(self.text.verbosity))


class ResponseRequest(InputRequest, Generating):
    max_output_tokens: Limit = None
    parallel_tool_calls: bool = True  # false: an answer ends after its first call
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    include: list[str] = Field(default_factory=list, max_length=32, fail_fast=True)
    metadata: Annotated[dict[str, Any], AfterValidator(_small)] = Field(default_factory=dict)

    def form_of_text(self) -> dict[str, Any]:
        form = self.text.format
        if isinstance(form, FlatSchema):
            return {"grammar": grammar_of(form.schema_, "text.format")}
        return form_of(form, "text.format")


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
        values = {**in_force(defaults), **ask.sampling}
        return replace(self, said={**self.said, **{name: values[name] for name in _SAMPLING}})


def response_ask(request: ResponseRequest, model: str = "") -> tuple[Ask, Shape]:
    """What a request asks, and in what shape. ``model``: the name in the answer where the request has none.

    Raises:
        Problem: 400, fields contradict each other.
    """
    num_top = request.top_logprobs if _PROBABILITIES in request.include or request.top_logprobs else None
    sampling = request.sampling() | ({} if num_top is None else {"logprobs": num_top})
    ask = Ask(
        request.chat(),
        sampling | request.form(request.form_of_text(), "text.format") | request.budget(),
        request.max_output_tokens,
        one_call=not request.parallel_tool_calls,
        must_call=request.chosen()[1],
        grows=request.stream,
    )
    functions = request.functions
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
    form = request.text.format
    return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_unset=True)


def _said(request: ResponseRequest, functions: list[Function]) -> dict[str, Any]:
    """The fields of the request that an answer repeats, and those that the API's answers have beside them."""
    choice = request.tool_choice
    untold = {"type": "function", "description": None, "parameters": None, "strict": None}
    return {
        **dict.fromkeys(("max_tool_calls", "prompt_cache_key", "safety_identifier", "user")),
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata,
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning": {"effort": request.effort, "summary": None},
        "text": {"format": _format_said(request)},
        "tool_choice": choice.type if isinstance(choice, Word) else choice.model_dump(exclude_unset=True),
        "tools": [{**untold, **one.told} for one in functions],
        "top_logprobs": request.top_logprobs,
    }
