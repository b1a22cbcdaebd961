"""`POST /v1/responses` and `/v1/responses/input_tokens`: a request as an `Ask`. Stateless: the whole conversation comes
with each request, and nothing is kept of it.
"""

from functools import cached_property
from typing import Annotated, Any, Literal

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

    @cached_property
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

    @property
    def num_top(self) -> int | None:
        """Most likely tokens beside each; ``None``: no probabilities."""
        return self.top_logprobs if _PROBABILITIES in self.include or self.top_logprobs else None

    @property
    def packs_reasoning(self) -> bool:
        """Whether reasoning is also given in the form that clients hand back unread."""
        return _PACKED_REASONING in self.include

    def asks(self) -> tuple[Ask]:
        sampling = self.sampling() | ({} if self.num_top is None else {"logprobs": self.num_top})
        sampling |= self.form(self.form_of_text(), "text.format") | self.budget()
        one_call, must_call = not self.parallel_tool_calls, self.chosen()[1]
        return (Ask(self.chat(), sampling, self.max_output_tokens, 1, one_call, must_call, self.stream),)

    def said(self, defaults: Recommended) -> dict[str, Any]:
        """The fields that an answer repeats, those that the API's answers have beside them, and how tokens are chosen,
        by the model's ``defaults`` where nothing is said."""
        choice, form = self.tool_choice, self.text.format
        untold = {"type": "function", "description": None, "parameters": None, "strict": None}
        told = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_unset=True)
        sampling = {**in_force(defaults), **self.sampling()}
        return {
            **dict.fromkeys(("max_tool_calls", "prompt_cache_key", "safety_identifier", "user")),
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning": {"effort": self.effort, "summary": None},
            "text": {"format": told},
            "tool_choice": choice.type if isinstance(choice, Word) else choice.model_dump(exclude_unset=True),
            "tools": [{**untold, **one.told} for one in self.functions],
            "top_logprobs": self.top_logprobs,
            **{name: sampling[name] for name in _SAMPLING},
        }
