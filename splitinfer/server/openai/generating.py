"""The fields that all of OpenAI's answer requests share, and their meaning for the engine."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from splitinfer.core.sampling_params import MAX_BIASED, MAX_LOGPROBS
from splitinfer.server.ask import MAX_CHOICES, MAX_TOOLS, AnswerRequest
from splitinfer.server.fields import (
    MOST_TOKENS,
    Count,
    CountOrNone,
    Fields,
    Kinds,
    ListOf,
    TokenId,
    in_list,
    not_a,
    not_supported,
    wrong,
)
from splitinfer.server.openai.forms import Formed
from splitinfer.server.problem import invalid
from splitinfer.server.refused import REASONING, REFUSED

MAX_STOPS = 16  # OpenAI's own limit is 4
_MOST_DIGITS = 19  # of a token id; Python reads no more than 4,300 at once

# -- how tokens are chosen -------------------------------------------------------------------------


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    if given == []:  # llama.cpp's default
        return ()
    if not isinstance(given, dict):
        raise not_a("an object", given)
    if len(given) > MAX_BIASED:
        raise wrong(f" may have {MAX_BIASED:,} token ids, not {len(given):,}")
    for token, bias in given.items():
        if not token.isascii() or not token.isdigit() or len(token) > _MOST_DIGITS:
            raise not_a("an object whose keys are token ids", token)
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise not_a("a number", bias, inside=f".{token}")
    return tuple((int(token), bias) for token, bias in given.items())


Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
Stops = Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True), BeforeValidator(in_list)]
_NO_LIMIT = BeforeValidator(lambda given: None if type(given) is int and given in (-1, -2) else given)
Limit = Annotated[Count | None, _NO_LIMIT]
"""The token limit of an answer. -1, and llama.cpp's -2, mean as many as fit."""
Budget = Annotated[CountOrNone | None, _NO_LIMIT]
"""The token limit of reasoning. -1 means the answer's own limit."""
_LEAST_TOP_P = 1e-30  # leaves the likeliest token
_ANY_SEED = 2**32 - 1  # llama.cpp's value for no seed
_SAMPLED = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos", "min_tokens",
    "thinking_budget",
)  # fmt: skip


class Sampling(Fields):
    """How to sample, whichever API asks. Some values mean nothing, because clients of other servers send them to ask
    for nothing: 0 and -1 of ``top_k``, 0 and 1 of ``repetition_penalty``, a negative ``seed``. A ``top_p`` of 0 leaves
    the likeliest token."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[tuple[tuple[int, float], ...], PlainValidator(_biases)] = ()
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: Stops = Field(default_factory=list)
    stop_token_ids: ListOf[TokenId] = Field(default_factory=list)
    ignore_eos: bool | None = None
    min_tokens: CountOrNone | None = None
    thinking_budget: Budget = None

    @property
    def num_top(self) -> int | None:
        """Most likely tokens beside each; ``None``: no probabilities."""
        return None

    def sampling(self) -> dict[str, Any]:
        """Return the fields of ``SamplingParams`` that are given."""
        found = {name: value for name in _SAMPLED if (value := getattr(self, name)) is not None}
        if self.repetition_penalty is not None:
            found["repetition_penalty"] = self.repetition_penalty or 1.0
        if self.top_k is not None:
            found["top_k"] = max(0, self.top_k)
        if self.top_p is not None and 0 <= self.top_p < _LEAST_TOP_P:
            found["top_p"] = _LEAST_TOP_P
        if self.seed is not None and self.seed >= 0 and self.seed != _ANY_SEED:
            found["seed"] = self.seed
        if self.num_top is not None:
            found["logprobs"] = self.num_top
        lists = {
            "logit_bias": self.logit_bias,
            "stop": tuple(filter(None, self.stop)),
            "stop_token_ids": tuple(self.stop_token_ids),
        }
        return found | {name: values for name, values in lists.items() if values}


class Generating(Sampling, Formed, AnswerRequest):
    """Fields of all of OpenAI's requests for an answer."""

    refused = REFUSED


class Scored(Fields):
    """Log probabilities of an answer's tokens."""

    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0

    @property
    def num_top(self) -> int | None:
        """Most likely tokens beside each; ``None``: no probabilities."""
        return self.top_logprobs if self.logprobs or self.top_logprobs else None


class StreamOptions(Fields):
    """``continuous_usage_stats``: with ``include_usage``, every chunk has the usage so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Streaming(Generating):
    """``return_progress``: as in llama.cpp's server, a stream says how far the prompt is read."""

    stream_options: StreamOptions = StreamOptions()
    return_progress: bool = False

    @model_validator(mode="after")
    def _is_for_streams(self) -> Self:
        if self.stream_options.model_fields_set and not self.stream:
            raise wrong(" is for streams: say stream: true, or leave it out", inside=".stream_options")
        return self


# -- what a template is told -----------------------------------------------------------------------


def _of_the_template(given: dict[str, Any]) -> dict[str, Any]:
    for name in ("messages", "tools", "tokenize", "add_generation_prompt", "chat_template"):
        if name in given:
            raise not_supported("it is set by the request itself", inside=f".{name}")
    return given


class Reasoning(Fields):
    """``max_tokens``: of reasoning, before the answer begins."""

    refused = REASONING
    effort: str | None = None
    enabled: bool | None = None
    max_tokens: Budget = None


class ForTemplate(Fields):
    """The template's input beside the conversation: how much to reason and to say, and the client's own values."""

    refused = REFUSED
    reasoning: Reasoning | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_of_the_template)] = Field(default_factory=dict)

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort or (None if self.reasoning is None else self.reasoning.effort)

    def template_options(self, verbosity: str | None = None) -> dict[str, Any]:
        """Return the options for the template. ``verbosity``: used if the request's own field is not set."""
        options, effort = dict(self.chat_template_kwargs), self.effort
        thinks = self.enable_thinking
        if thinks is None and self.reasoning is not None:
            thinks = self.reasoning.enabled
        if thinks is not None:
            options["enable_thinking"] = thinks
        if (verbosity := self.verbosity or verbosity) is not None:
            options["verbosity"] = verbosity
        if effort is None:
            return options
        return {"enable_thinking": effort != "none", **options, "reasoning_effort": effort}

    def budget(self) -> dict[str, Any]:
        """Return the field of ``SamplingParams`` that bounds the tokens of reasoning, if there is a bound. If reasoning
        is off, the bound is 0, even if the template ignores that."""
        if self.template_options().get("enable_thinking") is False:
            return {"thinking_budget": 0}
        most = None if self.reasoning is None else self.reasoning.max_tokens
        return {} if most is None else {"thinking_budget": most}


# -- which tools may be called ---------------------------------------------------------------------


class Word(Fields):
    type: Literal["auto", "none", "required"]


class AllowedFunctions(Fields):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedFunction(Fields):
    type: Literal["function"]
    name: str


def _flat(given: Any) -> Any:
    """Return a tool choice in the form of responses; a chat's choice has one more object inside."""
    match given:
        case str():
            return {"type": given}
        case {"type": "function", "function": dict(named)}:
            return {**named, "type": "function"}
        case {"type": "allowed_tools", "allowed_tools": {"tools": list(tools), **rest}}:
            flat = [one.get("function", one) if isinstance(one, dict) else one for one in tools]
            return {**rest, "type": "allowed_tools", "tools": flat}
    return given


Choice = Word | AllowedFunctions | NamedFunction
FunctionChoice = Annotated[Choice, Kinds("type"), BeforeValidator(_flat)]
Told = tuple[Mapping[str, Any], ...]
"""Functions in the form that templates know."""


def chosen(functions: Sequence[Mapping[str, Any]], choice: Choice) -> tuple[Told, Told, bool]:
    """Return the functions for the prompt, the functions that the model may call, and whether it must call one. The
    choice does not change the prompt, so the cache still has it.

    Raises:
        Problem: 400, the choice names an unknown function, or requires a call although there are no functions.
    """
    told: Told = tuple({"type": "function", "function": one} for one in functions)
    names = frozenset(one["name"] for one in functions)
    match choice:
        case Word(type="none"):
            return told, (), False
        case NamedFunction(name=name):
            if name not in names:
                raise invalid("tool_choice", f"tool_choice must name one of the tools, not {name!r:.60}")
            return told, tuple(tool for tool in told if tool["function"]["name"] == name), True
        case AllowedFunctions(mode=mode, tools=entries):
            for i, one in enumerate(entries):
                if not isinstance(own := one.get("name"), str) or own not in names:
                    where = f"tool_choice.tools[{i}].name"
                    raise invalid(where, f"{where} must be the name of one of the tools, not {own!r:.60}")
            allowed = frozenset(one["name"] for one in entries)
            may = tuple(tool for tool in told if tool["function"]["name"] in allowed)
        case Word(type=mode):
            may = told
    if mode == "required" and not may:
        raise invalid("tool_choice", "tool_choice requires a call, but there are no tools")
    return told, may, mode == "required"
