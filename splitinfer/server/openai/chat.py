"""`POST /v1/chat/completions`: a request as an `Ask`, and an answer as a document or as chunks of a stream."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splitinfer.core.sequence import MAX_LOGPROBS
from splitinfer.server import values
from splitinfer.server.ask import MAX_CHOICES, Ask, Chat
from splitinfer.server.fields import HONOURED, Honoured, Ignored, Refused, Treatment, honoured, is_empty, is_one_of
from splitinfer.server.openai.messages import template_messages
from splitinfer.server.problem import Problem, unsupported

MAX_STOPS = 16  # OpenAI's own limit is 4
_MOST_TOKENS = 2**31 - 1

_NO_STORE = "nothing is stored here"
FIELDS: Mapping[str, Treatment] = {
    "model": HONOURED,
    "messages": Honoured("text only"),
    "max_tokens": HONOURED,
    "max_completion_tokens": HONOURED,
    "temperature": HONOURED,
    "top_p": HONOURED,
    "n": Honoured(f"at most {MAX_CHOICES}"),
    "seed": HONOURED,
    "stop": Honoured(f"at most {MAX_STOPS}"),
    "stream": HONOURED,
    "stream_options": HONOURED,
    "logprobs": HONOURED,
    "top_logprobs": HONOURED,
    "logit_bias": HONOURED,
    "presence_penalty": HONOURED,
    "frequency_penalty": HONOURED,
    "tools": Honoured("functions"),
    "tool_choice": Honoured("auto and none"),
    "parallel_tool_calls": HONOURED,
    "reasoning_effort": Honoured("as far as the model's template knows it"),
    "response_format": Refused("answers cannot be held to a format", lambda value: is_text_format(value)),
    "audio": Refused("answers are text"),
    "modalities": Refused("answers are text", is_one_of(["text"])),
    "prediction": Refused("drafts come from the layout's draft model"),
    "web_search_options": Refused("nothing is searched for here"),
    "moderation": Refused("nothing is moderated here"),
    "functions": Refused("it is deprecated; give tools", is_empty),
    "function_call": Refused("it is deprecated; give tool_choice", is_one_of("none", "auto")),
    "store": Refused(_NO_STORE, is_one_of(False)),
    "metadata": Ignored(f"{_NO_STORE}, so there is nothing to find again"),
    "user": Ignored("requests are told apart by their keys"),
    "safety_identifier": Ignored("requests are told apart by their keys"),
    "service_tier": Ignored("there is one tier; priority is a header"),
    "prompt_cache_key": Ignored("a prompt's beginning is found in the cache by its tokens"),
    "prompt_cache_options": Ignored("the cache keeps what it has room for"),
    "prompt_cache_retention": Ignored("the cache keeps what it has room for"),
    "verbosity": Ignored("the model is not told of it"),
    # not OpenAI's, but known by many servers and clients
    "top_k": HONOURED,
    "min_p": HONOURED,
    "repetition_penalty": HONOURED,
    "stop_token_ids": HONOURED,
    "ignore_eos": HONOURED,
    "chat_template_kwargs": HONOURED,
    "enable_thinking": HONOURED,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a client is shown of an answer. ``num_top``: most likely tokens beside each; ``None``: no probabilities."""

    model: str
    streams: bool = False
    includes_usage: bool = False
    num_top: int | None = None


def chat_ask(body: Mapping[str, Any]) -> tuple[Ask, Shape]:
    """What a request asks, and in what shape.

    Raises:
        Problem: 400, in a sentence that names the field.
    """
    given = honoured(body, FIELDS)
    tools, options = _tools(given), template_options(given)
    if "messages" not in given:
        raise Problem(400, "messages must be given", param="messages")
    chat = Chat(template_messages(given["messages"]), tools, options)
    shape = shape_of(given, _num_top(given))
    sampling = sampling_of(given) | ({} if shape.num_top is None else {"logprobs": shape.num_top})
    one_call = not values.flag("parallel_tool_calls", given.get("parallel_tool_calls", True))
    return Ask(chat, sampling, _max_tokens(given), num_choices(given), one_call), shape


def shape_of(given: Mapping[str, Any], num_top: int | None) -> Shape:
    """The shape of what is sent."""
    streams = values.flag("stream", given.get("stream", False))
    options = values.mapping("stream_options", given.get("stream_options", {}))
    for name in options.keys() - {"include_usage", "include_obfuscation"}:
        raise Problem(400, f"there is no field 'stream_options.{name:.40}' here", param=f"stream_options.{name}")
    if options and not streams:
        raise Problem(400, "stream_options is for streams only", param="stream_options")
    usage = values.flag("stream_options.include_usage", options.get("include_usage") or False)
    return Shape(values.text("model", given.get("model", "")), streams, usage, num_top)


def sampling_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that have the same names in the API, checked for their types."""
    found: dict[str, Any] = {}
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if name in given:
            found[name] = values.number(name, given[name])
    if "top_k" in given:
        found["top_k"] = max(0, values.whole("top_k", given["top_k"], -1, _MOST_TOKENS))  # -1 is off elsewhere
    if "seed" in given:
        found["seed"] = values.whole("seed", given["seed"], -(2**63), 2**64 - 1) % 2**64
    if "stop" in given:
        found["stop"] = values.texts("stop", given["stop"], MAX_STOPS)
    if "stop_token_ids" in given:
        ids = values.listing("stop_token_ids", given["stop_token_ids"])
        found["stop_token_ids"] = tuple(values.whole("stop_token_ids", one, 0, _MOST_TOKENS) for one in ids)
    if "ignore_eos" in given:
        found["ignore_eos"] = values.flag("ignore_eos", given["ignore_eos"])
    if "logit_bias" in given:
        found["logit_bias"] = values.biases("logit_bias", given["logit_bias"])
    return found


def num_choices(given: Mapping[str, Any]) -> int:
    """How many answers are wanted."""
    return values.whole("n", given.get("n", 1), 1, MAX_CHOICES)


def is_text_format(value: Any) -> bool:
    """Whether a response format asks for nothing but text."""
    return value is None or (isinstance(value, dict) and value.get("type") == "text")


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    return values.whole(name, given[name], 1, _MOST_TOKENS) if name in given else None


def _num_top(given: Mapping[str, Any]) -> int | None:
    wanted = values.flag("logprobs", given.get("logprobs", False))
    if "top_logprobs" not in given:
        return 0 if wanted else None
    number = values.whole("top_logprobs", given["top_logprobs"], 0, MAX_LOGPROBS)
    if not wanted and number:
        raise Problem(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    return number if wanted else None


def _tools(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The functions that the model may call; none where it shall not."""
    tools = tuple(_tool(f"tools[{i}]", one) for i, one in enumerate(values.listing("tools", given.get("tools", []))))
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise unsupported("tool_choice", "a model cannot be made to call a tool; auto and none are", choice)
    return tools if choice == "auto" else ()


def _tool(name: str, given: Any) -> Mapping[str, Any]:
    tool = values.mapping(name, given)
    if tool.get("type") != "function":
        raise unsupported(f"{name}.type", "tools are functions", tool.get("type"))
    function = values.mapping(f"{name}.function", tool.get("function"))
    values.text(f"{name}.function.name", function.get("name"))
    values.mapping(f"{name}.function.parameters", function.get("parameters") or {})
    return {"type": "function", "function": {key: one for key, one in function.items() if one is not None}}


def template_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the template is told beside the conversation: the client's own values, and how much to reason."""
    options = dict(values.mapping("chat_template_kwargs", given.get("chat_template_kwargs", {})))
    for name in options.keys() & {"messages", "tools", "tokenize", "add_generation_prompt", "chat_template"}:
        raise unsupported(f"chat_template_kwargs.{name}", "it is set by the request itself")
    if "enable_thinking" in given:
        options["enable_thinking"] = values.flag("enable_thinking", given["enable_thinking"])
    return options | effort_options(given.get("reasoning_effort"), options)


def effort_options(effort: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a template is told of how much to reason: its word, and whether to at all."""
    if effort is None:
        return {}
    word = values.text("reasoning_effort", effort)
    thinks = {} if "enable_thinking" in options else {"enable_thinking": word != "none"}
    return {"reasoning_effort": word, **thinks}
