"""`POST /v1/responses` and `/v1/responses/input_tokens`: a request as an `Ask`. Stateless: the whole conversation comes
with each request, and nothing is kept of it.

Agents list tools of kinds that only OpenAI's servers run, beside the functions that they run themselves; these are left
out, and the model is told of the functions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.core.sequence import MAX_LOGPROBS
from splitinfer.server import values
from splitinfer.server.ask import Ask, Chat
from splitinfer.server.fields import HONOURED, Honoured, Ignored, Refused, Treatment, honoured, is_empty, is_one_of
from splitinfer.server.openai.chat import is_text_format, sampling_of, template_options
from splitinfer.server.openai.response_items import conversation
from splitinfer.server.problem import Problem, unsupported

_MOST_TOKENS = 2**31 - 1
_NO_STORE = "nothing is stored here; give the whole conversation as input"
_BY_KEYS = Ignored("requests are told apart by their keys")
_CACHED = Ignored("a prompt's beginning is found in the cache by its tokens")

_PROBABILITIES, _PACKED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
_OF_OTHER_TOOLS = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_OF_REASONING = ("effort", "summary", "generate_summary", "context", "mode")
_OF_TOOLS = ("name", "description", "parameters", "strict")
_REPEATED = {"max_tool_calls": int, "prompt_cache_key": str, "safety_identifier": str, "user": str}  # though ignored
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}

COUNTED: Mapping[str, Treatment] = {
    "model": HONOURED,
    "input": Honoured("text, or messages, reasoning, calls and their results; text only"),
    "instructions": HONOURED,
    "tools": Honoured("functions, not held to their schemas; other kinds are left out"),
    "tool_choice": Honoured("auto and none"),
    "parallel_tool_calls": HONOURED,
    "reasoning": Honoured("effort, where the model's template knows it; reasoning is given whole, not as a summary"),
    "text": Honoured("the format text only; verbosity is ignored, for the model is not told of it"),
    "conversation": Refused(_NO_STORE),
    "previous_response_id": Refused(_NO_STORE),
    "personality": Refused("the model has none; give instructions"),
    "truncation": Refused("a conversation is taken as it is", is_one_of("disabled")),
    # not OpenAI's, but known by many servers and clients
    "chat_template_kwargs": HONOURED,
    "enable_thinking": HONOURED,
}
FIELDS: Mapping[str, Treatment] = {
    **{name: treatment for name, treatment in COUNTED.items() if name != "personality"},
    "max_output_tokens": HONOURED,
    "temperature": HONOURED,
    "top_p": HONOURED,
    "top_logprobs": Honoured(f"with {_PROBABILITIES} in include"),
    "include": Honoured(f"{_PROBABILITIES}; {_PACKED_REASONING}, which is readable and in no way secret"),
    "stream": HONOURED,
    "stream_options": Honoured("include_obfuscation, which adds nothing here"),
    "metadata": Honoured("given back; nothing is stored"),
    "store": Refused(_NO_STORE, is_one_of(False)),
    "background": Refused(_NO_STORE, is_one_of(False)),
    "background_options": Refused(_NO_STORE, is_empty),
    "prompt": Refused(_NO_STORE),
    "moderation": Refused("nothing is moderated here"),
    "access_programs": Refused("there are none here", is_empty),
    "image": Refused("the model is given text only", is_empty),
    "max_tool_calls": Ignored("it is for tools that OpenAI's servers run, of which there are none here"),
    "context_management": Ignored("a conversation is taken as it is, and refused with the numbers if it is too long"),
    "user": _BY_KEYS,
    "safety_identifier": _BY_KEYS,
    "client_metadata": _BY_KEYS,  # Codex sends it; no field of the official types
    "service_tier": Ignored("there is one tier; priority is a header"),
    "prompt_cache_key": _CACHED,
    "prompt_cache_options": _CACHED,
    "prompt_cache_retention": _CACHED,
    # not OpenAI's, but known by many servers and clients
    "seed": HONOURED,
    "stop": HONOURED,
    "logit_bias": HONOURED,
    "presence_penalty": HONOURED,
    "frequency_penalty": HONOURED,
    "top_k": HONOURED,
    "min_p": HONOURED,
    "repetition_penalty": HONOURED,
    "stop_token_ids": HONOURED,
    "ignore_eos": HONOURED,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a client is shown of an answer.

    said: fields of the request that the answer repeats, as the API has them.
    num_top: most likely tokens beside each; ``None``: no probabilities.
    packs_reasoning: reasoning is also given in the form that clients hand back unread.
    """

    model: str
    streams: bool = False
    said: Mapping[str, Any] = field(default_factory=dict)
    num_top: int | None = None
    packs_reasoning: bool = False

    def with_sampling(self, ask: Ask, defaults: Recommended) -> Self:
        """The shape of an answer that also says how its tokens were chosen, with the model's own values where the
        request has none."""
        values = {**_SAMPLING, **defaults.values, **ask.sampling}
        return replace(self, said={**self.said, **{name: values[name] for name in _SAMPLING}})


def response_ask(body: Mapping[str, Any]) -> tuple[Ask, Shape]:
    """What a request asks, and in what shape.

    Raises:
        Problem: 400, in a sentence that names the field.
    """
    given = honoured(body, FIELDS)
    tools, parallel = _tools(given), values.flag("parallel_tool_calls", given.get("parallel_tool_calls", True))
    included = _included(given)
    num_top = _num_top(given, wanted=_PROBABILITIES in included)
    most = given.get("max_output_tokens")
    if most is not None:
        values.whole("max_output_tokens", most, 1, _MOST_TOKENS)
    sampling = sampling_of(given) | ({} if num_top is None else {"logprobs": num_top})
    ask = Ask(_chat(given, tools), sampling, most, one_call=not parallel)
    said = _said(body, given, tools, parallel=parallel, num_top=num_top)
    model = values.text("model", given.get("model", ""))
    return ask, Shape(model, _streams(given), said, num_top, _PACKED_REASONING in included)


def counted_input(body: Mapping[str, Any]) -> Chat:
    """The conversation whose tokens are to be counted.

    Raises:
        Problem: 400, in a sentence that names the field.
    """
    given = honoured(body, COUNTED)
    return _chat(given, _tools(given))


def _chat(given: Mapping[str, Any], tools: list[Mapping[str, Any]]) -> Chat:
    if "input" not in given:
        raise Problem(400, "input must be given", param="input")
    messages = conversation(given.get("instructions"), given["input"])
    _check_text(given)
    told = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in tools]
    return Chat(messages, tuple(told) if _may_call(given) else (), _options(given))


def _check_text(given: Mapping[str, Any]) -> None:
    text = values.mapping("text", given.get("text", {}))
    for name in text.keys() - {"format", "verbosity"}:
        raise _no_field("text", name)
    if not is_text_format(text.get("format")):
        raise unsupported("text.format", "answers cannot be held to a format")


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the template is told of reasoning."""
    reasoning = values.mapping("reasoning", given.get("reasoning", {}))
    for name in reasoning.keys() - {*_OF_REASONING}:
        raise _no_field("reasoning", name)
    if reasoning.get("mode") not in (None, "standard"):
        raise unsupported("reasoning.mode", "there is one mode, standard", reasoning["mode"])
    effort = reasoning.get("effort")
    if effort is not None:
        values.text("reasoning.effort", effort)
    return template_options({**given, "reasoning_effort": effort})


def _tools(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The functions, in this API's flat form."""
    tools = [_tool(f"tools[{i}]", one) for i, one in enumerate(values.listing("tools", given.get("tools", [])))]
    return [tool for tool in tools if tool is not None]


def _tool(name: str, given: Any) -> Mapping[str, Any] | None:
    tool = values.mapping(name, given)
    if values.text(f"{name}.type", tool.get("type")) != "function":
        return None
    values.text(f"{name}.name", tool.get("name"))
    values.mapping(f"{name}.parameters", tool.get("parameters") or {})
    return {"type": "function", **{key: tool[key] for key in _OF_TOOLS if tool.get(key) is not None}}


def _may_call(given: Mapping[str, Any]) -> bool:
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise unsupported("tool_choice", "a model cannot be made to call a tool; auto and none are", choice)
    return bool(choice == "auto")


def _included(given: Mapping[str, Any]) -> frozenset[str]:
    included = values.texts("include", values.listing("include", given.get("include", [])), 32)
    for i, one in enumerate(included):
        if one not in (_PROBABILITIES, _PACKED_REASONING, *_OF_OTHER_TOOLS):
            raise unsupported(f"include[{i}]", f"there are {_PROBABILITIES} and {_PACKED_REASONING}", one)
    return frozenset(included)


def _num_top(given: Mapping[str, Any], *, wanted: bool) -> int | None:
    number = values.whole("top_logprobs", given.get("top_logprobs", 0), 0, MAX_LOGPROBS)
    if number and not wanted:
        raise Problem(400, f"top_logprobs needs {_PROBABILITIES} in include", param="top_logprobs")
    return number if wanted else None


def _streams(given: Mapping[str, Any]) -> bool:
    streams = values.flag("stream", given.get("stream", False))
    options = values.mapping("stream_options", given.get("stream_options", {}))
    for name in options.keys() - {"include_obfuscation"}:
        raise _no_field("stream_options", name)
    if options and not streams:
        raise Problem(400, "stream_options is for streams only", param="stream_options")
    return streams


def _said(
    body: Mapping[str, Any],
    given: Mapping[str, Any],
    tools: list[Mapping[str, Any]],
    *,
    parallel: bool,
    num_top: int | None,
) -> dict[str, Any]:
    """The fields of the request that an answer repeats, also those that change nothing here."""
    metadata = values.mapping("metadata", given.get("metadata", {}))
    for name, value in metadata.items():
        values.text(f"metadata.{name:.64}", value)
    return {
        **{name: body[name] if type(body.get(name)) is kind else None for name, kind in _REPEATED.items()},
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": metadata,
        "parallel_tool_calls": parallel,
        "reasoning": {"effort": _effort(given), "summary": None},
        "text": {"format": {"type": "text"}},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [{"description": None, "parameters": None, "strict": None, **tool} for tool in tools],
        "top_logprobs": num_top or 0,
    }


def _effort(given: Mapping[str, Any]) -> Any:
    return given["reasoning"].get("effort") if "reasoning" in given else None


def _no_field(inside: str, name: str) -> Problem:
    return Problem(400, f"there is no field '{inside}.{name:.40}' here", param=f"{inside}.{name}")
